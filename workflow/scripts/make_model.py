"""Make the folder that the engine takes the model from. Run by `shell`, see rules/measure.smk."""

import sys
from pathlib import Path

from kvladder.plan.job import Job, run_job
from kvladder.stack.model import make


def work(job: Job) -> None:
    """Write the model's config.json, or link a checkpoint's files."""
    make(job.config.model, job.out.parent, Path(job.stamp.interpreter))


sys.exit(run_job(work, sys.argv[1:]))
