"""Build the truth bench's reference server. Run by `shell`, see rules/measure.smk."""

import sys

from kvladder.bench.server import build
from kvladder.plan.job import run_job

sys.exit(run_job(lambda job: build(job.out), sys.argv[1:]))
