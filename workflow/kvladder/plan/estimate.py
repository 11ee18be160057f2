"""How long what is left to do will take, from what is on record; and what fits into a budget."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvladder.config.experiment import Trial

BUDGET = "KVLADDER_BUDGET_S"
"""Environment variable: seconds from the start of the workflow; wins over `budget_s`. 0 measures nothing more."""
DEADLINE = "KVLADDER_DEADLINE"
"""Environment variable that jobs inherit: Unix time at which the budget ends."""
NOT_STARTED = "not started: "
"""How the reason of a trial begins that its job refused to start."""

_HEAD = 65536
_NUMBER = r'"{}":\s*(\d+)'


@dataclass(frozen=True, slots=True)
class Times:
    """Wall-clock seconds on record: of trials by (setup, suite), of bring-ups by setup."""

    trials: Mapping[tuple[str, str], list[float]] = field(default_factory=dict)
    starts: Mapping[str, list[float]] = field(default_factory=dict)

    def trial(self, setup: str, suite: str) -> float | None:
        """The longest that this setup took for this suite, else the longest of any setup; None: nothing on record."""
        own = self.trials.get((setup, suite))
        if own:
            return max(own)
        return max((max(times) for (_, other), times in self.trials.items() if other == suite), default=None)

    def start(self, setup: str) -> float | None:
        """The longest bring-up of this setup, else of any; None: nothing on record."""
        return max(self.starts.get(setup) or (t for times in self.starts.values() for t in times), default=None)


def recorded(folder: Path) -> Times:
    """Times of every finished trial and bring-up of an experiment (``results/<experiment>``), older runs too."""
    trials: dict[tuple[str, str], list[float]] = {}
    for path in folder.glob("trials/*/*/*/trial.json"):
        head = _head(path)
        begin, end = _number(head, "start_ns"), _number(head, "end_ns")
        if begin is not None and end is not None and '"status":"completed"' in head.replace(" ", ""):
            trials.setdefault((path.parts[-4], path.parts[-3]), []).append((end - begin) / 1e9)
    starts: dict[str, list[float]] = {}
    for path in folder.glob("start/*.json"):
        head = _head(path)
        parts = [_number(head, name) for name in ("startup_ns", "probe_ttft_ns", "stop_ns")]
        if parts[0] is not None:
            starts.setdefault(path.stem.rpartition("-")[0], []).append(sum(part or 0 for part in parts) / 1e9)
    return Times(trials, starts)


def _head(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_HEAD)
    except OSError:
        return ""


def _number(head: str, key: str) -> int | None:
    match = re.search(_NUMBER.format(key), head)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Selection:
    """Trials of a plan: what there is, what would run, what doesn't fit into the budget."""

    done: list[Trial]
    todo: list[Trial]
    left_out: list[Trial]
    setups_to_start: list[str]
    seconds: float
    unknown: int
    """Trials and bring-ups of `todo` of which no time is on record."""

    def describe(self, gpus: int) -> str:
        """One line for people."""
        parts = [f"{len(self.done) + len(self.todo) + len(self.left_out)} trials: {len(self.done)} done"]
        if self.todo:
            jobs = len(self.todo) + len(self.setups_to_start)
            if self.unknown == jobs:
                about = "no times on record yet, so no estimate"
            else:
                about = f"about {duration(self.seconds)}" + (
                    f", {self.seconds * gpus / 60:.0f} GPU minutes" if gpus else ""
                )
                if self.unknown:
                    about += f" and {self.unknown} of {jobs} jobs without a time on record"
            parts.append(f"{len(self.todo)} to measure ({about})")
        if self.left_out:
            parts.append(f"{len(self.left_out)} left out: they don't fit into the time budget")
        return ", ".join(parts)


def select(plan: Iterable[Trial], folder: Path, *, started: Iterable[str], budget_s: float | None) -> Selection:
    """Split a plan by what is on disk below ``folder`` and by what fits into ``budget_s``, in the plan's order.

    ``started`` are setups that need no bring-up of their own. A trial without a time on record is kept: its own job
    looks again once there is one.
    """
    times = recorded(folder)
    ready = set(started)
    done: list[Trial] = []
    todo: list[Trial] = []
    left_out: list[Trial] = []
    to_start: list[str] = []
    seconds, unknown = 0.0, 0
    for trial in plan:
        if (folder / trial.folder / "trial.json").is_file():
            done.append(trial)
            continue
        needs = [times.trial(trial.setup, trial.suite)]
        if trial.setup not in ready:
            needs.append(times.start(trial.setup))
        cost = sum(need or 0.0 for need in needs)
        if budget_s is not None and (budget_s <= 0 or seconds + cost > budget_s):
            left_out.append(trial)
            continue
        if trial.setup not in ready:
            ready.add(trial.setup)
            to_start.append(trial.setup)
        todo.append(trial)
        seconds += cost
        unknown += sum(need is None for need in needs)
    return Selection(done, todo, left_out, to_start, seconds, unknown)


def outlook(plan: Sequence[Trial], folder: Path) -> str:
    """Where an experiment stands, for the trial that is about to start: which one of how many, and about how long."""
    here = select(plan, folder, started=[trial.setup for trial in plan], budget_s=None)
    left = "no times on record yet" if here.unknown else f"about {duration(here.seconds)} left to measure"
    return f"trial {len(here.done) + 1} of {len(plan)}, {left}"


def budget(configured: float | None, environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds from the workflow's start; the environment wins. Raises ValueError, naming the variable and its value."""
    text = environment.get(BUDGET)
    if text is None or not text.strip():
        return configured
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"{BUDGET}: expected a number of seconds, got {text!r}")
    return seconds


def refusal(folder: Path, setup: str, suite: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Why a trial must not start now, None when it may: called by its job, when earlier trials' times are on record."""
    deadline = environment.get(DEADLINE)
    if not deadline:
        return None
    left = float(deadline) - time.time()
    times = recorded(folder)
    need = times.trial(setup, suite)
    known = need if need is not None else times.start(setup) or 0.0
    if left > known:
        return None
    needs = f"{duration(known)} are needed" if need is not None else "nothing is on record that fits"
    return f"{NOT_STARTED}{duration(max(left, 0.0))} left of the time budget, {needs}; run again to measure it"


def sweep(folder: Path) -> list[Path]:
    """Remove the records of trials that were not started, so that the next run measures them. Returns their folders."""
    swept = []
    for path in folder.glob("trials/*/*/*/trial.json"):
        if re.search(rf'"reason":\s*"{NOT_STARTED}', _head(path)):
            forget(path)
            swept.append(path.parent)
    return swept


def forget(record: Path) -> None:
    """Remove ``trial.json`` or a start record, and what was made from it; raw files stay until it's tried again."""
    for name in ("verdict.json", "own-verdict.json"):
        (record.parent / name).unlink(missing_ok=True)
    record.unlink()


def failed_records(folder: Path) -> list[Path]:
    """``trial.json`` of failed trials and the records of bring-ups that failed, and those that can't be read."""
    paths = [*folder.glob("trials/*/*/*/trial.json"), *folder.glob("start/*.json")]
    return sorted(path for path in paths if not _completed(path))


def _completed(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_text(encoding="utf-8"))["status"] == "completed")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.2 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
