"""Judge what only shows across the trials of one block."""

from pathlib import Path

from kvladder.config.experiment import GateConfig
from kvladder.config.records import Verdict
from kvladder.judge import judge_block

folders = [Path(path).parent for path in snakemake.input.trials]
verdicts = [Verdict.model_validate_json(Path(path).read_bytes()) for path in snakemake.input.verdicts]
block = judge_block(folders, verdicts, GateConfig.model_validate(snakemake.params.gates))
Path(snakemake.output[0]).write_text(block.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
