"""Comparison of a setup with the baseline inside blocks, and the noise floor of the machine."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from math import log
from typing import Literal, TypeVar

from kvladder.stats.intervals import Interval, median_interval
from kvladder.stats.samples import clean, equal

Block = TypeVar("Block", bound=Hashable)

Difference = Literal["lower", "higher", "no difference seen", "not enough data"]

_APART = {2: 6.5, 3: 1.0, 4: 0.3, 5: 0.05}
_APART_CONTROLLED = {2: 2.5}
"""How many of its own widths, on the logarithm, a range of that many ratios must lie beside 1 to count, without and
with an A/A control, whose noise floor it must clear then as well.

That all of a few blocks lie on one side happens by chance: in 25 % of comparisons of a setup with itself over three
blocks, 50 % over two. These are the 95th percentiles of distance ÷ width for equal setups, rounded up; uniform noise is
the worst of uniform, normal, exponential and Student's t. `kvladder.stats.calibrate` measures what comes of it.
"""


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """Setup ÷ baseline over the blocks that have both.

    ``ratios`` are those of the blocks, and ``interval`` that of their median. ``undefined`` counts blocks whose
    baseline is 0; ``unpaired`` blocks where one of the two has no value.
    """

    ratios: tuple[float, ...]
    interval: Interval
    undefined: int
    unpaired: int

    def difference(self, floor: NoiseFloor | None = None) -> Difference:
        """On which side of 1 the setup lies; ``no difference seen`` where it can't be told from 1 (`differs`)."""
        told = differs(self.interval, floor)
        if told is None or self.interval.low is None:
            return "not enough data"
        if not told:
            return "no difference seen"
        return "higher" if self.interval.low > 1 else "lower"


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """What equal setups show against each other: ratios from ``low`` to ``high``, 1 among them."""

    low: float
    high: float

    def meets(self, ratio: Interval) -> bool | None:
        """Whether the two share a point, ties included; None without an interval."""
        if ratio.low is None or ratio.high is None:
            return None
        above = ratio.low > self.high and not equal(ratio.low, self.high)
        below = ratio.high < self.low and not equal(ratio.high, self.low)
        return not (above or below)


def paired_ratio(setup: Mapping[Block, float | None], baseline: Mapping[Block, float | None]) -> PairedRatio:
    """Median of setup ÷ baseline, each taken inside its block (a dimensionless number), with its interval.

    Keys name the blocks. A block counts once both sides are finite and the baseline isn't 0: a ratio to 0 is
    undefined, not infinite.
    """
    ratios: list[float] = []
    undefined = unpaired = 0
    for block in sorted({*setup, *baseline}, key=repr):
        both = clean((setup.get(block), baseline.get(block)))
        if both.excluded:
            unpaired += 1
        elif both.values[1] == 0:
            undefined += 1
        else:
            ratios.append(both.values[0] / both.values[1])
    return PairedRatio(tuple(ratios), median_interval(ratios), undefined, unpaired)


def differs(ratio: Interval, floor: NoiseFloor | None = None) -> bool | None:
    """Whether a ratio can be told from 1; None without an interval.

    With a 95 % interval: whether 1 lies outside. A range, which promises nothing, must also lie beside 1 by `_APART`
    times its width, less where a noise floor is there to be cleared too (`within_noise`), so that equal setups are told
    apart in about 5 % of comparisons at any number of blocks. Equal samples have a ratio of 1 and no width, and are no
    difference.
    """
    inside = ratio.contains(1.0)
    if inside is None or ratio.low is None or ratio.high is None:
        return None
    if inside:
        return False
    if ratio.kind == "95 %" or equal(ratio.low, ratio.high):
        return True
    if ratio.low <= 0:
        return False
    beside = log(ratio.low) if ratio.low > 1 else -log(ratio.high)
    apart = _APART if floor is None else _APART_CONTROLLED
    return beside >= apart.get(ratio.n, 0.0) * log(ratio.high / ratio.low)


def noise_floor(controls: Iterable[Interval]) -> NoiseFloor | None:
    """From the lowest to the highest end of the intervals of A/A ratios, and 1; None where none has an interval.

    Equal setups have the ratio 1, so it belongs to the floor even where a control's interval lies beside it.
    """
    ends = [end for each in controls if each.low is not None and each.high is not None for end in (each.low, each.high)]
    return NoiseFloor(min(1.0, *ends), max(1.0, *ends)) if ends else None


def within_noise(ratio: Interval, floor: NoiseFloor | None) -> bool | None:
    """Whether a ratio can't be told from a repeat of the same setup.

    True where it can't be told from 1 (`differs`) or its interval meets the noise floor. None (unknown) without an
    interval, and without a floor where the ratio differs from 1: the machine's noise was not measured.
    """
    told = differs(ratio, floor)
    if not told:
        return None if told is None else True
    return None if floor is None else floor.meets(ratio)
