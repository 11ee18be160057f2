"""Measure one cell of the truth bench. Arguments: output, log, server, cell. Run by `shell`, see rules/measure.smk."""

import sys
from pathlib import Path

from kvladder.bench import cell
from kvladder.config.bench import BenchCell
from kvladder.plan.job import Job, run_job

*PATHS, SERVER, CELL = sys.argv[1:]


def work(job: Job) -> None:
    """Run the client; one that fails is a result."""
    record = cell.run(BenchCell.model_validate_json(CELL), Path(SERVER), job.out.parent)
    if record.error is not None:
        job.say(f"{record.cell.client}: {record.error}")


sys.exit(run_job(work, PATHS))
