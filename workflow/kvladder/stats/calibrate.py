"""How often the statistics are right, measured on made-up experiments whose answer is known.

``python -m kvladder.stats.calibrate`` writes the tables of ``docs/statistics.md`` (a few minutes). Each number of
blocks and noise has a seed of its own, so a test repeats any row alone. What is measured are the very functions that
the tables of an experiment use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from kvladder.stats.detectable import detectable, reach
from kvladder.stats.intervals import MIN_BLOCKS, median_interval
from kvladder.stats.modes import two_modes
from kvladder.stats.paired import NoiseFloor, PairedRatio, noise_floor, paired_ratio, within_noise

SEED = 20_260_105
DRAWS = 4_000
BLOCKS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 20)
PAGE = Path(__file__).parents[3] / "docs" / "statistics.md"
BEGIN, END = "<!-- measured by `python -m kvladder.stats.calibrate` -->", "<!-- end of what is measured -->"

Floats = NDArray[np.float64]
Noise = Callable[[Generator, tuple[int, ...]], Floats]


def _starts(slow: float) -> Noise:
    """Servers that draw one of two speeds at their start, `slow` of them the lower one, and keep it within 0.5 %."""

    def noise(random: Generator, shape: tuple[int, ...]) -> Floats:
        return np.where(random.random(shape) < slow, 33 / 26, 1.0) * np.exp(random.normal(0.0, 0.005, shape))

    return noise


NOISES: dict[str, Noise] = {
    "normal": lambda random, shape: np.exp(random.normal(0.0, 0.03, shape)),
    "uniform": lambda random, shape: random.uniform(0.95, 1.05, shape),
    "skewed": lambda random, shape: 1 + random.exponential(0.1, shape),
    "heavy tails": lambda random, shape: np.exp(0.02 * random.standard_t(2, shape)),
    "wide": lambda random, shape: np.exp(random.normal(0.0, 0.3, shape)),
    "two speeds": _starts(0.5),
    "one slow in five": _starts(0.2),
}
"""Noise of a trial's time inside its block, a factor. The first five have one mode."""
ONE_MODE = tuple(NOISES)[:5]

_BLOCK = 0.2
"""Standard deviation, on the logarithm, of the factor that all trials of a block share."""


@dataclass(frozen=True)
class Measured:
    """Shares of `DRAWS` experiments, at one number of blocks and one noise; ``alone`` is without an A/A control.

    ``covered``: intervals of the ratio to a quiet baseline that hold its true median, and ``bootstrap``: percentile
    bootstrap intervals that do. ``alarm``: equal setups told apart. ``seen``: differences told, on the right side, of
    the size that another experiment said it would see; ``mde``: median of those sizes. None below six blocks.
    """

    covered: float
    bootstrap: float
    alarm: float
    alarm_alone: float
    seen: float | None
    seen_alone: float | None
    mde: float | None
    mde_alone: float | None


def measure(blocks: int, noise: str, draws: int = DRAWS) -> Measured:
    """Run `draws` experiments of `blocks` blocks; equal arguments give equal results."""
    random = np.random.default_rng([SEED, blocks, list(NOISES).index(noise)])
    shape = (draws, blocks)
    make = NOISES[noise]
    mixed = make(random, shape) / NOISES["normal"](random, shape)
    truth = float(np.median(make(random, (1_000_000,)) / NOISES["normal"](random, (1_000_000,))))
    covered = [bool(median_interval(row).contains(truth)) for row in mixed.tolist()]
    block = np.exp(random.normal(0.0, _BLOCK, shape))
    baseline, control, setup = (block * make(random, shape) for _ in range(3))
    alarms: list[tuple[bool, bool]] = []
    effects: list[tuple[float | None, float | None]] = []
    seen: list[tuple[bool, bool]] = []
    for one in range(draws):
        ratio, floor = _experiment(baseline[one], control[one], setup[one])
        alarms.append((_side(ratio, floor) is not None, _side(ratio, None) is not None))
        effects.append((detectable(ratio, floor), detectable(ratio)))
    for one, planted in enumerate(effects):
        other = (one + 1) % draws
        found = []
        for effect, controlled in zip(planted, (True, False), strict=True):
            ratio, floor = _experiment(baseline[other], control[other], setup[other] * (1 + (effect or 0.0)))
            found.append(_side(ratio, floor if controlled else None) == "higher")
        seen.append((found[0], found[1]))
    known = blocks >= MIN_BLOCKS
    with_control, alone = zip(*effects, strict=True)
    return Measured(
        covered=_share(covered),
        bootstrap=_share(_bootstrapped(mixed, random, truth)),
        alarm=_share(first for first, _ in alarms),
        alarm_alone=_share(second for _, second in alarms),
        seen=_share(first for first, _ in seen) if known else None,
        seen_alone=_share(second for _, second in seen) if known else None,
        mde=float(np.median(with_control)) if known else None,
        mde_alone=float(np.median(alone)) if known else None,
    )


def _experiment(baseline: Floats, control: Floats, setup: Floats) -> tuple[PairedRatio, NoiseFloor | None]:
    base, again, mine = (dict(enumerate(times.tolist())) for times in (baseline, control, setup))
    return paired_ratio(mine, base), noise_floor([paired_ratio(again, base).interval])


def _side(ratio: PairedRatio, floor: NoiseFloor | None) -> str | None:
    """The side on which a report would say that the setup lies; None for no difference."""
    return None if within_noise(ratio.interval, floor) else ratio.difference(floor)


def _bootstrapped(samples: Floats, random: Generator, truth: float, resamples: int = 1_000) -> Iterable[bool]:
    """Whether the percentile bootstrap of each sample's median covers the truth: what is not used, for comparison."""
    n = samples.shape[1]
    places = np.sort(random.integers(0, n, (resamples, n)), axis=1)
    lower, upper = places[:, (n - 1) // 2], places[:, n // 2]
    for row in np.sort(samples, axis=1):
        low, high = np.quantile((row[lower] + row[upper]) / 2, [0.025, 0.975])
        yield bool(low <= truth <= high)


@dataclass(frozen=True)
class MeasuredModes:
    """Shares of `DRAWS` samples called two modes: by noise with one, and planted pairs 27 % and 10 % apart.

    ``drawn`` is the share of planted samples in which both modes have two trials or more, the most that can be found.
    """

    false: dict[str, float]
    planted: float
    near: float
    drawn: float


def measure_modes(trials: int, draws: int = DRAWS) -> MeasuredModes:
    """Sample `draws` times; modes are planted half and half, each 1 % wide."""
    random = np.random.default_rng([SEED, trials, len(NOISES)])
    shape = (draws, trials)
    false = {
        name: _share(two_modes(row) is not None for row in NOISES[name](random, shape).tolist()) for name in ONE_MODE
    }
    slow = random.random(shape) < 0.5
    spread = np.exp(random.normal(0.0, 0.01, shape))
    planted, near = (
        _share(two_modes(row) is not None for row in (np.where(slow, factor, 1.0) * spread).tolist())
        for factor in (33 / 26, 1.1)
    )
    drawn = np.minimum(slow.sum(axis=1), (~slow).sum(axis=1)) >= 2
    return MeasuredModes(false, planted, near, float(drawn.mean()))


def _share(found: Iterable[bool]) -> float:
    return float(np.mean(list(found)))


def coverage_row(blocks: int, measured: Sequence[Measured]) -> str:
    """Coverage by noise, and the lowest of the bootstrap."""
    kind = "95 %" if blocks >= MIN_BLOCKS else "range"
    return _line(
        blocks, kind, *(_percent(each.covered) for each in measured), _percent(min(m.bootstrap for m in measured))
    )


def alarm_row(blocks: int, measured: Sequence[Measured]) -> str:
    """False alarms by noise."""
    return _line(blocks, *(f"{_percent(each.alarm_alone)} / {_percent(each.alarm)}" for each in measured))


def effect_row(blocks: int, measured: Sequence[Measured]) -> str:
    """Detectable effect under the first noise, then what was seen of such effects, by noise."""
    first = measured[0]
    seen = (f"{_percent(each.seen_alone, 0)} / {_percent(each.seen, 0)}" for each in measured)
    return _line(blocks, f"{reach(blocks):.2f}", f"{_percent(first.mde_alone)} / {_percent(first.mde)}", *seen)


def modes_row(trials: int, measured: MeasuredModes) -> str:
    """False and true finds of two modes."""
    false = (_percent(each) for each in measured.false.values())
    return _line(trials, *false, *map(_percent, (measured.planted, measured.near, measured.drawn)))


def tables() -> str:
    """All tables as Markdown."""
    measured = {blocks: [measure(blocks, noise) for noise in NOISES] for blocks in BLOCKS}
    modes = {trials: measure_modes(trials) for trials in BLOCKS if trials > 3}
    both = "without / with an A/A control"
    parts = [
        f"Each cell stands for {DRAWS:,} made-up experiments.",
        "### Coverage: how often the interval holds the true ratio",
        _table(
            ["blocks", "printed as", *NOISES, "bootstrap alone, lowest"],
            [coverage_row(blocks, each) for blocks, each in measured.items()],
        ),
        f"### False alarms: how often equal setups are called different, {both}",
        _table(["blocks", *NOISES], [alarm_row(blocks, each) for blocks, each in measured.items()]),
        f"### Detectable effect: what is said for normal noise, and how often such an effect is seen, {both}",
        _table(
            ["blocks", "k", "said (normal)", *(f"seen: {noise}" for noise in NOISES)],
            [effect_row(blocks, each) for blocks, each in measured.items() if blocks >= MIN_BLOCKS],
        ),
        "### Two modes: how often they are found",
        _table(
            [
                "trials",
                *(f"none there: {noise}" for noise in ONE_MODE),
                "27 % apart",
                "10 % apart",
                "both drawn twice or more",
            ],
            [modes_row(trials, each) for trials, each in modes.items()],
        ),
    ]
    return "\n\n".join(parts)


def _table(head: Sequence[str], lines: Sequence[str]) -> str:
    return "\n".join([_line(*head), _line(*["---:"] * len(head)), *lines])


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _percent(share: float | None, decimals: int = 1) -> str:
    return "–" if share is None else f"{100 * share:.{decimals}f} %"


def write(page: Path = PAGE) -> None:
    """Write the measured part of the page. Raises ValueError where its marks are missing."""
    made = tables()
    head, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: lacks {BEGIN!r} or {END!r}")
    page.write_text(f"{head}{BEGIN}\n\n{made}\n\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    write()
