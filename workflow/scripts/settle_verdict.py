"""A trial's final verdict: its own, and what its block found."""

from pathlib import Path

from kvladder.config.records import Verdict
from kvladder.judge import BlockVerdict, apply_block

own = Verdict.model_validate_json(Path(snakemake.input.own).read_bytes())
block = BlockVerdict.model_validate_json(Path(snakemake.input.block).read_bytes())
verdict = apply_block(own, block)
Path(snakemake.output[0]).write_text(verdict.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
