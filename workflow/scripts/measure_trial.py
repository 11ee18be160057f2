"""Measure one trial: its servers come and go here. Run by `shell`, see rules/measure.smk."""

import sys

from kvladder.config.experiment import plan
from kvladder.plan import unmeasured
from kvladder.plan.estimate import outlook
from kvladder.plan.job import Job, run_job
from kvladder.trial.runner import run_trial, write_atomically
from kvladder.trial.session import Job as Serving
from kvladder.trial.session import Stack


def work(job: Job) -> None:
    """Run the trial; or record why it is not started."""
    trial = job.trial()
    why = unmeasured.reason(job.config, job.results, trial)
    if why is None:
        job.say(outlook(plan(job.config), job.results))
        serving = Serving(job.config, Stack.load(job.stack_folder, job.stamp_path), job.model_folder, job.say)
        run_trial(serving, trial, job.out.parent)
    else:
        job.say(f"{trial.setup} {trial.suite} r{trial.repeat}: {why}")
        record = unmeasured.record(job.config, trial, job.stamp, why)
        write_atomically(job.out, record.model_dump_json(by_alias=True, indent=1))


sys.exit(run_job(work, sys.argv[1:]))
