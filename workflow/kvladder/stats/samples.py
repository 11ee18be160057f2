"""A sample and what it can carry: cleaning, ties, quantiles. Every helper is unit-free: values out are as values in."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median as _median

TIE = 1e-9
"""Relative difference below which two values are equal: rounding of a float, far below any clock's resolution."""

CARRIED = 5
"""Values that must be expected beyond a quantile: with 5, the chance that none lies there is below 1 %."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Finite values in the order given, and how many were left out because they are unknown (None) or not finite."""

    values: tuple[float, ...]
    excluded: int


def clean(values: Iterable[float | None]) -> Sample:
    """Keep what is a finite number, count the rest."""
    everything = list(values)
    kept = tuple(float(value) for value in everything if value is not None and math.isfinite(value))
    return Sample(kept, len(everything) - len(kept))


def equal(a: float, b: float) -> bool:
    """Whether two values are the same measurement: |a - b| <= TIE · max(|a|, |b|)."""
    return math.isclose(a, b, rel_tol=TIE, abs_tol=0.0)


def ratio(value: float | None, by: float | None) -> float | None:
    """``value`` ÷ ``by``; None where either is unknown, or where there is nothing to divide by."""
    return None if value is None or not by else value / by


def median(values: Iterable[float | None]) -> float | None:
    """Middle of the finite values (mean of the middle two for an even number); None for an empty sample."""
    kept = clean(values).values
    return _median(kept) if kept else None


def quantile(values: Iterable[float | None], q: float) -> float | None:
    """Quantile with linear interpolation between order statistics (Hyndman–Fan type 7), or None.

    None where the sample can't carry it: n · min(q, 1-q) < 5, so p90 needs 50 values and p99 needs 500. Raises
    ValueError unless 0 < q < 1.
    """
    if not 0 < q < 1:
        raise ValueError(f"a quantile lies between 0 and 1, got {q!r}")
    kept = sorted(clean(values).values)
    # A tolerance, because 50 · (1 - 0.9) is 4.999…
    if len(kept) * min(q, 1 - q) < CARRIED - 1e-9:
        return None
    place = (len(kept) - 1) * q
    below = math.floor(place)
    above = min(below + 1, len(kept) - 1)
    return kept[below] + (kept[above] - kept[below]) * (place - below)
