"""The event model: one kind of event, whatever profiler or log it comes from, and what is wrong with a trace.

All times are CLOCK_MONOTONIC in ns, the load client's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Kind = Literal["request", "step", "lookup", "rpc", "h2d", "d2h", "d2d", "kernel", "cpu_copy", "sync", "engine"]
"""``step``: the worker runs a scheduler step. ``rpc``: another process, or a connector, works for a request. ``d2d``: a
copy inside the device. ``cpu_copy``: a copy on the host's cores. ``engine``: anything else that the engine itself
names."""

COPIES: tuple[Kind, ...] = ("h2d", "d2h", "d2d", "cpu_copy")
ON_DEVICE: tuple[Kind, ...] = ("h2d", "d2h", "d2d", "kernel")

UNUSABLE_LIMIT = 0.01
"""Share of a trace's records that may be unusable before nothing is concluded from it."""


@dataclass(slots=True)
class Event:
    """One event. ``lane`` is a stream of the device, or a thread; ``process`` the server's name.

    Copies that follow each other closely on a stream are one event: ``count`` of them, ``bytes`` together, ``busy_ns``
    the time that the stream was at it. ``step`` is the number of the worker's step that it belongs to, ``requests`` the
    requests that it is for, as far as that is known.
    """

    kind: Kind
    start: int
    end: int
    process: str
    lane: str
    name: str = ""
    bytes: int | None = None
    count: int = 1
    busy_ns: int | None = None
    step: int | None = None
    requests: tuple[str, ...] = ()
    launched: int | None = None
    """When the API call that put it on the stream began; None: not known, or not on a stream."""
    calls: int = 1
    """API calls that put it on the stream: a batch of thousands of copies may be one. One call's copies in several
    events count with the first."""

    @property
    def busy(self) -> int:
        """Time at work in ns: without the gaps of an event that stands for several."""
        return self.end - self.start if self.busy_ns is None else self.busy_ns

    @property
    def rate(self) -> float | None:
        """Bytes per second; None for what has no bytes, or took no time."""
        return self.bytes * 1e9 / self.busy if self.bytes and self.busy > 0 else None


@dataclass(slots=True)
class Quality:
    """What of a trace could be used."""

    records: int = 0
    unusable: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str) -> None:
        """Count a record that is left out."""
        self.unusable += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def add(self, other: Quality) -> None:
        """Count another trace's records too."""
        self.records += other.records
        self.unusable += other.unusable
        for reason, number in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + number

    @property
    def valid(self) -> bool:
        """Whether enough of the trace is sound to conclude anything from it."""
        return self.unusable <= UNUSABLE_LIMIT * self.records

    def __str__(self) -> str:
        if not self.records:
            return "no device was recorded"
        if not self.unusable:
            return f"{self.records:,} records, all usable"
        why = ", ".join(f"{number:,} {reason}" for reason, number in sorted(self.reasons.items()))
        return f"{self.unusable:,} of {self.records:,} unusable: {why}"


@dataclass(frozen=True, slots=True)
class Clock:
    """From a profiler's own time to CLOCK_MONOTONIC: add ``offset``. ``spread`` is how late half of its marks are at
    most, in ns; ``drift`` the rate by which the two clocks differ, applied from ``origin`` (profiler time)."""

    offset: int
    spread: int
    marks: int
    drift: float = 0.0
    origin: int = 0

    def __call__(self, time: int) -> int:
        """A profiler's time on the client's clock."""
        return time + self.offset + round((time - self.origin) * self.drift)


CLOCK_MARK = "kvladder:clock:"
"""What the engine plugin's clock marks are named, before the CLOCK_MONOTONIC time at which each was made."""

_ENOUGH_MARKS = 4
"""In each half of a recording, for a drift to be told from the marks' own delays."""


def fit_clock(marks: Sequence[tuple[int, int]]) -> Clock:
    """A clock from (profiler time, CLOCK_MONOTONIC) pairs.

    Each mark was named before it was made, so every pair is late by what that took: the least late ones of both halves
    give offset and drift. Raises ValueError without a mark.
    """
    if not marks:
        raise ValueError("the trace has no clock mark: its time can't be brought onto the client's clock")
    ordered = sorted(marks)
    offsets = [real - trace for trace, real in ordered]
    half = len(ordered) // 2
    first = max(range(len(ordered)), key=lambda place: offsets[place])
    drift = 0.0
    if half >= _ENOUGH_MARKS:
        first = max(range(half), key=lambda place: offsets[place])
        last = max(range(half, len(ordered)), key=lambda place: offsets[place])
        drift = (offsets[last] - offsets[first]) / max(ordered[last][0] - ordered[first][0], 1)
    clock = Clock(offsets[first], 0, len(marks), drift, ordered[first][0])
    late = sorted(clock(trace) - real for trace, real in ordered)
    return replace(clock, spread=late[half])


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint intervals, sorted, that cover the same time; empty ones vanish."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """What of the intervals lies inside [start, end)."""
    return [(max(low, start), min(high, end)) for low, high in intervals if min(high, end) > max(low, start)]


def subtract(intervals: Sequence[tuple[int, int]], taken: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is left of disjoint, sorted intervals without the time of others, disjoint and sorted too."""
    left: list[tuple[int, int]] = []
    place = 0
    for start, end in intervals:
        while place < len(taken) and taken[place][1] <= start:
            place += 1
        free, at = start, place
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > free:
                left.append((free, taken[at][0]))
            free = max(free, taken[at][1])
            at += 1
        if free < end:
            left.append((free, end))
    return left


def total(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of disjoint intervals together, in ns."""
    return sum(end - start for start, end in intervals)


def busy_time(events: Iterable[Event]) -> int:
    """Time in which at least one of the events was going on, in ns: a union, never a sum."""
    return total(union((event.start, event.end) for event in events))


OVERLAP_NS = 1_000_000
"""How far work on a stream may reach into its successor's time; streams are serial, clocks and launches are not exact.
"""


def usable(events: Iterable[Event], quality: Quality) -> Iterator[Event]:
    """Device events without impossible ones, which are counted, in order of their start.

    Impossible is no time at all (a profiler whose buffers ran out writes 0 and 0), an end before the start, and an end
    far beyond the start of the next one on the same stream. ``events`` is sorted by start.
    """
    waiting: dict[tuple[str, str], Event] = {}
    for event in events:
        quality.records += 1
        if event.start == 0 and event.end == 0:
            quality.drop("without a time")
        elif event.end < event.start:
            quality.drop("that end before they start")
        else:
            before = waiting.pop((event.process, event.lane), None)
            waiting[event.process, event.lane] = event
            if before is not None:
                if before.end > event.start + OVERLAP_NS:
                    quality.drop("that reach far into their successor")
                else:
                    yield before
    yield from sorted(waiting.values(), key=lambda event: event.start)


GAP_NS = 20_000
"""Copies that are closer than this on their stream are one transfer: a batch is thousands of them."""
LONGEST_NS = 2_000_000
"""And no longer than this, so that how fast a transfer was over its time can still be seen."""
LAUNCH_GAP_NS = 200_000
"""Copies that were launched farther apart belong to different transfers, also where the stream made one row of them."""


def merged(events: Iterable[Event]) -> Iterator[Event]:
    """Copies of one kind that were launched together and follow each other closely on a stream, as one event each."""
    going: dict[tuple[str, str], Event] = {}
    launched: dict[tuple[str, str], int | None] = {}
    for event in events:
        if event.kind not in COPIES:
            yield event
            continue
        key = (event.process, event.lane)
        last = going.get(key)
        before = launched.get(key)
        launched[key] = event.launched
        apart = before is not None and event.launched is not None and event.launched - before > LAUNCH_GAP_NS
        calls = 0 if event.launched is not None and event.launched == before else event.calls
        near = last is not None and event.start - last.end <= GAP_NS and event.end - last.start <= LONGEST_NS
        if last is not None and near and last.kind == event.kind and not apart:
            last.busy_ns = last.busy + max(0, event.end - max(event.start, last.end))
            last.end = max(last.end, event.end)
            last.count += event.count
            last.calls += calls
            last.bytes = None if last.bytes is None or event.bytes is None else last.bytes + event.bytes
            continue
        if last is not None:
            yield last
        event.calls = calls
        going[key] = event
    yield from going.values()
