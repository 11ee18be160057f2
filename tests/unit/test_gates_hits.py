"""Hits against the oracle, on whole trial folders: tiers that are too small, and tiers that aren't as configured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trial_factory import BLOCK, KV_BYTES_PER_TOKEN, Load, Rows, drop, shift, write_trial

from kvladder.config import registry
from kvladder.config.records import GateResult
from kvladder.gates.base import Evidence, pass_label
from kvladder.judge import judge_trial
from kvladder.replay import TOLERANCE
from kvladder.stats.oracle import Access

FOUR = {"four": Load(requests=4, prompt_tokens=3000, warm_rounds=1)}
"""Four prompts of 23 blocks, one after the other: a working set of 92 blocks; 115 are stored with the warm-up's."""
HIT = 4 * 23 * BLOCK
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
CACHED = "vllm:prompt_tokens_cached_by_source_total"


def native(blocks: int, **more: Any) -> dict[str, Any]:
    return {"kind": "native", "cpu_bytes": blocks * BLOCK * KV_BYTES_PER_TOKEN, "copier": "host", **more}


def run(gate: str, folder: Path) -> list[GateResult]:
    found: list[GateResult] = registry.load("gates", gate).check(Evidence.load(folder))
    return found


def only_hits(folder: Path) -> GateResult:
    (result,) = run("hits-as-predicted", folder)
    return result


def lose(tokens: int, *passes: str, source: str = "host") -> Any:
    """Take hit tokens from passes: they were computed."""

    def edit(rows: Rows) -> None:
        for name in passes:
            mark = f"four/{name}:end"
            shift(rows, BY_SOURCE, -tokens, since=mark, source="external_kv_transfer")
            shift(rows, BY_SOURCE, tokens, since=mark, source="local_compute")
            shift(rows, CACHED, -tokens, since=mark, source=source)
            shift(rows, "vllm:kv_offload_load_bytes_total", -tokens * KV_BYTES_PER_TOKEN, since=mark)

    return edit


BOTH = ("first-hit/1", "warm/2")


@pytest.mark.parametrize("setup", ["prefix-cache", "native-host", "lmcache-mp", "mooncake-store"])
def test_a_tier_that_holds_everything(tmp_path: Path, setup: str) -> None:
    result = only_hits(write_trial(tmp_path, setup=setup, workloads=FOUR))
    assert (result.decision, result.required) == ("pass", True)
    assert result.seen.endswith(f"{result.expected.split()[0]} hit tokens")


def test_a_setup_without_a_tier(tmp_path: Path) -> None:
    assert only_hits(write_trial(tmp_path, setup="plain", workloads=FOUR)).seen == "this setup has no tier"


def test_thrash_is_no_fault_but_said(tmp_path: Path) -> None:
    """92 blocks through 60: an LRU keeps nothing of them until they are asked for again."""
    folder = write_trial(
        tmp_path, setup="native-host", setup_config=native(60), workloads=FOUR, edit_counters=lose(HIT, *BOTH)
    )
    result = only_hits(folder)
    assert result.decision == "pass"
    assert result.seen == "0 hit tokens; thrash: working set 11776 tokens, cpu holds 7680; LRU predicted 0 hits"
    tier = run("tier-was-used", folder)
    assert [each.decision for each in tier] == ["not-checked"]
    assert "evicted before it was asked for again" in tier[0].seen
    assert judge_trial(folder).status == "valid"


def test_hits_that_a_small_tier_can_not_have_given(tmp_path: Path) -> None:
    """Configured 60 blocks, but all is hit: the tier is larger than configured."""
    folder = write_trial(tmp_path, setup="native-host", setup_config=native(60), workloads=FOUR)
    result = only_hits(folder)
    assert (result.decision, result.required) == ("fail", True)
    assert result.expected == "first-hit 1: none hit"
    fits, configured = result.seen.split("hits fit a capacity of ")[1].split(" tokens in cpu, configured ")
    assert int(configured) == 60 * BLOCK
    assert int(fits) >= 92 * BLOCK
    assert judge_trial(folder).status == "invalid"


def test_a_tier_that_is_smaller_than_configured(tmp_path: Path) -> None:
    folder = write_trial(tmp_path, setup="native-host", workloads=FOUR, edit_counters=lose(HIT, *BOTH))
    result = only_hits(folder)
    assert result.decision == "fail"
    assert result.expected == f"first-hit 1: cpu {HIT} hit"
    assert result.seen.startswith("first-hit 1: none hit; hits fit a capacity of ")
    fits = int(result.seen.split("capacity of ")[1].split()[0])
    assert fits < 92 * BLOCK


def test_a_tier_that_lost_a_part(tmp_path: Path) -> None:
    """No capacity explains one block less in one pass."""
    folder = write_trial(tmp_path, setup="native-host", workloads=FOUR, edit_counters=lose(BLOCK, "warm/2"))
    result = only_hits(folder)
    assert (result.decision, result.expected) == ("fail", f"warm 2: cpu {HIT} hit")
    assert "fit" not in result.seen


def test_one_by_one_the_answer_is_exact_although_something_is_evicted(tmp_path: Path) -> None:
    """88 of 92 blocks: the first prompt has lost four, and storing them costs its beginning."""
    lost = 4 * BLOCK
    settings = {"setup": "native-host", "setup_config": native(88), "workloads": {"four": Load(4, warm_rounds=0)}}
    good = write_trial(tmp_path / "good", edit_counters=lose(lost, "first-hit/1"), **settings)
    assert only_hits(good).decision == "pass"
    assert {each.decision for each in run("tier-was-used", good)} == {"pass"}
    bad = write_trial(tmp_path / "bad", edit_counters=lose(lost + BLOCK, "first-hit/1"), **settings)
    assert only_hits(bad).decision == "fail"
    assert run("tier-was-used", bad)[0].decision == "fail"


@pytest.mark.parametrize(("blocks", "decision"), [(4, "pass"), (10, "pass"), (16, "fail")])
def test_with_requests_in_flight_some_tokens_either_way(tmp_path: Path, blocks: int, decision: str) -> None:
    folder = write_trial(
        tmp_path,
        setup="native-host",
        setup_config=native(88),
        workloads={"four": Load(requests=4, concurrency=2, warm_rounds=0)},
        edit_counters=lose(blocks * BLOCK, "first-hit/1"),
    )
    evidence = Evidence.load(folder)
    each = evidence.predicted(evidence.trial.passes[1])
    assert each is not None and not each.exact
    least, most = each.allowed()
    assert most - least >= 2 * round(TOLERANCE * 4 * 3000)
    assert only_hits(folder).decision == decision


@pytest.mark.parametrize(("version", "required"), [("0.32.0", True), ("0.26.0", False)])
def test_an_order_that_nobody_knows_is_advisory(tmp_path: Path, version: str, required: bool) -> None:
    folder = write_trial(
        tmp_path,
        setup="native-host",
        setup_config=native(60),
        workloads=FOUR,
        version=version,
    )
    result = only_hits(folder)
    assert (result.decision, result.required) == ("fail", required)
    tier = run("tier-was-used", folder)[0]
    assert tier.decision == ("fail" if required else "not-checked")


@pytest.mark.parametrize(
    ("moved", "decision", "expected"),
    [
        (0, "pass", "22528 tokens from cpu in 2 passes"),
        (-256, "not-checked", "22528 tokens from cpu in 2 passes"),
        (-11264, "fail", "1–11264 tokens from cpu"),
        (256, "fail", "0–11264 tokens from cpu"),
    ],
)
def test_of_unknown_evictions_two_answers_are_wrong(tmp_path: Path, moved: int, decision: str, expected: str) -> None:
    """A pool beyond its watermark may have lost anything; but it wasn't used without a hit, nor did it give more than
    was stored."""

    def edit(rows: Rows) -> None:
        for mark in ("four/first-hit/1:end", "four/warm/2:end"):
            shift(rows, BY_SOURCE, moved, since=mark, source="external_kv_transfer")
            shift(rows, BY_SOURCE, -moved, since=mark, source="local_compute")
            shift(rows, CACHED, moved, since=mark, source="external_unspecified")

    config = {"cpu_bytes": 120 * BLOCK * KV_BYTES_PER_TOKEN, "server_args": {"eviction-trigger-watermark": 0.5}}
    folder = write_trial(tmp_path, setup="lmcache-mp", setup_config=config, workloads=FOUR, edit_counters=edit)
    first = run("tier-was-used", folder)[0]
    assert (first.decision, first.expected) == (decision, expected)


def test_lmcache_is_certain_below_its_watermark_only(tmp_path: Path) -> None:
    full = {"kind": "lmcache-mp", "cpu_bytes": 120 * BLOCK * KV_BYTES_PER_TOKEN}
    for watermark, required in ((0.99, True), (0.8, False)):
        args = {"server_args": {"eviction-trigger-watermark": watermark}}
        folder = write_trial(tmp_path / str(watermark), setup="lmcache-mp", setup_config=full | args, workloads=FOUR)
        assert only_hits(folder).required is required


def test_counters_that_are_missing(tmp_path: Path) -> None:
    folder = write_trial(
        tmp_path, setup="native-host", workloads=FOUR, edit_counters=lambda rows: drop(rows, BY_SOURCE)
    )
    assert only_hits(folder).seen == "the engine's token counters are missing in first-hit 1"


def test_a_capacity_that_is_unknown(tmp_path: Path) -> None:
    def forget(data: dict[str, Any]) -> None:
        data["expected"]["kv_bytes_per_token"] = None

    folder = write_trial(tmp_path, setup="native-host", workloads=FOUR, edit_trial=forget)
    assert only_hits(folder).seen == "the capacity of cpu is unknown"


def test_what_is_not_measured_takes_room_too(tmp_path: Path) -> None:
    """Four prompts fit into 100 blocks, but not with the warm-up prompt before them."""
    folder = write_trial(tmp_path, setup="native-host", setup_config=native(100), workloads=FOUR)
    evidence = Evidence.load(folder)
    assert evidence.prediction is not None
    result = {pass_label(item): evidence.predicted(item) for item in evidence.trial.passes}
    assert result["four/cold/0"] is not None and result["four/cold/0"].hits == {"cpu": 0}
    assert all(each is not None and each.exact for each in result.values())
    assert len(evidence.prediction.sequence) == 2 * 2 + 3 * (1 + 4)
    assert evidence.prediction.capacity_tokens() == {"cpu": 100 * BLOCK}


def test_output_takes_room_in_the_warm_up_as_in_measured_requests(tmp_path: Path) -> None:
    """3,000 tokens end inside block 24; 299 more, whose KV is computed, fill that one and the next."""
    load = {"four": Load(requests=4, prompt_tokens=3000, output_tokens=300, warm_rounds=1)}
    evidence = Evidence.load(write_trial(tmp_path, setup="native-host", workloads=load))
    assert evidence.prediction is not None
    sent = [item for item in evidence.prediction.sequence if isinstance(item, Access)]
    assert [len(item.output) for item in sent] == [2] * (2 + 3 * 4)
    assert len({tuple(item.output) for item in sent}) == 1 + 4


def test_turns_of_a_conversation_share_their_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload says which prompts are beginnings of others; then a cold pass has hits."""

    def grow(rows: Rows) -> None:
        for row in rows:
            row.update(key=f"c0-t{row['index']}", prompt_tokens=3000 + 1000 * row["index"])

    repeat = registry.load("workloads", "repeat").CONFIG
    monkeypatch.setattr(repeat, "stream", staticmethod(lambda key: key.partition("-")[0]))
    evidence = Evidence.load(write_trial(tmp_path, setup="native-host", workloads=FOUR, edit_requests=grow))
    cold = evidence.predicted(evidence.trial.passes[0])
    assert cold is not None
    assert cold.total == sum(tokens // BLOCK * BLOCK for tokens in (3000, 4000, 5000))
    assert cold.working_set == 6000 // BLOCK * BLOCK
