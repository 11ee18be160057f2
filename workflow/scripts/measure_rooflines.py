"""Measure the ceilings of this machine's links. Run by `shell`, see rules/measure.smk."""

import os
import subprocess
import sys

from kvladder.plan.job import Job, run_job
from kvladder.probes import rooflines
from kvladder.serving.lease import lease
from kvladder.trial.session import Stack


def work(job: Job) -> None:
    """Run the measurement under the stack's interpreter, which has torch, with the machine to itself."""
    stack = Stack.load(job.stack_folder, job.stamp_path)
    with lease(int(stack.config.device == "cuda"), holder="rooflines", progress=job.say) as held:
        job.say("rooflines: device, host memory, loopback, disk")
        partial = job.out.with_name(f".{job.out.name}.partial")
        argv = [str(stack.python), rooflines.__file__, "--out", str(partial.absolute())]
        argv += ["--folder", str(job.out.parent.absolute())]
        env = {**os.environ, **held.env}
        subprocess.run(argv, check=True, timeout=600, env=env)
        partial.rename(job.out)


sys.exit(run_job(work, sys.argv[1:]))
