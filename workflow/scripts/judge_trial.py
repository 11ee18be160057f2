"""Judge one trial by its own files."""

from pathlib import Path

from kvladder.config.experiment import GateConfig
from kvladder.judge import judge_trial

LARGE_BYTES = 8 << 20
"""Of requests. Tables parse smaller trials faster than this job would load what keeps their columns."""

folder = Path(snakemake.input.trial).parent
verdict = judge_trial(folder, GateConfig.model_validate(snakemake.params.gates))
if verdict.status == "valid" and sum(path.stat().st_size for path in folder.glob("*.requests.jsonl")) >= LARGE_BYTES:
    from kvladder.tables.columns import keep

    keep(folder)
Path(snakemake.output[0]).write_text(verdict.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
