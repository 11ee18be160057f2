"""From which prompt length loading beats computing, and how many hits pay for a dearer first request.

Pure functions over measured lengths; times are in any one unit, lengths in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeVar

from kvladder.stats.samples import clean, equal, median

Block = TypeVar("Block", bound=Hashable)

Times = Mapping[int, tuple[float | None, float | None]]
"""Prompt length in tokens → (time of a hit, time of computing the same prompt)."""

Answer = Literal["already", "from", "up to", "never"]


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Where loading beats computing.

    ``answer``: ``already`` at the shortest measured length and everywhere above; ``from`` ``tokens`` on; ``up to``
    ``tokens`` and not above; ``never`` up to the longest measured length. ``tokens`` is None for ``already`` and
    ``never``. ``crossings`` are all lengths at which the two are equal, interpolated: with more than one of them,
    ``tokens`` is the last. ``low`` and ``high`` are the smallest and largest break-even of single blocks, None unless
    two blocks or more all give the same answer.
    """

    answer: Answer
    tokens: float | None
    shortest: int
    longest: int
    crossings: tuple[float, ...]
    blocks: int = 1
    low: float | None = None
    high: float | None = None


def break_even(times: Times) -> BreakEven | None:
    """Compare two curves over the prompt length; None without a length that has both times.

    Between neighbouring lengths the difference hit − computed is taken as linear in the length, which is exact where
    both times are a constant plus a price per token. A tie counts as not faster.
    """
    gaps: list[tuple[int, float]] = []
    for length in sorted(times):
        both = clean(times[length])
        if not both.excluded:
            hit, computed = both.values
            gaps.append((length, 0.0 if equal(hit, computed) else hit - computed))
    if not gaps:
        return None
    crossings = []
    for (left, before), (right, after) in pairwise(gaps):
        if (before < 0) != (after < 0):
            crossings.append(left + (right - left) * before / (before - after))
    faster = gaps[-1][1] < 0
    answer: Answer = ("from" if faster else "up to") if crossings else ("already" if faster else "never")
    tokens = crossings[-1] if crossings else None
    return BreakEven(answer, tokens, gaps[0][0], gaps[-1][0], tuple(crossings))


def break_even_over_blocks(blocks: Mapping[Block, Times]) -> BreakEven | None:
    """The same over the blocks of an experiment: at each length the median over blocks of hit ÷ computed, paired.

    A length counts with the blocks that have both times there; None where no block has any.
    """
    lengths = sorted({length for times in blocks.values() for length in times})
    typical: dict[int, tuple[float | None, float | None]] = {}
    counted: set[Block] = set()
    for length in lengths:
        pairs = {block: clean(times.get(length, (None, None))) for block, times in blocks.items()}
        whole = {block: pair.values for block, pair in pairs.items() if not pair.excluded and pair.values[1] > 0}
        ratio = median(hit / computed for hit, computed in whole.values())
        computed = median(computed for _, computed in whole.values())
        if ratio is not None and computed is not None:
            typical[length] = ratio * computed, computed
            counted |= set(whole)
    found = break_even(typical)
    if found is None:
        return None
    single = [each for block in counted if (each := break_even(blocks[block])) is not None]
    places = [each.tokens for each in single if each.answer == found.answer and each.tokens is not None]
    agree = len(single) > 1 and len(places) == len(single)
    low, high = (min(places), max(places)) if agree else (None, None)
    return replace(found, blocks=len(counted), low=low, high=high)


def hits_to_pay(first: float, hit: float, computed: float) -> float:
    """Smallest number n >= 0 of hits for which first + n · hit < (1 + n) · computed; infinite where none is enough.

    `first` is the first request's time with the tier, which stores; `hit` that of a later request which loads;
    `computed` that of a request without a tier. 0: the first request is cheaper than computing.
    """
    extra, gain = first - computed, computed - hit
    if equal(first, computed):
        extra = 0.0
    if extra < 0:
        return 0.0
    if gain <= 0 or equal(hit, computed):
        return math.inf
    hits = extra / gain
    nearest = round(hits)
    # Strictly less: a whole number of hits only makes it even, and rounding must not hide that it is whole.
    return float(nearest + 1 if math.isclose(hits, nearest, abs_tol=1e-9) else math.floor(hits) + 1)
