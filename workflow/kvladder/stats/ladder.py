"""Conversations over tiers: when a pool is in a steady state, and which working set a tier no longer holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

HALF = 0.5


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a pool that was sent; times in ns."""

    conversation: int
    sent: int
    end: int


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a pass: ends after ``start`` and up to ``end`` (ns) count."""

    start: int
    end: int


def steady_window(turns: Sequence[Turn], pool: int, turns_each: int) -> Window | None:
    """The part of a pass in which the pool is full of conversations, all of whose places have been filled once.

    It begins when ``pool × turns_each`` requests have been sent, as many as a pool of whole conversations has: before
    that the tiers fill up. It ends when a conversation ends whose place stays empty: after that fewer are open. None
    where fewer than ``pool`` requests end between the two: then the pass has no steady state.
    """
    fill = pool * turns_each
    if len(turns) <= fill:
        return None
    start = sorted(turn.sent for turn in turns)[fill]
    closed: dict[int, int] = {}
    for turn in turns:
        closed[turn.conversation] = max(turn.end, closed.get(turn.conversation, turn.end))
    # All but the last `pool` conversations that end are followed by another one.
    end = sorted(closed.values())[max(len(closed) - pool, 0)]
    inside = sum(start < turn.end <= end for turn in turns)
    return Window(start, end) if inside >= pool else None


def cliff(points: Sequence[tuple[float, float]]) -> float | None:
    """The working set at which hits fall to half of what a cache without limits gives.

    ``points`` are (working set, hits ÷ those of a cache without limits), ascending; between two of them a straight line
    is taken. The first working set where even the smallest pool has less; None where the largest still has more, or
    there are no points.
    """
    if not points:
        return None
    if points[0][1] < HALF:
        return points[0][0]
    for (small, high), (large, low) in pairwise(points):
        if low < HALF:
            return small + (large - small) * (high - HALF) / (high - low)
    return None
