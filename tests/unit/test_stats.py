"""Statistics against known answers, and on samples that break naive ones (cases C20 and C21)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvladder.stats.intervals import Interval, median_interval
from kvladder.stats.modes import two_modes
from kvladder.stats.paired import paired_ratio, within_noise
from kvladder.stats.samples import clean, median, quantile


def test_median_and_quantiles_by_hand() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, None, 2.0, 3.0]) == 2.5
    assert median([None]) is None
    assert quantile(range(51), 0.9) == 45.0
    assert quantile(range(50), 0.9) == pytest.approx(44.1)


@pytest.mark.parametrize(("n", "q"), [(49, 0.9), (499, 0.99), (9, 0.5), (0, 0.9), (49, 0.1)])
def test_no_percentile_that_n_cannot_carry(n: int, q: float) -> None:
    assert quantile([1.0] * n, q) is None


@pytest.mark.parametrize("q", [0, 1, -1, 90])
def test_a_quantile_outside_0_to_1_is_an_error(q: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantile([1.0] * 1000, q)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], Interval(None, None, None, "not enough data", 0)),
        ([math.nan, None], Interval(None, None, None, "not enough data", 0, 2)),
        ([2.0], Interval(2.0, None, None, "not enough data", 1)),
        ([2.0, 4.0], Interval(3.0, 2.0, 4.0, "range", 2)),
        ([1.0, 2.0, math.nan, 3.0, 9.0], Interval(2.5, 1.0, 9.0, "range", 4, 1)),
        ([5.0] * 5, Interval(5.0, 5.0, 5.0, "range", 5)),
        # Resampling equal values says nothing about the next one: no 95 % is claimed.
        ([5.0] * 8, Interval(5.0, 5.0, 5.0, "range", 8)),
        ([1.0, math.inf, 3.0], Interval(2.0, 1.0, 3.0, "range", 2, 1)),
    ],
)
def test_degenerate_samples_give_a_range_or_not_enough_data(values: list[float | None], expected: Interval) -> None:
    assert median_interval(values) == expected


def test_six_blocks_are_the_first_with_a_95_percent_interval() -> None:
    assert median_interval([1.0, 2, 3, 4, 5]).kind == "range"
    six = median_interval([1.0, 2, 3, 4, 5, 6])
    assert (six.kind, six.low, six.high) == ("95 %", 1.0, 6.0)
    assert median_interval([6.0, 5, 4, 3, 2, 1]) == six


@pytest.mark.parametrize("n", [6, 7, 8, 9, 10, 12, 20])
def test_an_interval_called_95_percent_covers_the_median_in_93_percent_at_least(n: int) -> None:
    random = np.random.default_rng(n)
    draws = 1000
    samples = {
        "normal": (random.normal(1.0, 0.1, (draws, n)), 1.0),
        "log-normal": (np.exp(random.normal(0.0, 0.5, (draws, n))), 1.0),
        "exponential": (random.exponential(1.0, (draws, n)), math.log(2)),
    }
    for name, (rows, truth) in samples.items():
        covered = sum(bool(median_interval(row.tolist()).contains(truth)) for row in rows)
        assert covered / draws >= 0.93, name


@pytest.mark.parametrize("n", [6, 8, 12])
def test_equal_setups_are_told_apart_in_7_percent_at_most(n: int) -> None:
    random = np.random.default_rng(100 + n)
    alarms = 0
    for _ in range(1000):
        a, b = random.normal(1.0, 0.03, (2, n)).tolist()
        alarms += paired_ratio(dict(enumerate(a)), dict(enumerate(b))).difference != "no difference seen"
    assert alarms / 1000 <= 0.07


def blocks(*values: float | None) -> dict[int, float | None]:
    return dict(enumerate(values))


def test_ratio_is_paired_in_block() -> None:
    ratio = paired_ratio(blocks(1.0, 4.0, 9.0), blocks(2.0, 4.0, 6.0))
    assert ratio.interval == Interval(1.0, 0.5, 1.5, "range", 3)
    assert ratio.difference == "no difference seen"


def test_only_blocks_with_both_count() -> None:
    ratio = paired_ratio({0: 1.0, 1: 2.0, 3: math.nan}, {0: 2.0, 2: 4.0, 3: 1.0})
    assert (ratio.interval.n, ratio.unpaired) == (1, 3)
    assert ratio.interval.kind == "not enough data"
    assert ratio.difference == "not enough data"


def test_a_ratio_to_zero_is_undefined() -> None:
    ratio = paired_ratio(blocks(1.0, 1.0, 0.0), blocks(0.0, 2.0, 2.0))
    assert ratio.undefined == 1
    assert (ratio.interval.median, ratio.interval.low, ratio.interval.high) == (0.25, 0.0, 0.5)


def test_a_tiny_baseline_is_a_baseline() -> None:
    assert paired_ratio(blocks(0.0006, 0.0006), blocks(0.0003, 0.0003)).interval.median == pytest.approx(2.0)


@pytest.mark.parametrize("n", [3, 5, 8])
@pytest.mark.parametrize("off", [0.0, 5e-16])
def test_equal_samples_are_no_difference(n: int, off: float) -> None:
    ratio = paired_ratio(blocks(*[1.0 + off] * n), blocks(*[1.0] * n))
    assert ratio.difference == "no difference seen"
    assert within_noise(ratio.interval, None) is True


def test_nothing_is_ever_nan() -> None:
    pool: list[float | None] = [None, math.nan, 0.0, 1.0, 1.0, math.inf, 3e-4]
    random = np.random.default_rng(0)
    for _ in range(300):
        a, b = ([pool[place] for place in random.integers(0, len(pool), random.integers(0, 9))] for _ in range(2))
        interval = paired_ratio(blocks(*a), blocks(*b)).interval
        for value in (interval.median, interval.low, interval.high):
            assert value is None or math.isfinite(value)


def test_noise_floor() -> None:
    floor = Interval(1.0, 0.97, 1.04, "range", 3)
    assert within_noise(Interval(1.02, 1.01, 1.03, "range", 3), floor) is True
    assert within_noise(Interval(1.10, 1.05, 1.12, "range", 3), floor) is False
    assert within_noise(Interval(1.02, 1.01, 1.03, "range", 3), None) is None
    assert within_noise(Interval(1.02, 0.99, 1.03, "range", 3), None) is True
    assert within_noise(Interval(1.02, None, None, "not enough data", 1), floor) is None


# Eight trials a setup, 33 or 26 tokens/s for the life of a process; A drew five fast ones, B three.
A = [33.1, 26.0, 32.9, 33.0, 26.2, 33.2, 26.1, 32.8]
B = [26.1, 33.0, 26.2, 25.9, 32.9, 26.0, 33.1, 26.1]


def test_two_modes_are_found_in_both_and_the_difference_is_within_noise() -> None:
    for sample, low, high in ((A, 3, 5), (B, 5, 3)):
        modes = two_modes(sample)
        assert modes is not None
        assert (modes.n_low, modes.n_high) == (low, high)
        assert modes.low == pytest.approx(26.1, abs=0.2)
        assert modes.high == pytest.approx(33.0, abs=0.2)
    ratio = paired_ratio(blocks(*A), blocks(*B))
    assert ratio.interval.kind == "95 %"
    assert ratio.difference == "no difference seen"
    assert within_noise(ratio.interval, None) is True


@pytest.mark.parametrize("n", [4, 5, 6, 8, 12])
def test_one_mode_is_called_two_in_2_percent_at_most(n: int) -> None:
    random = np.random.default_rng(200 + n)
    for rows in (random.normal(1.0, 0.1, (1000, n)), random.uniform(1.0, 2.0, (1000, n))):
        assert sum(two_modes(row.tolist()) is not None for row in rows) <= 20


def test_modes_need_values_and_a_step() -> None:
    assert two_modes([1.0, 1.0, 2.0]) is None
    assert two_modes([1.0] * 8) is None
    assert two_modes([1.0] * 4 + [1.0 + 5e-16] * 4) is None
    assert two_modes([1.0, 1.001, 1.03, 1.031]) is None  # 3 %: two, but nobody's business
    assert two_modes([0.90, 0.91, 2.60, 2.61]) is not None


def test_clean_counts_what_it_leaves_out() -> None:
    sample = clean([1, None, math.nan, -math.inf, 2.5])
    assert (sample.values, sample.excluded) == ((1.0, 2.5), 3)
