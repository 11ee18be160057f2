"""Statistics against known answers, and on samples that break naive ones (cases C20 and C21)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvladder.stats.detectable import detectable, reach
from kvladder.stats.intervals import Interval, covering_rank, median_interval
from kvladder.stats.modes import two_modes
from kvladder.stats.paired import NoiseFloor, differs, noise_floor, paired_ratio, within_noise
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
        ([1.0, 1.0, 1.0, 1.0, 1.0 + 5e-16], Interval(1.0, 1.0, 1.0 + 5e-16, "range", 5)),
        ([1.0] * 7 + [1.0 + 5e-16], Interval(1.0, 1.0, 1.0 + 5e-16, "range", 8)),
        ([3.0, 1.0, math.nan, 2.0, 4.0], Interval(2.5, 1.0, 4.0, "range", 4, 1)),
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


@pytest.mark.parametrize(("n", "rank"), [(6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (15, 3), (20, 5), (25, 7)])
def test_the_rank_is_that_of_the_tables(n: int, rank: int) -> None:
    """Ranks of the 95 % interval of a median as tabled since Nair (1940), counted from 0."""
    assert covering_rank(n) == rank


def blocks(*values: float | None) -> dict[int, float | None]:
    return dict(enumerate(values))


def test_ratio_is_paired_in_block() -> None:
    ratio = paired_ratio(blocks(1.0, 4.0, 9.0), blocks(2.0, 4.0, 6.0))
    assert ratio.interval == Interval(1.0, 0.5, 1.5, "range", 3)
    assert ratio.difference() == "no difference seen"


def test_only_blocks_with_both_count() -> None:
    ratio = paired_ratio({0: 1.0, 1: 2.0, 3: math.nan}, {0: 2.0, 2: 4.0, 3: 1.0})
    assert (ratio.interval.n, ratio.unpaired) == (1, 3)
    assert ratio.interval.kind == "not enough data"
    assert ratio.difference() == "not enough data"


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
    assert ratio.difference() == "no difference seen"
    assert within_noise(ratio.interval, None) is True


def test_nothing_is_ever_nan() -> None:
    pool: list[float | None] = [None, math.nan, 0.0, 1.0, 1.0, math.inf, 3e-4]
    random = np.random.default_rng(0)
    for _ in range(300):
        a, b = ([pool[place] for place in random.integers(0, len(pool), random.integers(0, 9))] for _ in range(2))
        interval = paired_ratio(blocks(*a), blocks(*b)).interval
        for value in (interval.median, interval.low, interval.high):
            assert value is None or math.isfinite(value)


def test_within_noise() -> None:
    floor = NoiseFloor(0.97, 1.04)
    assert within_noise(Interval(1.02, 1.01, 1.03, "95 %", 6), floor) is True
    assert within_noise(Interval(1.05, 1.04 + 1e-15, 1.06, "95 %", 6), floor) is True
    assert within_noise(Interval(0.96, 0.95, 0.97, "95 %", 6), floor) is True
    assert within_noise(Interval(1.10, 1.05, 1.12, "95 %", 6), floor) is False
    assert within_noise(Interval(0.90, 0.88, 0.96, "95 %", 6), floor) is False
    assert within_noise(Interval(1.02, 1.01, 1.03, "95 %", 6), None) is None
    assert within_noise(Interval(1.02, 0.99, 1.03, "95 %", 6), None) is True
    assert within_noise(Interval(1.02, None, None, "not enough data", 1), floor) is None


def test_the_noise_floor_spans_all_repeats_and_1() -> None:
    quiet, noisy = Interval(1.0, 0.99, 1.01, "95 %", 6), Interval(1.1, 1.005, 1.2, "range", 3)
    nothing = Interval(1.3, None, None, "not enough data", 1)
    assert noise_floor([]) is None
    assert noise_floor([nothing]) is None
    assert noise_floor([quiet, nothing]) == NoiseFloor(0.99, 1.01)
    assert noise_floor([quiet, noisy]) == NoiseFloor(0.99, 1.2)
    assert noise_floor([noisy]) == NoiseFloor(1.0, 1.2)


@pytest.mark.parametrize(
    ("ratios", "told"),
    [
        # All on one side of 1, but two blocks do so by chance in half of all comparisons, three in a quarter.
        ([1.02, 1.03], False),
        ([0.1, 0.11], True),
        ([1.01, 1.02, 1.03], False),
        ([1.05, 1.055, 1.06], True),
        ([0.943, 0.948, 0.952], True),
        ([1.02, 1.03, 1.03, 1.04], True),
        ([1.001, 1.02, 1.03, 1.03, 1.04], False),
        ([0.0, 0.0, 0.0], True),
        ([0.0, 0.0, 0.5], False),
        ([0.99, 1.01, 1.02], False),
        ([1.001, 1.02, 1.03, 1.03, 1.04, 1.05], True),
        ([1.5], None),
    ],
)
def test_a_range_counts_only_where_it_lies_far_enough_beside_1(ratios: list[float], told: bool | None) -> None:
    assert differs(median_interval(ratios)) is told
    if 0.0 not in ratios:
        assert differs(median_interval([1 / ratio for ratio in ratios])) is told


def test_with_a_noise_floor_to_clear_a_range_need_not_lie_that_far_from_1() -> None:
    floor = NoiseFloor(0.99, 1.005)
    three, two, near = median_interval([1.01, 1.02, 1.03]), median_interval([1.33, 1.44]), median_interval([1.02, 1.03])
    assert [differs(each) for each in (three, two, near)] == [False, False, False]
    assert [differs(each, floor) for each in (three, two, near)] == [True, True, False]
    assert within_noise(three, floor) is False
    assert within_noise(three, NoiseFloor(0.99, 1.02)) is True
    assert within_noise(near, floor) is True


def test_ties_in_some_blocks_are_ties() -> None:
    ratio = paired_ratio(blocks(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), blocks(1.0, 2.0, 3.0, 3.9, 4.9, 5.9))
    assert ratio.interval.low == 1.0
    assert ratio.difference() == "no difference seen"


def test_what_could_have_been_seen_by_hand() -> None:
    ratios = [math.exp(0.01 * each) for each in (-3, -1, 0, 1, 1, 2)]
    ratio = paired_ratio(blocks(*ratios), blocks(*[1.0] * 6))
    spread = 0.01 * math.sqrt(16 / 5)
    assert detectable(ratio) == pytest.approx(math.exp(reach(6) * spread) - 1)
    # The wider side of the floor is added on the logarithm.
    assert detectable(ratio, NoiseFloor(0.95, 1.02)) == pytest.approx(math.exp(reach(6) * spread) / 0.95 - 1)
    # Without noise in the spread's estimate all six lie on one side in 80 % from this on: Φ(1.793)⁶ = 0.8.
    assert 1.793 < reach(6) < 2.3
    assert reach(400) == pytest.approx(0.1816, abs=0.001)  # P(Bin(400, Φ(-k)) <= 179) = 0.8


def test_a_lopsided_interval_sets_what_could_have_been_seen() -> None:
    ratio = paired_ratio(blocks(*[1.0] * 6, *[1.001] * 3, 1.3, 1.3, 1.3), blocks(*[1.0] * 12))
    assert reach(12) * 0.12 < math.log(1.3)
    assert detectable(ratio) == pytest.approx(1.3 / 1.0005 - 1)


@pytest.mark.parametrize("values", [[1.0, 1.1, 0.9, 1.0, 1.05], [1.0] * 8, [0.0, 1.0, 1.0, 1.0, 1.0, 1.1], []])
def test_what_could_have_been_seen_is_unknown(values: list[float]) -> None:
    assert detectable(paired_ratio(blocks(*values), blocks(*[1.0] * len(values)))) is None


def test_a_ratio_that_was_not_told_from_1_is_none_that_would_have_been_seen() -> None:
    random = np.random.default_rng(3)
    for _ in range(300):
        n = int(random.integers(6, 15))
        ratio = paired_ratio(blocks(*np.exp(random.standard_t(2, n) * 0.02).tolist()), blocks(*[1.0] * n))
        mde = detectable(ratio)
        assert mde is not None and ratio.interval.median is not None
        if ratio.difference() == "no difference seen":
            assert abs(math.log(ratio.interval.median)) <= math.log1p(mde) + 1e-12


# Eight trials a setup, 33 or 26 tokens/s for the life of a process; A drew five fast ones, B three.
A = [33.1, 26.0, 32.9, 33.0, 26.2, 33.2, 26.1, 32.8]
B = [26.1, 33.0, 26.2, 25.9, 32.9, 26.0, 33.1, 26.1]
SPEEDS = {"A": A, "B": B}


def test_two_modes_are_found_in_both_and_the_difference_is_within_noise() -> None:
    for sample, low, high in ((A, 3, 5), (B, 5, 3)):
        modes = two_modes(sample)
        assert modes is not None
        assert (modes.n_low, modes.n_high) == (low, high)
        assert modes.low == pytest.approx(26.1, abs=0.2)
        assert modes.high == pytest.approx(33.0, abs=0.2)
    ratio = paired_ratio(blocks(*A), blocks(*B))
    assert ratio.interval.kind == "95 %"
    assert ratio.difference() == "no difference seen"
    assert within_noise(ratio.interval, None) is True


def test_requests_of_one_trial_are_one_draw() -> None:
    """A test on the requests of those trials shouts; the trials' medians don't."""
    random = np.random.default_rng(21)
    requests = {
        name: [random.normal(value, 0.005 * value, 1000) for value in trials] for name, trials in SPEEDS.items()
    }
    pooled = {name: np.concatenate(rows) for name, rows in requests.items()}
    error = math.hypot(*(rows.std() / math.sqrt(rows.size) for rows in pooled.values()))
    assert (pooled["A"].mean() - pooled["B"].mean()) / error > 20
    trials = {name: blocks(*(median(row.tolist()) for row in rows)) for name, rows in requests.items()}
    ratio = paired_ratio(trials["A"], trials["B"])
    assert (ratio.interval.n, ratio.difference()) == (8, "no difference seen")
    assert all(two_modes(values.values()) for values in trials.values())


def test_modes_need_values_and_a_step() -> None:
    assert two_modes([1.0, 1.0, 2.0]) is None
    assert two_modes([1.0] * 8) is None
    assert two_modes([1.0] * 4 + [1.0 + 5e-16] * 4) is None
    assert two_modes([1.0, 1.001, 1.03, 1.031]) is None  # 3 %: two, but nobody's business
    assert two_modes([0.90, 0.91, 2.60, 2.61]) is not None


def test_clean_counts_what_it_leaves_out() -> None:
    sample = clean([1, None, math.nan, -math.inf, 2.5])
    assert (sample.values, sample.excluded) == ((1.0, 2.5), 3)
