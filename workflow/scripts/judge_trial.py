"""Judge one trial by its own files."""

from pathlib import Path

from kvladder.config.experiment import GateConfig
from kvladder.judge import judge_trial

verdict = judge_trial(Path(snakemake.input.trial).parent, GateConfig.model_validate(snakemake.params.gates))
Path(snakemake.output[0]).write_text(verdict.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
