"""Break-even length and pay-back of the first request, on curves whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from kvladder.stats.break_even import Times, break_even, break_even_over_blocks, hits_to_pay

LENGTHS = (500, 1000, 2000, 4000, 8000)


def line(constant: float, per_token: float) -> Callable[[int], float]:
    return lambda length: constant + per_token * length


def curve(
    hit: Callable[[int], float], computed: Callable[[int], float], lengths: tuple[int, ...] = LENGTHS
) -> dict[int, tuple[float | None, float | None]]:
    return {length: (hit(length), computed(length)) for length in lengths}


def test_straight_lines_give_the_exact_length_between_measured_ones() -> None:
    # 0.065 + 1e-5 L = 0.02 + 4e-5 L at L = 0.045 / 3e-5.
    found = break_even(curve(line(0.065, 1e-5), line(0.02, 4e-5)))
    assert found is not None
    assert (found.answer, found.shortest, found.longest) == ("from", 500, 8000)
    assert found.tokens == pytest.approx(1500)
    assert found.crossings == (found.tokens,)


def test_no_crossing() -> None:
    already = break_even(curve(line(0.01, 1e-5), line(0.02, 4e-5)))
    never = break_even(curve(line(0.02, 5e-5), line(0.02, 4e-5)))
    assert already is not None and (already.answer, already.tokens, already.shortest) == ("already", None, 500)
    assert never is not None and (never.answer, never.tokens, never.longest) == ("never", None, 8000)


def test_a_tie_is_not_faster() -> None:
    same = break_even(curve(line(0.02, 4e-5), line(0.02, 4e-5)))
    assert same is not None and (same.answer, same.crossings) == ("never", ())
    at_2000 = break_even({1000: (2.0, 1.0), 2000: (1.0, 1.0), 4000: (1.0, 2.0)})
    assert at_2000 is not None and (at_2000.answer, at_2000.tokens) == ("from", 2000)


def test_several_crossings_are_all_named_and_the_last_one_decides() -> None:
    wave: Times = {1: (2.0, 1.0), 2: (1.0, 2.0), 3: (2.0, 1.0), 4: (1.0, 2.0)}
    found = break_even(wave)
    assert found is not None
    assert (found.answer, found.tokens, found.crossings) == ("from", 3.5, (1.5, 2.5, 3.5))


def test_faster_only_for_short_prompts() -> None:
    found = break_even({1000: (1.0, 2.0), 2000: (3.0, 2.0), 3000: (4.0, 2.0)})
    assert found is not None and (found.answer, found.tokens) == ("up to", 1500)


def test_missing_cells_are_bridged_and_nothing_is_made_up() -> None:
    whole = curve(line(0.065, 1e-5), line(0.02, 4e-5))
    holes: Times = {**whole, 1000: (None, 0.06), 2000: (0.085, math.nan)}
    found = break_even(holes)
    assert found is not None and found.tokens == pytest.approx(1500)
    assert break_even({500: (None, 1.0), 1000: (1.0, None)}) is None
    assert break_even({}) is None
    single = break_even({500: (1.0, 2.0)})
    assert single is not None and (single.answer, single.shortest, single.longest) == ("already", 500, 500)


def test_blocks_are_paired() -> None:
    # Each block's machine is twice as slow as the one before: unpaired medians would say something else.
    blocks = {
        block: {length: (scale * hit, scale * computed) for length, (hit, computed) in base.items()}
        for block, scale, base in (
            (0, 1.0, {1000: (1.2, 1.0), 2000: (0.8, 2.0)}),
            (1, 2.0, {1000: (1.1, 1.0), 2000: (0.9, 2.0)}),
            (2, 4.0, {1000: (1.3, 1.0), 2000: (0.7, 2.0)}),
        )
    }
    found = break_even_over_blocks(blocks)
    assert found is not None
    assert (found.answer, found.blocks) == ("from", 3)
    # Median ratios 1.2 and 0.4 on the median baseline 2 and 4: +0.4 at 1000, -2.4 at 2000.
    assert found.tokens == pytest.approx(1000 + 1000 * 0.4 / 2.8)
    assert found.low == pytest.approx(1000 + 1000 * 0.1 / 1.2)
    assert found.high == pytest.approx(1000 + 1000 * 0.3 / 1.6)


def test_blocks_that_disagree_have_no_range() -> None:
    faster, slower = {1000: (1.2, 1.0), 2000: (0.8, 2.0)}, {1000: (1.5, 1.0), 2000: (2.5, 2.0)}
    found = break_even_over_blocks({0: faster, 1: faster, 2: slower})
    assert found is not None
    assert (found.answer, found.low, found.high, found.blocks) == ("from", None, None, 3)


def test_a_block_without_a_cell_does_not_count_there() -> None:
    found = break_even_over_blocks({0: {1000: (2.0, 1.0), 2000: (1.0, 2.0)}, 1: {2000: (None, 2.0)}})
    assert found is not None and (found.blocks, found.tokens, found.low) == (1, 1500, None)
    assert break_even_over_blocks({0: {1000: (None, 1.0)}, 1: {}}) is None


@pytest.mark.parametrize(
    ("first", "hit", "computed", "hits"),
    [
        (0.9, 0.2, 1.0, 0.0),  # cheaper from the start
        (1.0, 0.2, 1.0, 1.0),  # even: strictly less only after a hit
        (1.5, 0.5, 1.0, 2.0),  # one hit makes it even
        (1.5, 0.4, 1.0, 1.0),
        (3.0, 0.9, 1.0, 21.0),  # 20 hits make it even
        (2.0, 1.0, 1.0, math.inf),
        (2.0, 1.5, 1.0, math.inf),
    ],
)
def test_hits_that_pay_for_the_first_request(first: float, hit: float, computed: float, hits: float) -> None:
    assert hits_to_pay(first, hit, computed) == hits
    if 0 < hits < math.inf:
        assert first + hits * hit < (1 + hits) * computed
        assert first + (hits - 1) * hit >= hits * computed - 1e-12
