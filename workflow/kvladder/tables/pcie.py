"""What crossed PCIe while KV was stored and loaded, by the device's own byte counters: a witness beside the engine's.

NVML counts whole packets, headers too: on the H200 a byte of KV loaded counts as 1.08, one stored as 1.10 to 1.12. And
its counters are 32 bits wide there: they start over every 4.29 GB, several times between two samples when a link of
55 GB/s is sampled every 0.5 s. What is missing is a whole number of such turns, and that number is taken so that the
sum comes nearest to what the engine says. So where turns were added the witness no longer says how much crossed, but
still, to a few per mille, whether the engine's number can be true: any other one would leave another remainder.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

import polars as pl

from kvladder.config.records import PassRecord, WindowTokens
from kvladder.tables.raw import RawTrial, samples
from kvladder.tables.sweeps import names_of_rounds

Row = dict[str, Any]
Direction = Literal["store", "load"]

TURN = 1 << 32
"""Bytes after which a 32-bit counter starts over."""

PACKETS = 1.1
"""Bytes counted for one byte of KV, between what was measured of stores and of loads."""
PACKETS_SPREAD = 0.04
"""How far off that may be: a sum for which this is half a turn can't be completed."""

COLUMN: dict[Direction, str] = {"store": "pcie_tx_bytes", "load": "pcie_rx_bytes"}
"""The device sends what is stored and receives what is loaded."""

BELOW = ("cpu", "nvme", "remote")
"""Tiers whose hits cross PCIe."""


@dataclass(frozen=True)
class _Moved:
    """A timed pass, and the bytes that crossed with it in one direction: by the engine's counter, and by its tokens."""

    part: PassRecord
    workload: str
    engine: int | None
    expected: int

    @property
    def end(self) -> int:
        """When its traffic was over: stores go on after the last answer."""
        return self.part.end_ns + (self.part.durable_ns or 0)

    @property
    def counted(self) -> float:
        """What the device should count."""
        return PACKETS * (self.expected if self.engine is None else self.engine)

    def overlap(self, start: int, end: int) -> int:
        return max(0, min(end, self.end) - max(start, self.part.start_ns))


@dataclass(frozen=True)
class _Counter:
    """One direction's counter over a trial's samples: bytes between two of them, whole turns left out."""

    times: list[int]
    steps: list[int]
    narrow: bool

    def window(self, first: int, last: int) -> tuple[int, int] | None:
        """Numbers of the last sample up to `first` and of the first from `last` on; None: one of them is missing."""
        start, end = bisect_right(self.times, first) - 1, bisect_left(self.times, last)
        return (start, end) if start >= 0 and end < len(self.times) else None


def pcie_rows(raw: Sequence[RawTrial], passes: pl.DataFrame) -> tuple[list[Row], list[Row]]:
    """Rows of the tables ``pcie_trace`` (of each setup and suite the first valid trial) and ``pcie_bytes``."""
    named = names_of_rounds(passes)
    trace: dict[tuple[str, str], list[Row]] = {}
    sums: defaultdict[tuple[str, str, str, Direction], list[Row]] = defaultdict(list)
    for trial in raw:
        if trial.status != "valid" or trial.record is None or trial.record.expected.get("tier") not in BELOW:
            continue
        found = samples(trial.folder)
        drawn: list[Row] = []
        for direction in COLUMN:
            counter = _counter(found, direction, len(trial.record.host.gpus))
            if counter is None:
                continue
            moved = list(_moved(trial, named, direction))
            turns: dict[str, tuple[int, int, int]] = {}
            for workload in dict.fromkeys(each.workload for each in moved):
                group = [each for each in moved if each.workload == workload]
                result = _sum(trial, counter, group)
                if result is not None:
                    row, window = result
                    sums[trial.setup, trial.suite, workload, direction].append(row)
                    turns[workload] = (*window, row["turns"])
            drawn += _trace(trial, named, counter, direction, moved, turns)
        if drawn:
            trace.setdefault((trial.setup, trial.suite), drawn)
    return [row for rows in trace.values() for row in rows], [_bytes(*item) for item in sums.items()]


def _counter(found: pl.DataFrame, direction: Direction, gpus: int) -> _Counter | None:
    """None where the device has no such counter, or where it was set back."""
    known = found.drop_nulls(COLUMN[direction])
    values, times = known[COLUMN[direction]].to_list(), known["t_ns"].to_list()
    if len(values) < 2:
        return None
    narrow = max(values) < TURN * max(1, gpus)
    steps = [later - earlier for earlier, later in pairwise(values)]
    if narrow:
        steps = [step % TURN for step in steps]
    return _Counter(times, steps, narrow) if min(steps) >= 0 else None


def _moved(
    trial: RawTrial, named: Mapping[tuple[str, str, int, str, int], str], direction: Direction
) -> Iterable[_Moved]:
    """Timed passes that moved something in that direction."""
    assert trial.record is not None and trial.verdict is not None  # noqa: S101 (what makes a trial valid)
    per_token = trial.record.expected.get("kv_bytes_per_token")
    windows = {(window.workload, window.round): window for window in trial.verdict.windows}
    for part in trial.record.timed:
        window = windows.get((part.workload, part.round))
        if window is None or not per_token:
            continue
        tokens = _tokens(window, direction)
        engine = window.stored_bytes if direction == "store" else window.loaded_bytes
        if tokens and engine != 0:
            name = named.get((trial.setup, trial.suite, trial.repeat, part.workload, part.round), part.workload)
            yield _Moved(part, name, engine, tokens * per_token)


def _tokens(window: WindowTokens, direction: Direction) -> int:
    """Tokens whose KV crosses: those computed, where they are stored, or those hit below the device."""
    if direction == "load":
        return sum(window.by_source.get(tier) or 0 for tier in BELOW)
    stored = window.name == "cold" if window.stored_bytes is None else window.stored_bytes > 0
    return (window.by_source.get("computed") or 0) if stored else 0


def _sum(trial: RawTrial, counter: _Counter, group: list[_Moved]) -> tuple[Row, tuple[int, int]] | None:
    """What was counted over a workload's passes, and between which samples; None where samples don't set them apart.

    The first must lie before them, the last after them, and no other pass may have begun or gone on in between.
    """
    assert trial.record is not None  # noqa: S101 (only valid trials get here)
    window = counter.window(group[0].part.start_ns, group[-1].end)
    if window is None:
        return None
    start, end = window
    inside = {(each.part.workload, each.part.round) for each in group}
    span = (counter.times[start], counter.times[end])
    others = [part for part in trial.record.passes if (part.workload, part.round) not in inside]
    if any(part.start_ns < span[1] and part.end_ns > span[0] for part in others):
        return None
    seen, should = sum(counter.steps[start:end]), sum(each.counted for each in group)
    turns = max(0, round((should - seen) / TURN)) if counter.narrow else 0
    if turns and should * PACKETS_SPREAD > TURN / 2:
        return None
    engine = [each.engine for each in group]
    row = {
        "counted": seen + turns * TURN,
        "turns": turns,
        "engine": None if None in engine else sum(each for each in engine if each is not None),
        "expected": sum(each.expected for each in group),
    }
    return row, window


def _bytes(key: tuple[str, str, str, Direction], trials: list[Row]) -> Row:
    engine = [row["engine"] for row in trials]
    return {
        **dict(zip(("setup", "suite", "workload", "direction"), key, strict=True)),
        "n": len(trials),
        "counted_bytes": median(row["counted"] for row in trials),
        "engine_bytes": None if None in engine else median(engine),
        "expected_bytes": median(row["expected"] for row in trials),
        "counted_ratio": median(row["counted"] / row["expected"] for row in trials),
        "min_ratio": min(row["counted"] / row["expected"] for row in trials),
        "max_ratio": max(row["counted"] / row["expected"] for row in trials),
        "turns": max(row["turns"] for row in trials),
    }


def _trace(  # noqa: PLR0917
    trial: RawTrial,
    named: Mapping[tuple[str, str, int, str, int], str],
    counter: _Counter,
    direction: Direction,
    moved: Sequence[_Moved],
    turns: Mapping[str, tuple[int, int, int]],
) -> list[Row]:
    """A row a step between two samples. Turns go where passes say that they must have been, nearest first."""
    assert trial.record is not None  # noqa: S101 (only valid trials get here)
    spans = list(pairwise(counter.times))
    missing = [0.0] * len(spans)
    for each in moved if counter.narrow else ():
        whole = each.end - each.part.start_ns
        for step, (start, end) in enumerate(spans):
            missing[step] += each.counted * each.overlap(start, end) / whole / TURN
    missing = [share - seen / TURN for share, seen in zip(missing, counter.steps, strict=True)]
    added = [max(0, round(share)) for share in missing]
    for start, end, wanted in turns.values():
        steps = range(start, end)
        while (have := sum(added[start:end])) != wanted:
            if have < wanted:
                added[max(steps, key=lambda step: missing[step] - added[step])] += 1
            else:
                added[min((step for step in steps if added[step]), key=lambda step: missing[step] - added[step])] -= 1
    parts = trial.record.timed
    rows = []
    for step, (start, end) in enumerate(spans):
        over = [min(end, part.end_ns) - max(start, part.start_ns) for part in parts]
        place = max(range(len(parts)), key=over.__getitem__)
        part = parts[place]
        key = (trial.setup, trial.suite, trial.repeat, part.workload, part.round)
        here = {"workload": named.get(key, part.workload), "pass": part.name, "round": part.round}
        rows.append(
            {
                **trial.key,
                "direction": direction,
                **(here if over[place] > 0 else {}),
                "start_s": (start - parts[0].start_ns) / 1e9,
                "end_s": (end - parts[0].start_ns) / 1e9,
                "gb_per_s": (counter.steps[step] + added[step] * TURN) / (end - start),
                "turns": added[step],
            }
        )
    return rows
