"""Comparison of a setup with the baseline inside blocks, and the noise floor of the machine."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from kvladder.stats.intervals import Interval, median_interval
from kvladder.stats.samples import clean

Block = TypeVar("Block", bound=Hashable)

Difference = Literal["lower", "higher", "no difference seen", "not enough data"]


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """Setup ÷ baseline over the blocks that have both.

    ``undefined`` counts blocks whose baseline is 0; ``unpaired`` blocks where one of the two has no value.
    ``difference`` says on which side of 1 the whole interval lies.
    """

    interval: Interval
    undefined: int
    unpaired: int

    @property
    def difference(self) -> Difference:
        """``no difference seen`` where the interval includes 1; equal samples are that, whatever their width."""
        inside = self.interval.contains(1.0)
        if inside is None or self.interval.low is None:
            return "not enough data"
        if inside:
            return "no difference seen"
        return "higher" if self.interval.low > 1 else "lower"


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
    return PairedRatio(median_interval(ratios), undefined, unpaired)


def within_noise(ratio: Interval, floor: Interval | None) -> bool | None:
    """Whether a ratio can't be told from the baseline's own repeat.

    True where its interval includes 1 or meets the noise floor, the interval of control ÷ baseline, of a setup that
    is the baseline a second time. None (unknown) without an interval, and without a floor where the interval lies
    beside 1: the machine's noise was not measured.
    """
    if ratio.contains(1.0) is not False:
        return ratio.contains(1.0)
    return None if floor is None else ratio.overlaps(floor)
