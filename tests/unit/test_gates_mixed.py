"""Gates on a pass of conversations, in which new prompts, hits and evicted ones are mixed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trial_factory import KV_BYTES_PER_TOKEN, Load, write_trial

from kvladder.config import registry
from kvladder.config.base import TIERS
from kvladder.config.records import GateResult, PassRecord, PoolRecord, WindowTokens
from kvladder.gates.base import Evidence
from kvladder.replay import PassPrediction, Prediction
from kvladder.stats.oracle import Hierarchy, Tier

PROMPT = 10_000
CEILING = 8_000


def mixed(folder: Path, setup: dict[str, Any], predicted: dict[str, int], hit: dict[str, int | None]) -> Evidence:
    """A trial whose only pass is a mixed one: what the oracle says of it, and what its counters say."""
    whole = Evidence.load(write_trial(folder, setup=str(setup["kind"]), workloads={"pool": Load(warm_rounds=1)}))
    part = whole.trial.passes[0].model_copy(
        update={"name": "mixed", "concurrency": 2, "pool": PoolRecord(size=4, tokens=1000, order="fifo")}
    )
    trial = whole.trial.model_copy(
        update={"passes": [part], "kind": setup["kind"], "config": {**whole.trial.config, "setup": setup}}
    )
    evidence = replace(whole, trial=trial)
    by_source: dict[str, int | None] = {**dict.fromkeys(TIERS, 0), **hit}
    known = sum(value or 0 for value in hit.values())
    by_source["computed"] = PROMPT - known
    window = WindowTokens(
        workload="pool",
        name="mixed",
        round=0,
        prompt_tokens=PROMPT,
        by_source=by_source,
        stored_bytes=PROMPT * KV_BYTES_PER_TOKEN,
        loaded_bytes=(hit.get("cpu") or 0) * KV_BYTES_PER_TOKEN,
    )
    pass_ = PassPrediction(predicted, predicted, {"cpu": CEILING}, PROMPT, 4000, exact=False, known=True)
    hierarchy = Hierarchy(128, Tier("gpu", 8), Tier("cpu", 16))
    evidence.__dict__["windows"] = [window]
    evidence.__dict__["prediction"] = Prediction(hierarchy, [pass_], [], [])
    return evidence


PLAIN = {"kind": "plain"}
APC = {"kind": "prefix-cache"}
TIERED = {"kind": "native", "cpu_bytes": 1 << 30, "copier": "host", "prefix_caching": True}
BELOW = {**TIERED, "prefix_caching": False}


def run(gate: str, evidence: Evidence) -> list[GateResult]:
    found: list[GateResult] = registry.load("gates", gate).check(evidence)
    return found


@pytest.mark.parametrize(("hits", "decision"), [(CEILING, "pass"), (CEILING + 128, "fail"), (0, "pass")])
def test_nothing_is_hit_that_was_never_sent(tmp_path: Path, hits: int, decision: str) -> None:
    (result,) = run("cold-is-cold", mixed(tmp_path, TIERED, {"gpu": 0, "cpu": CEILING}, {"cpu": hits}))
    assert (result.decision, result.seen) == (decision, f"{hits} hit")
    assert result.expected.startswith("at most 8000 tokens hit")


def test_a_pass_without_counters_was_not_seen_to_be_cold(tmp_path: Path) -> None:
    (result,) = run("cold-is-cold", mixed(tmp_path, TIERED, {"cpu": 0}, {"cpu": None}))
    assert result.decision == "not-checked" and result.seen.startswith("could not be checked")


@pytest.mark.parametrize(
    ("setup", "hit", "decision"),
    [
        (TIERED, {"gpu": 3000, "cpu": 4000}, "not-checked"),
        (BELOW, {"gpu": 3000, "cpu": 4000}, "fail"),
        (BELOW, {"cpu": 4000}, "pass"),
        (APC, {"gpu": 3000}, "pass"),
        (APC, {"gpu": 3000, "cpu": 128}, "fail"),
        (PLAIN, {"gpu": 128}, "fail"),
        (PLAIN, {}, "pass"),
    ],
)
def test_hits_on_the_device(tmp_path: Path, setup: dict[str, Any], hit: dict[str, int | None], decision: str) -> None:
    (result,) = run("gpu-cache-as-configured", mixed(tmp_path, setup, {}, hit))
    assert result.decision == decision


@pytest.mark.parametrize(
    ("hit", "decision"),
    [
        ({"gpu": 3000, "cpu": 4000}, "pass"),
        # 10 % of the prompt tokens either way, where several requests are in flight.
        ({"gpu": 3000, "cpu": 3000}, "pass"),
        ({"gpu": 3000, "cpu": 2900}, "fail"),
        ({"gpu": 3000, "cpu": 0}, "fail"),
        ({"gpu": 0, "cpu": 4000}, "fail"),
    ],
)
def test_each_tier_hits_what_it_should(tmp_path: Path, hit: dict[str, int | None], decision: str) -> None:
    evidence = mixed(tmp_path, TIERED, {"gpu": 3000, "cpu": 4000}, hit)
    assert run("hits-as-predicted", evidence)[0].decision == decision
    if hit["gpu"]:
        # This gate asks for the setup's own tier alone.
        assert run("tier-was-used", evidence)[0].decision == decision


def test_a_pool_that_the_device_holds_uses_no_other_tier(tmp_path: Path) -> None:
    evidence = mixed(tmp_path, TIERED, {"gpu": CEILING, "cpu": 0}, {"gpu": CEILING})
    tokens, stored, loaded = run("tier-was-used", evidence)
    assert [each.decision for each in (tokens, stored, loaded)] == ["pass"] * 3
    assert tokens.seen == "8000 tokens from gpu in 1 passes"


def test_requests_that_were_kept_back_make_a_trial_invalid(tmp_path: Path) -> None:
    """What the deadline cut off is recorded as failed, and is no shorter workload."""

    def cut(rows: list[dict[str, Any]]) -> None:
        rows[0] |= {"status": "failed", "error": "not sent: the pass's deadline of 9 s was over", "send_ns": None}

    folder = write_trial(tmp_path, setup="plain", workloads={"pool": Load(warm_rounds=1)}, edit_requests=cut)
    (result,) = run("all-completed", Evidence.load(folder))
    assert result.decision == "fail" and "not sent: the pass's deadline" in result.seen


def test_the_record_of_a_pass_has_the_pool_in_numbers() -> None:
    made = PassRecord(
        workload="w", name="mixed", round=0, concurrency=2, requests=1, failed=0, start_ns=0, end_ns=1,
        pool=PoolRecord(size=4, tokens=1000, order="zipf"), ramp_s=3.0, unsent=1,
    )  # fmt: skip
    assert PassRecord.model_validate_json(made.model_dump_json()) == made
