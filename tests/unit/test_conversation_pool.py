"""Conversations that take turns: what is sent, in which order, and with how little memory."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from scripted_server import Close, Exchange, ScriptedServer
from trial_factory import write_trial

from kvladder.config import registry
from kvladder.config.records import PassRecord, RequestRecord, TrialRecord
from kvladder.config.traffic import PassPlan, Pool, Prefix, Request, TrafficContext
from kvladder.gates.concurrency_held import held
from kvladder.load import Limits, PassResult, Target, connection, run_pass
from kvladder.load.order import Order
from kvladder.load.wire import request_bytes
from kvladder.replay import PassPrediction, predict
from kvladder.workloads.conversation_pool import CONFIG, ConversationPoolConfig

SEED_EXPERIMENT: dict[str, Any] = {"turns": 8, "first_tokens": 12288, "next_tokens": 4096, "max_requests": 5120}
SMALL: dict[str, Any] = {"turns": 4, "first_tokens": 40, "next_tokens": 20, "concurrency": 3, "max_requests": 60}


def make(**changes: Any) -> ConversationPoolConfig:
    return CONFIG.model_validate({"kind": "conversation-pool", "pool": 5, **SMALL, **changes})


def context(**changes: Any) -> TrafficContext:
    return TrafficContext(**{"seed": 1, "namespace": "r0", "vocab_size": 1000, "block_size": 16, **changes})


def plan(**changes: Any) -> PassPlan:
    (made,) = make(**changes).passes("w", context())
    return made


def place(request: Request) -> tuple[int, int]:
    """Conversation and turn, from the key."""
    conversation, _, turn = request.key.partition("-")
    return int(conversation[1:]), int(turn[1:])


# --- what is sent ---


@pytest.mark.parametrize(
    ("pool", "requests"),
    # floor(5120 / (pool × 8)) × pool × 8, for the seed's own list of pools
    [(16, 5120), (32, 5120), (48, 4992), (64, 5120), (96, 4608), (128, 5120), (192, 4608), (256, 4096), (384, 3072),
     (448, 3584), (512, 4096)],
)  # fmt: skip
def test_only_whole_conversations_as_the_seed_counts_them(pool: int, requests: int) -> None:
    made = plan(**SEED_EXPERIMENT | {"first_tokens": 12, "next_tokens": 4}, pool=pool, concurrency=64)
    assert len(made.requests) == requests
    assert requests % (pool * 8) == 0


def test_turns_grow_by_the_answer_and_the_next_question() -> None:
    config = make(**SEED_EXPERIMENT, pool=16, concurrency=64)
    assert [config.prompt_tokens(turn) for turn in range(3)] == [12288, 12288 + 1 + 4096, 12288 + 2 * 4097]
    assert config.conversation_tokens == 40_967
    assert config.longest_prompt() == 40_968
    assert sum(config.prompt_tokens(turn) for turn in range(8)) == 213_020


def test_turns_share_their_conversations_ids() -> None:
    requests = plan().requests
    assert len(requests) == 60
    texts: dict[int, Any] = {}
    for request in requests:
        conversation, turn = place(request)
        assert isinstance(request.prompt, Prefix)
        assert texts.setdefault(conversation, request.prompt.text) is request.prompt.text
        assert len(request.prompt) == len(list(request.prompt)) == 40 + 21 * turn
        assert request.after == (None if turn == 0 else request.index - 1)
    assert len({text[:16].tobytes() for text in texts.values()}) == len(texts) == 15
    assert [request.index for request in requests] == list(range(60))


def test_the_same_seed_gives_the_same_pass() -> None:
    config = make(order="zipf")
    assert config.passes("w", context()) == config.passes("w", context())
    (one,), (other,) = (config.passes("w", context(namespace=name)) for name in ("r0", "r1"))
    assert one.pool is not None and other.pool is not None and one.pool.lots != other.pool.lots


def predicted(folder: Path, made: PassPlan, block: int, pool_tokens: int) -> PassPrediction:
    """What the hit oracle says of a pass that went through a device cache, one request after the other."""
    setup = registry.load("setups", "prefix-cache").CONFIG(kind="prefix-cache")
    whole = TrialRecord.model_validate_json((write_trial(folder, workloads={}) / "trial.json").read_bytes())
    part = PassRecord(
        workload="w", name="mixed", round=0, concurrency=1, requests=len(made.requests), failed=0, start_ns=0, end_ns=9
    )
    effective = whole.effective.model_copy(
        update={"block_size": block, "kv_pool_tokens": pool_tokens, "capacity_tokens": {"gpu": pool_tokens}}
    )
    config = {**whole.config, "workloads": {"w": {"kind": "conversation-pool"}}}
    trial = whole.model_copy(update={"passes": [part], "effective": effective, "config": config})
    order = {position: at for at, position in enumerate(order_sent(made, 1, first))}
    sent = [
        RequestRecord(
            workload="w", pass_name="mixed", round=0, index=request.index, key=request.key,
            prompt_tokens=len(request.prompt), asked_tokens=1, output_tokens=1, status="ok",
            eligible_ns=10 * order[position], send_ns=10 * order[position], first_token_ns=10 * order[position] + 5,
            end_ns=10 * order[position] + 6,
        )
        for position, request in enumerate(made.requests)
    ]  # fmt: skip
    prediction = predict(trial, setup, {0: sent})
    assert prediction is not None
    return prediction.passes[0]


@pytest.mark.parametrize(("block", "share"), [(1, 0.80768), (16, 0.80759)])
def test_the_ceiling_of_an_infinite_cache(tmp_path: Path, block: int, share: float) -> None:
    """213,020 prompt tokens a conversation, 40,967 of them new: 80.77 %, and 80.76 % in blocks of 16."""
    made = plan(**SEED_EXPERIMENT | {"max_requests": 16}, pool=2, concurrency=1)
    found = predicted(tmp_path, made, block, 10**6)
    assert found.prompt_tokens == 2 * 213_020
    assert found.ceiling_total / found.prompt_tokens == pytest.approx(share, abs=0.000005)
    assert found.exact and found.total == found.ceiling_total


@pytest.mark.parametrize(
    ("order", "pool", "hit"),
    # Room for 1.5 conversations. In turn, an LRU of less than the pool loses each one before its next turn.
    [("round-barrier", 1, 1.0), ("round-barrier", 3, 0.0), ("fifo", 1, 1.0), ("fifo", 3, 0.0)],
)
def test_a_cache_smaller_than_the_pool(tmp_path: Path, order: str, pool: int, hit: float) -> None:
    made = plan(**SEED_EXPERIMENT | {"max_requests": 8 * pool}, pool=pool, concurrency=1, order=order)
    found = predicted(tmp_path, made, 16, 61_440)
    late = found.total / found.ceiling_total
    # The short turns of the first rounds still fit.
    assert late == 1.0 if hit else late < 0.5
    assert found.exact


def test_turns_of_one_conversation_are_one_stream() -> None:
    assert CONFIG.stream("c12-t7") == CONFIG.stream("c12-t0") != CONFIG.stream("c1-t7")


def test_a_staggered_pool_begins_in_the_middle() -> None:
    config = make(staggered=True, pool=4, max_requests=30)
    requests = config.passes("w", context())[0].requests
    begun = dict(map(place, reversed(requests)))
    assert [begun[conversation] for conversation in range(4)] == [0, 1, 2, 3]
    assert {begun[conversation] for conversation in range(4, len(begun))} == {0}
    ended = dict(map(place, requests))
    assert set(ended.values()) == {3}
    assert len(requests) == 4 + 3 + 2 + 1 + 5 * 4


@pytest.mark.parametrize(
    ("pool", "size"), [({"gpu": 2.0}, 20), ({"cpu": 0.5}, 50), ({"gpu": 0.001}, 1), ({"gpu": 2.26}, 23)]
)
def test_a_pool_as_a_multiple_of_a_capacity(pool: dict[str, float], size: int) -> None:
    config = make(pool=pool, max_requests=10_000)
    capacity = {"gpu": 10 * config.conversation_tokens, "cpu": 100 * config.conversation_tokens}
    (made,) = config.passes("w", context(capacity_tokens=capacity))
    assert made.pool is not None and (made.pool.size, made.pool.tokens) == (size, 103)
    assert len(made.requests) == 10_000 // (size * 4) * size * 4
    assert config.sized_by == pool.keys()
    with pytest.raises(ValueError, match="which isn't known"):
        config.passes("w", context())


def test_a_pool_too_large_for_max_requests_still_has_one_conversation_in_each_place() -> None:
    config = make(pool={"gpu": 3.0}, max_requests=8)
    (made,) = config.passes("w", context(capacity_tokens={"gpu": 103}))
    assert len(made.requests) == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool": 16}, "max_requests: 60, at least 64"),
        ({"pool": 0}, "greater than or equal to 1"),
        ({"pool": {"gpu": 1.0, "cpu": 1.0}}, "at most 1 item"),
        ({"pool": {"tape": 1.0}}, "'gpu' or 'cpu'"),
        ({"pool": {"gpu": 0}}, "greater than 0"),
        ({"pool": {"gpu": math.inf}}, "finite number"),
        ({"ramp_s": math.inf}, "finite number"),
        ({"deadline_s": math.inf}, "finite number"),
        ({"zipf_exponent": 11}, "less than or equal to 10"),
        ({"order": "lifo"}, "round-barrier"),
    ],
)
def test_bad_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make(**changes)


# --- in which order ---


def order_sent(made: PassPlan, flying: int, ends: Callable[[list[int]], int]) -> list[int]:
    """Positions in the order in which they are taken, with so many in flight; ``ends`` picks who ends next."""
    order, now, taken = Order(made), [], []
    while order or now:
        while order and len(now) < flying:
            now.append(order.pop())
            taken.append(now[-1])
        position = ends(now)
        now.remove(position)
        order.ended(position)
    return taken


def first(now: list[int]) -> int:
    return now[0]


def shuffled(seed: int) -> Callable[[list[int]], int]:
    return random.Random(seed).choice


@pytest.mark.parametrize("order", ["round-barrier", "fifo", "random", "zipf"])
@pytest.mark.parametrize("staggered", [False, True])
def test_every_order_sends_everything_once_and_in_turn(order: str, staggered: bool) -> None:
    made = plan(order=order, staggered=staggered)
    taken = order_sent(made, 3, shuffled(1))
    assert sorted(taken) == list(range(len(made.requests)))
    rank = {position: number for number, position in enumerate(taken)}
    opened: set[int] = set()
    for position in taken:
        after = made.requests[position].after
        assert after is None or rank[after] < rank[position]
        conversation, turn = place(made.requests[position])
        opened.add(conversation)
        closed = turn == 3
        assert len(opened) <= 5, "never more conversations open than the pool has places"
        if closed:
            opened.discard(conversation)


def test_a_round_barrier_waits_for_all() -> None:
    made = plan(order="round-barrier")
    taken = [place(made.requests[position]) for position in order_sent(made, 3, shuffled(2))]
    rounds = [taken[start : start + 5] for start in range(0, 60, 5)]
    assert [{turn for _, turn in each} for each in rounds] == [{0}, {1}, {2}, {3}] * 3
    assert [sorted(conversation for conversation, _ in each) for each in rounds] == [
        [5 * generation + slot for slot in range(5)] for generation in range(3) for _ in range(4)
    ]


def test_fifo_takes_the_one_that_has_waited_longest() -> None:
    made = plan(order="fifo", max_requests=20)
    taken = [place(made.requests[position]) for position in order_sent(made, 1, first)]
    assert taken == [(conversation, turn) for turn in range(4) for conversation in range(5)]


def test_random_is_drawn_anew_each_time() -> None:
    """No place is preferred, and none waits its turn: the next is any of the others as likely as any."""
    made = plan(order="random", pool=10, turns=400, max_requests=4000)
    taken = [place(made.requests[position])[0] for position in order_sent(made, 1, first)]
    steady = taken[:2000]
    counts = Counter(steady)
    assert min(counts.values()) > 150 and max(counts.values()) < 250
    repeated = sum(a == b for a, b in pairwise(steady))
    assert 140 < repeated < 260  # one in ten


def test_zipf_prefers_the_first_places() -> None:
    made = plan(order="zipf", pool=4, turns=1, max_requests=4000)
    order = Order(made)
    places: dict[int, int] = dict(enumerate(range(4)))
    counts: Counter[int] = Counter()
    following = 4
    for _ in range(3000):
        position = order.pop()
        counts[places[position]] += 1
        places[following] = places.pop(position)
        following += 1
        order.ended(position)
    shares = [counts[number] / 3000 for number in range(4)]
    weight = sum(1 / number for number in range(1, 5))
    assert shares == pytest.approx([1 / number / weight for number in range(1, 5)], abs=0.03)


# --- over the wire ---

LIMITS = Limits(connect_s=2, request_s=10, stall_s=5)


def send(server: ScriptedServer, made: PassPlan) -> PassResult:
    return run_pass(Target("127.0.0.1", server.port, "m"), made, LIMITS)


def recorded(made: PassPlan, result: PassResult) -> PassRecord:
    return PassRecord(
        workload=made.workload,
        name=made.name,
        round=made.round,
        concurrency=made.concurrency,
        requests=len(made.requests),
        failed=result.failed,
        start_ns=result.start_ns,
        end_ns=result.end_ns,
        in_flight=result.in_flight,
    )


def answer_late(exchange: Exchange) -> None:
    time.sleep(0.01)
    exchange.answer()


@pytest.mark.parametrize("order", ["round-barrier", "fifo", "random", "zipf"])
def test_what_is_sent_is_the_conversation_so_far(order: str) -> None:
    made = plan(order=order)
    with ScriptedServer(answer_late) as server:
        result = send(server, made)
        bodies = sorted(exchange.json["prompt"] for exchange in server.exchanges)
    assert bodies == sorted(list(request.prompt) for request in made.requests)
    assert {record.status for record in result.records} == {"ok"}
    assert max(flying for _, flying, _ in result.in_flight) == 3
    times = {record.index: record for record in result.records}
    for request in made.requests:
        if request.after is not None:
            assert times[request.index].eligible_ns >= (times[request.after].end_ns or 0)
    if order == "round-barrier":
        turns = [place(made.requests[record.index])[1] for record in sorted(result.records, key=sent)]
        assert turns == [turn for _ in range(3) for turn in range(4) for _ in range(5)]
    # Under a barrier fewer may be in flight at a round's end, and the series says so.
    share = held(recorded(made, result))
    assert share is not None and share > 0.8


def sent(record: Any) -> int:
    return record.send_ns or 0


def test_a_conversation_arrives_whole_through_a_socket_that_takes_a_part_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Head, shared digits and rest are three pieces; a write may end in any of them, or at a border."""
    written: list[int] = []

    def write_some(fd: int, pieces: Sequence[bytes | memoryview]) -> int:
        taken = b"".join(pieces)[: random.Random(len(written)).choice([1, len(pieces[0]), 1500])]
        written.append(os.write(fd, taken))
        return written[-1]

    monkeypatch.setattr(connection.os, "writev", write_some)
    made = plan(pool=2, first_tokens=2000, next_tokens=600, turns=2, max_requests=4)
    with ScriptedServer(Exchange.answer) as server:
        target = Target("127.0.0.1", server.port, "m")
        result = run_pass(target, made, LIMITS)
        bodies = sorted(exchange.json["prompt"] for exchange in server.exchanges)
    assert [record.error for record in result.records] == [None] * 4
    assert bodies == sorted(list(request.prompt) for request in made.requests)
    assert len(written) > 20 and sum(written) == sum(wire.size for wire in request_bytes(target, made.requests))


def test_a_failed_turn_changes_no_other() -> None:
    def script(exchange: Exchange) -> None:
        if len(exchange.json["prompt"]) == 61:  # every second turn
            raise Close
        exchange.answer()

    made = plan(order="fifo")
    with ScriptedServer(script) as server:
        result = send(server, made)
    by_turn: dict[int, set[str]] = {turn: set() for turn in range(4)}
    for request, record in zip(made.requests, result.records, strict=True):
        by_turn[place(request)[1]].add(record.status)
    assert by_turn == {0: {"ok"}, 1: {"failed"}, 2: {"ok"}, 3: {"ok"}}
    assert result.unsent == 0


def test_the_backstop_keeps_back_what_is_left_and_says_so() -> None:
    def script(exchange: Exchange) -> None:
        time.sleep(0.1)
        exchange.answer()

    made = plan(deadline_s=0.35, order="round-barrier")
    with ScriptedServer(script) as server:
        begin = time.monotonic()
        result = send(server, made)
        assert time.monotonic() - begin < 2
        assert len(server.exchanges) == len(made.requests) - result.unsent
    kept = [record for record in result.records if record.status == "failed"]
    assert 0 < len(kept) == result.unsent < 60
    assert {record.error for record in kept} == {"not sent: the pass's deadline of 0.35 s was over"}
    assert all(record.send_ns is None for record in kept)
    assert all(record.end_ns is not None for record in result.records if record.status == "ok")


def test_the_number_in_flight_grows_over_the_ramp() -> None:
    def script(exchange: Exchange) -> None:
        time.sleep(0.02)
        exchange.answer()

    made = plan(pool=10, concurrency=5, ramp_s=1.0, order="fifo", max_requests=400)
    with ScriptedServer(script) as server:
        result = send(server, made)
    at = {
        share: max(flying for t, flying, _ in result.in_flight if t <= result.start_ns + share * 1e9)
        for share in (0.15, 0.55, 1.5)
    }
    assert at == {0.15: 1, 0.55: 3, 1.5: 5}
    share = held(recorded(made, result))
    assert share is not None and share > 0.9, "who ramps up is asked for no more than that"


@pytest.mark.parametrize(
    ("pool", "after", "message"),
    [
        (Pool(0, "fifo", 1), {}, "room for one conversation"),
        (Pool(1, "fifo", 1), {1: 0, 2: 0}, "wait for the same one"),
        (Pool(1, "random", 1, [1.0]), {}, "order random: 1 lots for 3 requests, not 3"),
        (Pool(1, "zipf", 1), {}, "order zipf: 0 lots for 3 requests, not 3"),
        (Pool(1, "fifo", 1, [1.0] * 3), {}, "order fifo: 3 lots for 3 requests, not 0"),
        (Pool(1, "zipf", 1, [1.0] * 3, [1.0, 2.0]), {}, "each of the 1 places"),
    ],
)
def test_pools_that_can_not_be_carried_out(pool: Pool, after: dict[int, int], message: str) -> None:
    text = make().passes("w", context())[0].requests[0].prompt
    requests = [Request(index, str(index), text, 1, after.get(index)) for index in range(3)]
    with pytest.raises(ValueError, match=message):
        run_pass(Target("h", 9, "m"), PassPlan("w", "mixed", 0, 1, requests, pool), LIMITS)


# --- memory ---


def test_turns_share_the_bytes_that_are_sent() -> None:
    made = plan(**SEED_EXPERIMENT | {"max_requests": 64}, pool=4, concurrency=64)
    wires = request_bytes(Target("h", 9, "m"), made.requests)
    buffers = {
        id(piece.obj): len(piece.obj) for wire in wires for piece in wire.pieces if isinstance(piece, memoryview)
    }
    assert len(buffers) == 8
    digits = sum(buffers.values())
    assert sum(wire.size for wire in wires) > 5 * digits
    assert sum(wire.size for wire in wires) == sum(len(b"".join(wire.pieces)) for wire in wires)


def test_512_conversations_of_41k_tokens_take_less_than_half_a_gigabyte() -> None:
    """Ids and JSON of all turns together: what an eighth of them takes, in a process of its own, times eight."""
    code = """
        from pathlib import Path
        from kvladder.config.traffic import TrafficContext
        from kvladder.load import Target
        from kvladder.load.wire import request_bytes
        from kvladder.workloads.conversation_pool import CONFIG

        def peak():
            # Not ru_maxrss: that begins with what the parent had.
            return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024

        config = CONFIG.model_validate({
            "kind": "conversation-pool", "pool": 64, "turns": 8, "first_tokens": 12288, "next_tokens": 4096,
            "concurrency": 64, "max_requests": 512,
        })
        before = peak()
        (plan,) = config.passes("w", TrafficContext(1, "r0", 128256, 16))
        wires = request_bytes(Target("h", 1, "m"), plan.requests)
        print(len(wires), before, peak())
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    requests, before, peak = map(int, run.stdout.split())
    assert requests == 512
    assert 64 * 40_967 * 10 < peak - before < (0.5e9 - before) / 8
