"""Capture one setup for timelines: its servers come and go here, under a profiler. Run by `shell`."""

import sys

from kvladder.plan.job import Job, run_job
from kvladder.timeline.capture import run_capture
from kvladder.trial.runner import write_atomically
from kvladder.trial.session import Job as Serving
from kvladder.trial.session import Stack


def work(job: Job) -> None:
    """Write the capture's record beside its files."""
    serving = Serving(job.config, Stack.load(job.stack_folder, job.stamp_path), job.model_folder, job.say)
    record = run_capture(serving, job.out.parent.name, job.out.parent)
    write_atomically(job.out, record.model_dump_json(by_alias=True, indent=1))


sys.exit(run_job(work, sys.argv[1:]))
