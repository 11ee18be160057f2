"""The hit oracle against known answers: the seed's ceiling, textbook LRU, and what vLLM's tiers do at their limits."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest

from kvladder.stats.oracle import (
    Access,
    Hierarchy,
    Order,
    Policy,
    Reset,
    Tier,
    better_capacity,
    ceiling,
    replay,
    working_set,
)

B = 16


def prompt(stream: int, blocks: int, time: int = 0, last: int = 1) -> Access:
    """A prompt of whole blocks and `last` tokens more."""
    first = stream << 32
    return Access(range(first, first + blocks), blocks * B + last, sent=time, first=time, end=time)


def passes(prompts: int, blocks: int, count: int) -> list[Access]:
    """The same prompts again and again, one after the other."""
    return [prompt(place % prompts, blocks, time=place) for place in range(prompts * count)]


def host(capacity: int | None, policy: Policy = "lru", order: Order = "tail-first", chunk: int = 1) -> Hierarchy:
    return Hierarchy(B, host=Tier("cpu", capacity, chunk, policy, order))


def hits(sequence: Sequence[Access | Reset], hierarchy: Hierarchy, **how: bool) -> list[int]:
    """Hit blocks of each access in all tiers."""
    return [sum(each.values()) // B for each in replay(sequence, hierarchy, **how).hits]


def conversations(block: int, count: int = 2, turns: int = 8) -> list[Access]:
    """The ladder seed's: 12,288 tokens, then 4,096 more a turn and the generated one; turn by turn over all."""
    lengths = [12_288 + 4_097 * turn for turn in range(turns)]
    return [
        Access(range(place << 32, (place << 32) + tokens // block), tokens)
        for tokens in lengths
        for place in range(count)
    ]


@pytest.mark.parametrize(("block", "share"), [(1, 80.77), (16, 80.76)])
def test_the_ladder_seeds_ceiling(block: int, share: float) -> None:
    accesses = conversations(block)
    assert sum(access.tokens for access in accesses) == 2 * 213_020
    assert 100 * ceiling(accesses, block) == pytest.approx(share, abs=0.005)


def test_working_set_of_the_ladder_seed() -> None:
    assert working_set(conversations(1, count=16), 1) == 16 * 40_967


def test_no_requests() -> None:
    assert ceiling([], B) == 0.0
    assert replay([], host(4)).certain == 0


@pytest.mark.parametrize(("last", "blocks"), [(0, 2), (1, 3), (15, 3)])
def test_the_last_token_is_always_computed(last: int, blocks: int) -> None:
    assert hits([prompt(0, 3, 0, last), prompt(0, 3, 1, last)], host(None)) == [0, blocks]


def test_a_tier_that_hits_whole_prompts() -> None:
    tier = Tier("cpu", None, whole=True)
    sequence = [prompt(0, 3, 0, last=0), prompt(0, 3, 1, last=0)]
    assert [hit["cpu"] for hit in replay(sequence, Hierarchy(B, host=tier)).hits] == [0, 3 * B - 1]


def test_nothing_evicted_is_certain_to_the_end() -> None:
    result = replay(passes(4, 8, 3), host(32))
    assert (result.certain, result.evicted, result.refused) == (12, {"cpu": 0}, {"cpu": 0})
    assert replay(passes(4, 8, 3), host(31)).certain == 3


def test_a_watermark_ends_certainty_before_the_tier_is_full() -> None:
    tier = Tier("cpu", 40, sure=0.5)
    assert replay(passes(4, 8, 2), Hierarchy(B, host=tier)).certain == 2


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_cycle_larger_than_the_tier_thrashes(policy: Policy) -> None:
    assert sum(hits(passes(12, 8, 4), host(58, policy))) == 0
    assert hits(passes(12, 8, 4), host(96, policy)) == [0] * 12 + [8] * 36


def test_a_cycle_that_is_a_little_larger_loses_more_with_each_pass() -> None:
    """92 of 96 chunks. The first prompt lost its tail; storing that again evicts its own head, which is older."""
    found = hits(passes(12, 8, 3), host(92))
    assert found[12:24] == [4] + [8] * 11
    assert found[24:27] == [0, 4, 8]


def test_what_goes_first_inside_a_prompt_decides_what_is_left() -> None:
    sequence = [prompt(0, 8, 0), prompt(1, 4, 1), prompt(0, 8, 2)]
    assert hits(sequence, host(8, order="tail-first"))[-1] == 4
    assert hits(sequence, host(8, order="head-first"))[-1] == 0


def test_arc_keeps_what_is_asked_for_again_through_a_scan() -> None:
    often = [prompt(0, 4, time) for time in range(3)]
    scan = [prompt(stream, 4, stream + 3) for stream in range(1, 9)]
    sequence = [*often, *scan, prompt(0, 4, 99)]
    assert hits(sequence, host(12, "lru"))[-1] == 0
    assert hits(sequence, host(12, "arc"))[-1] == 4


def test_a_prompt_longer_than_the_tier_is_refused_whole() -> None:
    result = replay([prompt(0, 9, 0), prompt(0, 9, 1)], host(8))
    assert [hit["cpu"] for hit in result.hits] == [0, 0]
    assert result.refused["cpu"] > 0 and result.certain == 0


def test_a_prompt_computed_in_steps_is_stored_as_far_as_it_fits() -> None:
    hierarchy = host(8).stepped(4 * B)
    result = replay([prompt(0, 6, 0), prompt(0, 6, 1)], hierarchy)
    assert [hit["cpu"] // B for hit in result.hits] == [0, 6]


def test_output_takes_room() -> None:
    sequence = [prompt(0, 8, 0), prompt(1, 8, 1), prompt(0, 8, 2)]
    assert hits(sequence, host(16)) == [0, 0, 8]
    sequence[1] = Access(range(1000, 1008), 8 * B + 1, output=range(2000, 2004), first=1, end=1)
    assert hits(sequence, host(16)) == [0, 0, 4]


def test_chunks_are_hit_whole() -> None:
    assert hits([prompt(0, 35, 0), prompt(0, 35, 1)], host(None, chunk=16)) == [0, 32]


def test_the_host_tier_goes_on_where_the_devices_hit_ends() -> None:
    """The device has 5 blocks of the first prompt left, the host tier all of it, in chunks of 4."""
    tiers = Hierarchy(B, device=Tier("gpu", 13), host=Tier("cpu", None, 4))
    found = replay([prompt(0, 12, 0), prompt(1, 6, 1), prompt(0, 12, 2)], tiers).hits[-1]
    assert found == {"gpu": 6 * B, "cpu": 6 * B}


def test_less_than_a_chunk_beyond_the_device_is_no_hit() -> None:
    tiers = Hierarchy(B, device=Tier("gpu", 13), host=Tier("cpu", None, 4))
    found = replay([prompt(0, 12, 0), prompt(1, 2, 1), prompt(0, 12, 2)], tiers).hits[-1]
    assert found == {"gpu": 10 * B, "cpu": 0}


def test_resets() -> None:
    tiers = Hierarchy(B, device=Tier("gpu", 99), host=Tier("cpu", 99), below="nvme")
    sequence: list[Access | Reset] = [prompt(0, 4, 0)]
    for what in ("nothing", "device", "host"):
        sequence += [Reset(what), prompt(0, 4, len(sequence))]
    found = [{name: size // B for name, size in hit.items() if size} for hit in replay(sequence, tiers).hits]
    assert found == [{}, {"gpu": 4}, {"cpu": 4}, {"nvme": 4}]


def test_files_serve_what_the_host_tier_lost() -> None:
    tiers = Hierarchy(B, host=Tier("cpu", 58), below="nvme")
    result = replay(passes(12, 8, 2), tiers)
    assert [sum(hit.values()) // B for hit in result.hits] == [0] * 12 + [8] * 12
    assert sum(hit["nvme"] for hit in result.hits) // B == 96


def test_a_prompt_longer_than_the_host_tier_ends() -> None:
    tiers = Hierarchy(B, host=Tier("cpu", 8), below="nvme", step=4 * B)
    assert len(replay([prompt(0, 12, 0), prompt(0, 12, 1)], tiers).hits) == 2


def test_a_request_that_was_looked_up_keeps_what_it_loads() -> None:
    """Two requests at once: one is looked up before the other's blocks evict what it needs."""
    early = Access(range(8), 8 * B + 1, sent=10, first=30, end=30)
    other = Access(range(100, 108), 8 * B + 1, sent=11, first=20, end=20)
    sequence = [prompt(0, 8, 0), Reset("nothing"), early, other]
    assert hits(sequence, host(12))[1] == 4
    assert hits(sequence, host(16), overlapping=True)[1] == 8
    assert hits(sequence, host(12), overlapping=True)[1] == 8


@pytest.mark.parametrize("capacity", [1, 5, 20, 60])
def test_textbook_lru(capacity: int) -> None:
    """Prompts of one block each are what LRU is taught with."""
    draw = random.Random(capacity)
    streams = [min(draw.randrange(64), draw.randrange(64)) for _ in range(3000)]
    cache: OrderedDict[int, None] = OrderedDict()
    wanted = []
    for stream in streams:
        wanted.append(int(stream in cache))
        cache[stream] = None
        cache.move_to_end(stream)
        if len(cache) > capacity:
            cache.popitem(last=False)
    assert hits([prompt(stream, 1, time) for time, stream in enumerate(streams)], host(capacity)) == wanted


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_capacity_that_explains_the_hits_is_found(policy: Policy) -> None:
    draw = random.Random(3)
    sequence = [prompt(min(draw.randrange(30), draw.randrange(30)), 8, time) for time in range(400)]
    groups = [place // 100 for place in range(400)]

    def measured(capacity: int) -> list[int]:
        found = replay(sequence, host(capacity, policy)).hits
        return [sum(hit["cpu"] for hit, group in zip(found, groups, strict=True) if group == each) for each in range(4)]

    found = better_capacity(sequence, host(200, policy), "cpu", groups, measured(80))
    assert found is not None
    assert found == pytest.approx(80, abs=8)
    assert better_capacity(sequence, host(80, policy), "cpu", groups, measured(80)) is None
