"""Two modes: servers that draw their speed once, at start, and keep it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from kvladder.stats.samples import clean

_WIDER = {4: 12.8, 5: 7.0, 6: 4.6, 7: 3.7, 8: 3.0, 9: 2.7, 10: 2.4, 11: 2.2, 12: 2.0, 13: 1.9, 14: 1.8, 15: 1.7}
_WIDER_FROM_16 = 1.6
_LEAST_STEP = 0.05


@dataclass(frozen=True, slots=True)
class Modes:
    """Medians of the two modes and how many trials are in each, lower one first."""

    low: float
    high: float
    n_low: int
    n_high: int


def two_modes(values: Iterable[float | None]) -> Modes | None:
    """Find two modes in a sample whose unit is the trial; None where there is one, or too few values to tell.

    The sample is cut at the widest gap that leaves two values on either side, on the logarithm where all values are
    positive. It has two modes if that gap is at least f(n) times the width of the wider part, and at least 5 % of the
    lower value. f is the 99th percentile of that quotient for samples with one mode, the highest of uniform (up to six
    values), exponential (from seven on), normal and t(2), so that one mode is called two in 1 % of cases or fewer;
    `kvladder.stats.calibrate` measures it. Below four values nothing can be said; at four or five only far-apart modes
    are found. A mode that a single trial drew is never one.
    """
    data = sorted(clean(values).values)
    if len(data) < min(_WIDER):
        return None
    scale = [math.log(value) for value in data] if data[0] > 0 else data
    best, cut = 0.0, None
    for place in range(2, len(data) - 1):
        gap = scale[place] - scale[place - 1]
        width = max(scale[place - 1] - scale[0], scale[-1] - scale[place])
        quotient = math.inf if width == 0 and gap > 0 else gap / width if width else 0.0
        if quotient > best:
            best, cut = quotient, place
    if cut is None or best < _WIDER.get(len(data), _WIDER_FROM_16):
        return None
    if data[cut] - data[cut - 1] < _LEAST_STEP * abs(data[cut - 1]):
        return None
    return Modes(median(data[:cut]), median(data[cut:]), cut, len(data) - cut)
