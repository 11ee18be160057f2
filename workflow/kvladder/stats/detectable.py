"""Minimal detectable effect: how small a difference this experiment could have seen."""

from __future__ import annotations

from functools import cache
from math import comb, exp, log, sqrt
from statistics import NormalDist, stdev

from kvladder.stats.intervals import covering_rank
from kvladder.stats.paired import NoiseFloor, PairedRatio

POWER = 0.80
"""Share of such experiments that see a difference of that size."""


def detectable(ratio: PairedRatio, floor: NoiseFloor | None = None) -> float | None:
    """Smallest relative difference that `POWER` of such experiments tell from noise: 0.05 is 5 %.

    ``exp(f + max(k(n) · s, h)) - 1``, all on the logarithm. s is the standard deviation of the blocks' ratios, and
    k(n) · s how far their median must lie beside a line for the whole interval to lie beyond it in `POWER` of
    experiments with normal noise (`reach`); h is how far the interval goes from its median, which a skewed or two-mode
    sample shows; f is how far from 1 the noise floor goes, 0 without one. So a ratio that was not told from noise
    never lies beyond what could have been seen. That is the slower side; a gain is seen from ``1 - 1 / (1 + mde)`` on.

    The spread is the setup's own, because its interval is what must clear the floor: the repeat of a quiet baseline
    says nothing of a noisy setup. None with fewer than six blocks, as a range makes no promise, without any spread,
    and for ratios of 0 or less.
    """
    interval = ratio.interval
    if interval.kind != "95 %" or interval.low is None or interval.high is None or interval.median is None:
        return None
    if min(ratio.ratios) <= 0 or (floor is not None and floor.low <= 0):
        return None
    own = max(log(interval.high / interval.median), log(interval.median / interval.low))
    beyond = 0.0 if floor is None else max(log(floor.high), -log(floor.low))
    return exp(beyond + max(reach(interval.n) * stdev(map(log, ratio.ratios)), own)) - 1


@cache
def reach(n: int) -> float:
    """k(n): observed standard deviations that a median must lie above a line to be seen above it; `n` >= 6.

    The interval's lower end, the value of rank r (`covering_rank`), lies above the line when r values or fewer lie
    below it, each with p = Φ(-k · s). Solves mean of P(Bin(n, p) <= r) = `POWER` by bisection, the mean being over what
    a sample of n tells of a standard deviation of 1: s² · (n - 1) is chi-squared with n - 1 degrees of freedom.
    """
    rank, free = covering_rank(n), n - 1
    normal = NormalDist()
    step = 0.01
    spreads = [step * (place + 0.5) for place in range(round((1 + 5 / sqrt(free)) / step))]
    weights = [exp(free * (log(s) - (s * s - 1) / 2)) / s for s in spreads]
    total = sum(weights)

    def seen(k: float) -> float:
        below = [normal.cdf(-k * s) for s in spreads]
        power = [sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(rank + 1)) for p in below]
        return sum(weight * each for weight, each in zip(weights, power, strict=True)) / total

    low, high = 0.0, 10.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if seen(middle) > POWER else (middle, high)
    return high
