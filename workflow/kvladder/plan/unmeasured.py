"""The record of a trial that its job didn't start: no time left, or its setup is known not to come up."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from kvladder.config.experiment import ExperimentConfig, Trial, effective
from kvladder.config.records import EffectiveConfig, TrialRecord
from kvladder.config.stack import StackStamp
from kvladder.plan import bringup
from kvladder.plan.estimate import refusal
from kvladder.provenance.host import describe_harness, describe_host
from kvladder.stack.paths import ROOT


def reason(config: ExperimentConfig, results: Path, trial: Trial) -> str | None:
    """Why the trial isn't worth starting, or not any more; None when it is. ``results``: ``results/<experiment>``."""
    failure = bringup.failure(config, results, trial.setup)
    if failure is not None:
        return f"the setup did not come up when it was started before measuring: {failure}"
    return refusal(results, trial.setup, trial.suite)


def record(config: ExperimentConfig, trial: Trial, stamp: StackStamp, why: str) -> TrialRecord:
    """A failed trial without passes."""
    now = time.monotonic_ns()
    return TrialRecord(
        experiment=config.experiment,
        setup=trial.setup,
        kind=config.setups[trial.setup].kind,
        suite=trial.suite,
        repeat=trial.repeat,
        run=trial.run,
        order=trial.order,
        status="failed",
        reason=why,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        start_ns=now,
        end_ns=now,
        host=describe_host([]),
        stack=stamp.model_dump(mode="json", by_alias=True),
        harness=describe_harness(ROOT),
        config=effective(config, trial.setup, trial.suite),
        expected={},
        effective=EffectiveConfig(),
        servers=[],
        passes=[],
    )
