"""Interval of a median over trials: seeded bootstrap, held to its promised coverage.

The unit is the trial, never the request: thousands of requests of one server lifetime are one draw.

Coverage of the true median, 95 % promised, measured over 1,500 samples each of normal, log-normal, exponential,
uniform and Student's t (2 degrees of freedom): the percentile bootstrap alone covers 0.94–0.95 at n = 6, but
0.86–0.88 at n = 7, 0.92–0.94 at 8 and 0.92–0.94 at 12. So it is widened to the order statistics that cover 95 % by
the binomial law whatever the distribution (the smallest and largest value up to n = 8). The tests measure the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import comb
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvladder.stats.samples import clean, equal

IntervalKind = Literal["95 %", "range", "not enough data"]

MIN_BLOCKS = 6
"""Fewest values for a 95 % interval: smallest to largest of five covers a median in 93.75 % only, of six in 96.9 %."""

RESAMPLES = 10_000
LEVEL = 0.95
SEED = 20_260_105


@dataclass(frozen=True, slots=True)
class Interval:
    """Median of a sample with its interval.

    ``kind``: ``95 %`` = confidence interval, ``range`` = smallest and largest value seen, which promises no coverage,
    ``not enough data`` = fewer than two values, ``low`` and ``high`` are None. ``median`` is None for an empty sample.
    """

    median: float | None
    low: float | None
    high: float | None
    kind: IntervalKind
    n: int
    excluded: int = 0

    def contains(self, value: float) -> bool | None:
        """Whether `value` lies inside, ends and ties included; None without an interval."""
        if self.low is None or self.high is None:
            return None
        return self.low <= value <= self.high or equal(self.low, value) or equal(self.high, value)

    def overlaps(self, other: Interval) -> bool | None:
        """Whether two intervals share a point, ties included; None where either is missing."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return None
        apart = (self.high < other.low and not equal(self.high, other.low)) or (
            other.high < self.low and not equal(other.high, self.low)
        )
        return not apart


def median_interval(values: Iterable[float | None]) -> Interval:
    """Median with its interval; never NaN, never a crash.

    From six values on the percentile bootstrap of the median, ``[q(0.025), q(0.975)]`` of 10,000 seeded resamples,
    widened to the order statistics with at least 95 % coverage. Below six, and where all values are equal so that
    resampling says nothing, the range. Unknown and non-finite values are left out and counted.
    """
    sample = clean(values)
    n = len(sample.values)
    if n == 0:
        return Interval(None, None, None, "not enough data", 0, sample.excluded)
    data = np.sort(np.asarray(sample.values))
    middle = float(np.median(data))
    if n == 1:
        return Interval(middle, None, None, "not enough data", 1, sample.excluded)
    smallest, largest = float(data[0]), float(data[-1])
    if n < MIN_BLOCKS or equal(smallest, largest):
        return Interval(middle, smallest, largest, "range", n, sample.excluded)
    lower, upper = _middles(n)
    low, high = np.quantile((data[lower] + data[upper]) / 2, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    rank = _covering_rank(n)
    return Interval(
        middle,
        min(float(low), float(data[rank])),
        max(float(high), float(data[n - 1 - rank])),
        "95 %",
        n,
        sample.excluded,
    )


@cache
def _middles(n: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Places of the two middle values (the same for odd n) of each resample of n sorted values.

    Equal for equal n, so that an interval depends on its sample alone; and the medians need no sorting of their own.
    """
    places = np.sort(np.random.default_rng([SEED, n]).integers(0, n, (RESAMPLES, n)), axis=1)
    return places[:, (n - 1) // 2].copy(), places[:, n // 2].copy()


@cache
def _covering_rank(n: int) -> int:
    """Largest k for which [x(k), x(n-1-k)], counted from 0, covers the median with at least `LEVEL`.

    It misses with 2 · P(Bin(n, ½) <= k).
    """
    rank, tail = 0, 1
    while True:
        tail += comb(n, rank + 1)
        if 2 * tail / 2**n > 1 - LEVEL:
            return rank
        rank += 1
