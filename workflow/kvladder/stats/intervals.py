"""Interval of a median over trials: exact, from order statistics, whatever the distribution.

The unit is the trial, never the request: thousands of requests of one server lifetime are one draw.

The interval goes from the k-th smallest to the k-th largest value, with the largest k for which the binomial law
promises 95 % (Thompson 1936; David and Nagaraja, Order Statistics, 7.1). There is no bootstrap in it: the percentile
bootstrap of a median lies inside this interval (seen for 6 to 50 values), and covers only 87 % at n = 7. Coverage of
both is measured by `kvladder.stats.calibrate`; ``docs/statistics.md`` has the tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import comb
from statistics import median
from typing import Literal

from kvladder.stats.samples import clean, equal

IntervalKind = Literal["95 %", "range", "not enough data"]

MIN_BLOCKS = 6
"""Fewest values for a 95 % interval: smallest to largest of five covers a median in 93.75 % only, of six in 96.9 %."""

LEVEL = 0.95


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


def median_interval(values: Iterable[float | None]) -> Interval:
    """Median with its interval; never NaN, never a crash.

    From six values on the order statistics that cover the median with at least 95 %. Below six, and where all values
    are equal so that nothing is known of their spread, the range. Unknown and non-finite values are left out and
    counted.
    """
    sample = clean(values)
    data = sorted(sample.values)
    n = len(data)
    if n < 2:
        return Interval(data[0] if data else None, None, None, "not enough data", n, sample.excluded)
    middle = median(data)
    if n < MIN_BLOCKS or equal(data[0], data[-1]):
        return Interval(middle, data[0], data[-1], "range", n, sample.excluded)
    rank = covering_rank(n)
    return Interval(middle, data[rank], data[n - 1 - rank], "95 %", n, sample.excluded)


@cache
def covering_rank(n: int) -> int:
    """Largest k for which [x(k), x(n-1-k)], counted from 0, covers the median with at least `LEVEL`.

    It misses with 2 · P(Bin(n, ½) <= k). `n` is `MIN_BLOCKS` or more; it is 0 up to 8, 1 up to 11, 2 up to 14.
    """
    rank, tail = 0, 1
    while True:
        tail += comb(n, rank + 1)
        if 2 * tail / 2**n > 1 - LEVEL:
            return rank
        rank += 1
