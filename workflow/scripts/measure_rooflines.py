"""Measure the ceilings of this machine's links. Run by `shell`, see rules/measure.smk."""

import sys

from kvladder.plan.job import Job, run_job
from kvladder.probes.ceilings import measure
from kvladder.serving.lease import lease
from kvladder.trial.runner import write_atomically
from kvladder.trial.session import Stack


def work(job: Job) -> None:
    """Run the measurement under the stack's interpreter, which has torch, with the machine to itself."""
    stack = Stack.load(job.stack_folder, job.stamp_path)
    with lease(int(stack.config.device == "cuda"), holder="rooflines", progress=job.say) as held:
        job.say("rooflines: device, host memory, loopback, disk, transfer engine")
        env = {**stack.env, **held.env}
        record = measure(job.config, stack.python, stack.config.device, env, held.devices, job.results)
        for problem in record.problems:
            job.say(f"rooflines: not measured: {problem}")
        write_atomically(job.out, record.model_dump_json(by_alias=True, indent=1))


sys.exit(run_job(work, sys.argv[1:]))
