"""Install the experiment's stack. Run by `shell`, see rules/measure.smk."""

import sys

from kvladder.plan.job import Job, run_job
from kvladder.stack.install import install
from kvladder.stack.paths import folder_of


def work(job: Job) -> None:
    """Install; the output is a copy of the stamp."""
    install(folder_of(job.out), job.say, job.out)


sys.exit(run_job(work, sys.argv[1:]))
