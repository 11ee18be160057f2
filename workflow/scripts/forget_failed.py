"""Remove the records of trials and bring-ups that failed, so that the next run tries them again; raw files stay."""

from pathlib import Path

from kvladder.plan.estimate import failed_records, forget
from kvladder.plan.progress import Progress

with Progress(Path(snakemake.log[0])) as say:
    for path in failed_records(Path(snakemake.params.results)):
        say(f"forgotten: {path}")
        forget(path)
