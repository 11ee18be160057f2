"""Bring one setup up once and record what it says of itself. Run by `shell`, see rules/measure.smk."""

import sys

from kvladder.plan.job import Job, run_job
from kvladder.trial.runner import run_start, write_atomically
from kvladder.trial.session import Job as Serving
from kvladder.trial.session import Stack


def work(job: Job) -> None:
    """Write the start record; the servers' logs stay beside it, in a folder of its name."""
    setup, _, run = job.out.stem.rpartition("-")
    serving = Serving(job.config, Stack.load(job.stack_folder, job.stamp_path), job.model_folder, job.say)
    record = run_start(serving, setup, run, job.out.with_suffix(""))
    write_atomically(job.out, record.model_dump_json(by_alias=True, indent=1))


sys.exit(run_job(work, sys.argv[1:]))
