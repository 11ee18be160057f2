"""The jobs that the workflow runs by `shell`: each gets its output's path and its log's, and reads the rest from disk.

``results/<experiment>/experiment.json`` has the configuration; an output's path says which setup or trial it is about.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvladder.config.experiment import ExperimentConfig, Trial, model_id, plan
from kvladder.config.stack import StackStamp
from kvladder.plan import stored
from kvladder.plan.parent import follow_workflow
from kvladder.plan.progress import Progress
from kvladder.stack.install import InstallError
from kvladder.stack.model import ModelError
from kvladder.stack.patching import PatchError
from kvladder.stack.paths import find, stamp_of

_THREADS = ("OMP", "GOTO", "OPENBLAS", "MKL", "VECLIB_MAXIMUM", "NUMEXPR")
"""snakemake sets ``<name>_NUM_THREADS`` to a job's threads: an engine's threads would follow ``--cores``."""

_EXPLAINED = (InstallError, ModelError, PatchError, ValueError, OSError)
"""Errors whose message is all a user needs; others come with a trace-back in the log."""


@dataclass(frozen=True)
class Job:
    """One job: what it makes, and where it says how far it is."""

    out: Path
    say: Progress

    @cached_property
    def results(self) -> Path:
        """``results/<experiment>``, from the output's path."""
        return Path(*self.out.parts[: self.out.parts.index("results") + 2])

    @cached_property
    def config(self) -> ExperimentConfig:
        """The effective configuration of the run. Raises ConfigError."""
        return stored.read(self.results)

    @property
    def stack_folder(self) -> Path:
        """The folder of the stack that servers run from."""
        return find(self.config.stack)

    @property
    def stamp_path(self) -> Path:
        """The stamp of that stack."""
        return stamp_of(self.stack_folder)

    @property
    def stamp(self) -> StackStamp:
        """The stamp of that stack. Raises OSError while it isn't installed."""
        return StackStamp.model_validate_json(self.stamp_path.read_text(encoding="utf-8"))

    @property
    def model_folder(self) -> Path:
        """What the engine is pointed at."""
        return self.results / "models" / model_id(self.config)

    def trial(self) -> Trial:
        """The planned trial whose record the output is. Raises LookupError when the plan has no such trial."""
        wanted = self.out.parent.relative_to(self.results)
        for trial in plan(self.config):
            if trial.folder == wanted:
                return trial
        raise LookupError(f"the experiment has no trial {wanted}")


def run_job(work: Callable[[Job], None], arguments: Sequence[str]) -> int:
    """Do a job's work, and end with the workflow. ``arguments``: output, log. Returns the exit code."""
    for prefix in _THREADS:
        os.environ.pop(f"{prefix}_NUM_THREADS", None)
    follow_workflow()
    out, log = map(Path, arguments)
    with Progress(log) as say:
        try:
            work(Job(out, say))
        except KeyboardInterrupt:
            say(f"kvladder: {out}: interrupted, nothing was recorded")
            return 130
        except _EXPLAINED as error:
            say.detail(traceback.format_exc())
            say(f"kvladder: {error}")
            return 1
        except Exception as error:
            say.detail(traceback.format_exc())
            say(f"kvladder: {out}: {type(error).__name__}: {error} (log: {log})")
            return 1
    return 0
