"""Every gate on one trial: passes on a good one, fails on one that is broken in the way it protects from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trial_factory import BLOCK, BURST, KV_BYTES_PER_TOKEN, MS, Load, Rows, drop, shift, write_trial

from kvladder.config import registry
from kvladder.config.experiment import GateConfig
from kvladder.config.records import GateResult, PassRecord
from kvladder.gates.base import COULD_NOT, Evidence
from kvladder.gates.concurrency_held import held

SETUPS = ("plain", "prefix-cache", "native-host", "native-host-fs", "lmcache-mp", "mooncake-store")
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
CACHED = "vllm:prompt_tokens_cached_by_source_total"


def run(gate: str, folder: Path, **config: Any) -> list[GateResult]:
    results: list[GateResult] = registry.load("gates", gate).check(Evidence.load(folder, GateConfig(**config)))
    assert all(result.gate == gate for result in results)
    return results


def decisions(results: list[GateResult], workload: str | None = None) -> list[str]:
    return [result.decision for result in results if result.workload == workload]


def only(results: list[GateResult], decision: str) -> GateResult:
    """The one result that was decided so."""
    (result,) = [result for result in results if result.decision == decision]
    return result


def trial_gates() -> list[str]:
    return [name for name in registry.kinds("gates") if hasattr(registry.load("gates", name), "check")]


@pytest.mark.parametrize("version", ["0.32.0", "0.26.0"])
@pytest.mark.parametrize("setup", SETUPS)
def test_good_trials_fail_nothing(tmp_path: Path, setup: str, version: str) -> None:
    folder = write_trial(tmp_path, setup=setup, version=version)
    for gate in trial_gates():
        results = run(gate, folder)
        assert results, gate
        assert {result.decision for result in results} <= {"pass", "not-checked"}, gate
        assert not any(result.seen.startswith(COULD_NOT) for result in results), gate


def test_every_gate_says_what_it_protects_from() -> None:
    for name in registry.kinds("gates"):
        module = registry.load("gates", name)
        assert isinstance(module.REQUIRED, bool), name
        for word in ("Protects from", "Evidence:", "Tolerance:"):
            assert word in module.__doc__, f"{name}: {word}"


# config-readback


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"connector": None}, "the engine reports no connector"),
        ({"connector": "NixlConnector"}, "connector NixlConnector"),
        ({"connector_config": {"cpu_bytes_to_use": 1}}, "connector key cpu_bytes_to_use 1"),
        ({"prefix_caching": True}, "prefix_caching on"),
        ({"block_size": 16, "kv_pool_tokens": 320 * 16}, "block_size 16"),
        ({"kv_pool_tokens": 12_345}, "kv_pool_tokens 12345"),
        ({"engine_version": "0.31.0"}, "version 0.31.0"),
        ({"details": {"max_model_len": 2048}}, "max_model_len 2048"),
        ({"details": {"max_num_seqs": 256}}, "max_num_seqs 256"),
        ({"details": {"kv_cache_memory_bytes": 1 << 20}}, "kv_pool_bytes 1048576"),
    ],
)
def test_config_that_is_not_what_was_asked(tmp_path: Path, change: dict[str, Any], seen: str) -> None:
    def edit(data: Any) -> None:
        data["config"]["engine"].update(max_num_seqs=8, kv_pool_bytes=1 << 26)
        data["effective"].update(change)

    (result,) = run("config-readback", write_trial(tmp_path, setup="native-host", edit_trial=edit))
    assert result.decision == "fail"
    assert result.seen == seen
    assert result.expected.split()[0] in seen or "connector" in seen


@pytest.mark.parametrize("change", [{"prefix_caching": None, "connector": None}, {"connector_config": None}])
def test_config_that_was_not_read_back(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = write_trial(tmp_path, setup="native-host", edit_trial=lambda data: data["effective"].update(change))
    (result,) = run("config-readback", folder)
    assert result.decision == "not-checked"
    assert result.seen.startswith(COULD_NOT)


@pytest.mark.parametrize(
    ("said", "decision", "seen"),
    [
        ({"chunk_size": 256, "local_cpu": True}, "pass", "the same"),
        ({"chunk_size": 16, "local_cpu": True}, "fail", "setting chunk_size 16"),
        (
            {"chunk_size": 256, "local_cpu": None},
            "not-checked",
            "could not be checked: the engine did not report setting local_cpu",
        ),
    ],
)
def test_settings_of_a_connectors_own_file(tmp_path: Path, said: dict[str, Any], decision: str, seen: str) -> None:
    """What a connector reads past the engine is compared with what it says that it runs with."""

    def edit(data: Any) -> None:
        data["expected"]["settings"] = {"chunk_size": 256, "local_cpu": True}
        data["effective"]["details"]["settings"] = said

    (result,) = run("config-readback", write_trial(tmp_path, setup="native-host", edit_trial=edit))
    assert (result.decision, result.seen) == (decision, seen)


@pytest.mark.parametrize(
    ("details", "decision"),
    [
        ({"kv_cache_memory_bytes": None, "max_num_seqs": None}, "pass"),
        ({"kv_cache_memory_bytes": 1 << 26, "max_num_seqs": 8}, "pass"),
        ({"max_num_seqs": 9}, "fail"),
    ],
)
def test_numbers_are_compared_where_they_are_reported(tmp_path: Path, details: dict[str, Any], decision: str) -> None:
    def edit(data: Any) -> None:
        data["config"]["engine"].update(max_num_seqs=8, kv_pool_bytes=1 << 26)
        data["effective"]["details"] = details

    (result,) = run("config-readback", write_trial(tmp_path, edit_trial=edit))
    assert result.decision == decision


@pytest.mark.parametrize(
    ("arguments", "seen", "decision"),
    [
        ({"max-num-seqs": 2}, {"max_num_seqs": 2}, "pass"),
        ({"--max_num_seqs": 2}, {"max_num_seqs": 8}, "fail"),
        ({"kv-cache-memory-bytes": "1G"}, {"kv_cache_memory_bytes": 10**9}, "pass"),
    ],
)
def test_an_argument_goes_over_the_engines_setting(
    tmp_path: Path, arguments: dict[str, Any], seen: dict[str, Any], decision: str
) -> None:
    def edit(data: Any) -> None:
        data["config"]["engine"].update(max_num_seqs=8, kv_pool_bytes=1 << 26, args={"max-num-seqs": 4})
        data["config"]["setup"]["args"] = {"max-num-seqs": 8, **arguments}
        if "--max_num_seqs" in arguments:
            del data["config"]["setup"]["args"]["max-num-seqs"]
        data["effective"]["details"] = seen

    (result,) = run("config-readback", write_trial(tmp_path, edit_trial=edit))
    assert result.decision == decision


def test_keys_that_the_engine_adds_are_fine(tmp_path: Path) -> None:
    def add(data: Any) -> None:
        data["effective"]["connector_config"]["added"] = 1
        data["effective"]["engine_version"] = "0.32.0+cpu"

    (result,) = run("config-readback", write_trial(tmp_path, setup="native-host", edit_trial=add))
    assert result.decision == "pass"


# cold-is-cold


@pytest.mark.parametrize(("source", "tier"), [("local_cache_hit", "gpu"), ("external_kv_transfer", "cpu")])
def test_hits_in_the_cold_pass(tmp_path: Path, source: str, tier: str) -> None:
    def warm_it(rows: Rows) -> None:
        shift(rows, BY_SOURCE, 128, since="repeat/cold/0:end", source=source)
        shift(rows, BY_SOURCE, -128, since="repeat/cold/0:end", source="local_compute")
        finer = "device" if tier == "gpu" else "host"
        shift(rows, CACHED, 128, since="repeat/cold/0:end", source=finer)

    results = run("cold-is-cold", write_trial(tmp_path, setup="native-host", edit_counters=warm_it))
    assert decisions(results, "repeat") == ["fail"]
    assert only(results, "fail").seen == f"{tier} 128"
    assert decisions(results, "burst") == ["pass"]


def test_cold_without_counters_could_not_be_checked(tmp_path: Path) -> None:
    folder = write_trial(tmp_path, edit_counters=lambda rows: drop(rows, BY_SOURCE))
    results = run("cold-is-cold", folder)
    assert all(result.decision == "not-checked" and result.seen.startswith(COULD_NOT) for result in results)


def test_cold_pass_of_an_engine_that_began_anew(tmp_path: Path) -> None:
    # Not "the counters are missing": they are there, and why they can't be read is what the user has to know.
    folder = write_trial(tmp_path, edit_counters=lambda rows: begin_anew(rows, "repeat/cold/0:end"))
    first = next(result for result in run("cold-is-cold", folder) if result.workload == "repeat")
    assert first.seen.startswith(f"{COULD_NOT}: engine restarted inside the window")


def test_cold_pass_that_is_missing(tmp_path: Path) -> None:
    def skip_cold(data: Any) -> None:
        data["passes"] = [item for item in data["passes"] if item["name"] != "cold"]

    results = run("cold-is-cold", write_trial(tmp_path, edit_trial=skip_cold))
    assert results[0].seen == f"{COULD_NOT}: there is no cold pass"


# tier-was-used


def test_tier_that_is_ignored(tmp_path: Path) -> None:
    """Everything computed, in every pass: the commonest fault of all."""
    folder = write_trial(tmp_path, setup="plain", setup_config={"cpu_bytes": 1 << 30}, kind="native")
    results = run("tier-was-used", folder)
    assert decisions(results, "repeat")[0] == "fail"
    assert results[0].expected == "2944 tokens from cpu"
    assert results[0].seen == "first-hit 1: computed 3000"


def test_hits_from_another_tier(tmp_path: Path) -> None:
    def elsewhere(rows: Rows) -> None:
        shift(rows, CACHED, -2944, since="repeat/warm/2:end", source="host")
        shift(rows, CACHED, 2944, since="repeat/warm/2:end", source="disk")

    results = run("tier-was-used", write_trial(tmp_path, setup="native-host-fs", edit_counters=elsewhere))
    assert results[0].decision == "fail"
    assert results[0].seen == "warm 2: nvme 2944, computed 56"


def test_tiers_that_the_engine_does_not_tell_apart(tmp_path: Path) -> None:
    """vLLM 0.26 with files: the right number of hits leaves open where they came from, and never passes for a tier."""
    results = run("tier-was-used", write_trial(tmp_path, setup="native-host-fs", version="0.26.0"))
    for workload in ("repeat", "burst"):
        assert decisions(results, workload) == ["not-checked", "pass", "pass"]
    assert results[0].seen == "8832 tokens; this engine doesn't say which tier they came from"


def test_too_few_hits_fail_also_where_tiers_are_not_told_apart(tmp_path: Path) -> None:
    def fewer(rows: Rows) -> None:
        shift(rows, BY_SOURCE, -128, since="repeat/warm/2:end", source="external_kv_transfer")
        shift(rows, BY_SOURCE, 128, since="repeat/warm/2:end", source="local_compute")

    folder = write_trial(tmp_path, setup="native-host-fs", version="0.26.0", edit_counters=fewer)
    result = only([each for each in run("tier-was-used", folder) if each.workload == "repeat"], "fail")
    assert (result.expected, result.seen) == ("2944 tokens from all tiers", "warm 2: computed 184, unknown 2816")


def test_tier_counters_that_are_missing(tmp_path: Path) -> None:
    folder = write_trial(tmp_path, setup="native-host", edit_counters=lambda rows: drop(rows, BY_SOURCE))
    results = run("tier-was-used", folder)
    assert results[0].decision == "not-checked"
    assert results[0].seen.startswith(COULD_NOT)


@pytest.mark.parametrize(("factor", "decision"), [(0.92, "pass"), (0.88, "fail"), (1.2, "fail"), (0.0, "fail")])
def test_bytes_against_tokens(tmp_path: Path, factor: float, decision: str) -> None:
    def scale(rows: Rows) -> None:
        moved = 2944 * KV_BYTES_PER_TOKEN * (factor - 1)
        shift(rows, "vllm:kv_offload_load_bytes_total", moved, since="repeat/first-hit/1:end")

    folder = write_trial(tmp_path, setup="native-host", edit_counters=scale)
    result = next(result for result in run("tier-was-used", folder) if "loaded" in result.expected)
    assert result.decision == decision
    if decision == "fail":
        assert f"{2944 * KV_BYTES_PER_TOKEN} B loaded" in result.expected


def test_byte_tolerance_is_the_configs(tmp_path: Path) -> None:
    def scale(rows: Rows) -> None:
        shift(rows, "vllm:kv_offload_load_bytes_total", 0.2 * 2944 * KV_BYTES_PER_TOKEN, since="repeat/first-hit/1:end")

    folder = write_trial(tmp_path, setup="native-host", edit_counters=scale)
    assert "fail" in decisions(run("tier-was-used", folder), "repeat")
    assert "fail" not in decisions(run("tier-was-used", folder, load_tolerance=0.25), "repeat")


def test_nothing_was_stored(tmp_path: Path) -> None:
    def nothing(rows: Rows) -> None:
        stored = 2944 * KV_BYTES_PER_TOKEN
        shift(rows, "vllm:kv_offload_store_bytes_total", -stored, since="repeat/cold/0:end")

    results = run("tier-was-used", write_trial(tmp_path, setup="native-host", edit_counters=nothing))
    assert only(results, "fail").seen == "0 B stored"


@pytest.mark.parametrize(
    "edit",
    [
        {"edit_trial": lambda data: data["expected"].update(kv_bytes_per_token=None)},
        {"edit_counters": lambda rows: drop(rows, "vllm:kv_offload_load_bytes_total")},
    ],
)
def test_bytes_that_nobody_knows_are_not_checked(tmp_path: Path, edit: dict[str, Any]) -> None:
    """C22's second half: without the model's sizes the gate says so, and uses no default."""
    results = run("tier-was-used", write_trial(tmp_path, setup="native-host", **edit))
    assert decisions(results, "repeat") == ["pass", "pass", "not-checked"]
    assert not any(result.seen.startswith(COULD_NOT) for result in results)


def long_blocks(data: Any) -> None:
    """An engine that aligned its block to 2,768 tokens."""
    data["effective"]["block_size"] = 2768


def test_prompt_shorter_than_a_block(tmp_path: Path) -> None:
    """C23: nothing can be hit, which is no "tier not used"."""
    folder = write_trial(
        tmp_path,
        setup="prefix-cache",
        workloads={"short": Load(prompt_tokens=2000)},
        edit_trial=long_blocks,
        edit_counters=lambda rows: [
            shift(rows, BY_SOURCE, -1920, since=f"short/{name}:end", source="local_cache_hit")
            for name in ("first-hit/1", "warm/2", "warm/3")
        ],
    )
    (result,) = run("tier-was-used", folder)
    assert result.decision == "not-checked"
    assert result.seen == "not measurable: prompt shorter than one block (2768 tokens)"


@pytest.mark.parametrize(("hit", "decision"), [(5536, "pass"), (5888, "fail"), (0, "fail")])
def test_hits_come_in_whole_blocks(tmp_path: Path, hit: int, decision: str) -> None:
    """C23: 6,000 tokens in blocks of 2,768 hit floor(5999 / 2768) · 2768."""
    whole = 5999 // BLOCK * BLOCK
    folder = write_trial(
        tmp_path,
        setup="prefix-cache",
        workloads={"long": Load(prompt_tokens=6000, warm_rounds=0)},
        edit_trial=long_blocks,
        edit_counters=lambda rows: shift(
            rows, BY_SOURCE, hit - whole, since="long/first-hit/1:end", source="local_cache_hit"
        ),
    )
    (result,) = run("tier-was-used", folder)
    assert result.decision == decision
    assert "5536 tokens from gpu" in result.expected


def test_block_size_that_is_unknown(tmp_path: Path) -> None:
    folder = write_trial(tmp_path, edit_trial=lambda data: data["effective"].update(block_size=None))
    assert run("tier-was-used", folder)[0].seen.startswith(COULD_NOT)


# all-completed


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"status": "failed", "error": "HTTP 500"}, "cold 0 request 0: HTTP 500"),
        ({"output_tokens": 2}, "cold 0 request 0: 2 of 4 tokens"),
        ({"output_tokens": None}, "cold 0 request 0: None of 4 tokens"),
        ({"usage_prompt_tokens": 3001}, "cold 0 request 0: prompt of 3000 tokens, the server says 3001"),
    ],
)
def test_request_that_is_not_whole(tmp_path: Path, change: dict[str, Any], seen: str) -> None:
    results = run("all-completed", write_trial(tmp_path, edit_requests=lambda rows: rows[0].update(change)))
    assert only(results, "fail").seen == seen
    assert decisions(results, "burst") == ["pass"]


@pytest.mark.parametrize(
    "times",
    [
        {"first_token_ns": None},
        {"send_ns": None},
        {"end_ns": None},
        # A TTFT below 0, as a clock of another kind would give it.
        {"first_token_ns": 1},
        {"end_ns": 1},
    ],
)
def test_request_whose_times_are_none(tmp_path: Path, times: dict[str, Any]) -> None:
    folder = write_trial(tmp_path, edit_requests=lambda rows: rows[0].update(times))
    failed = run("all-completed", folder)[0]
    assert failed.decision == "fail"
    assert failed.seen == "cold 0 request 0: sent, first token and end are no times in this order"


def test_request_that_is_there_twice_and_another_never(tmp_path: Path) -> None:
    def twice(rows: Rows) -> None:
        rows[-1] = dict(rows[-2])

    (_, burst) = run("all-completed", write_trial(tmp_path, edit_requests=twice))
    assert (burst.decision, burst.seen) == ("fail", "warm 3: 3 of 4 requests recorded")


def test_request_that_is_missing(tmp_path: Path) -> None:
    results = run("all-completed", write_trial(tmp_path, edit_requests=lambda rows: rows.pop()))
    assert only(results, "fail").seen == "warm 3: 3 of 4 requests recorded"


def test_usage_that_is_unknown_is_fine(tmp_path: Path) -> None:
    folder = write_trial(tmp_path, edit_requests=lambda rows: rows[0].update(usage_prompt_tokens=None))
    assert decisions(run("all-completed", folder), "repeat") == ["pass"]


# concurrency-held


def series(*points: tuple[int, int, int], concurrency: int = 4) -> PassRecord:
    return PassRecord(
        workload="w",
        name="cold",
        round=0,
        concurrency=concurrency,
        requests=8,
        failed=0,
        start_ns=0,
        end_ns=1000,
        in_flight=list(points),
    )


@pytest.mark.parametrize(
    ("item", "share"),
    [
        (series((0, 4, 8)), 1.0),
        (series((0, 4, 8), (500, 2, 8)), 0.75),
        # Only two are eligible (a conversation's next turn waits for the last): two in flight are all there can be.
        (series((0, 2, 2)), 1.0),
        # The tail of a pass, with less left than the concurrency, is no fault.
        (series((0, 4, 8), (900, 1, 1), (950, 0, 0)), 1.0),
        (series((0, 1, 8)), 0.25),
        (series(), None),
        (series((0, 0, 0)), None),
    ],
)
def test_concurrency_share(item: PassRecord, share: float | None) -> None:
    assert held(item) == (None if share is None else pytest.approx(share))


def test_concurrency_that_was_not_held(tmp_path: Path) -> None:
    def serialise(data: Any) -> None:
        for item in data["passes"]:
            item["in_flight"] = [[t, min(flying, 1), eligible] for t, flying, eligible in item["in_flight"]]

    results = run("concurrency-held", write_trial(tmp_path, edit_trial=serialise))
    assert decisions(results, "repeat") == ["pass"]
    assert only(results, "fail").workload == "burst"
    assert "of 4 in" in only(results, "fail").seen


def test_concurrency_that_was_not_recorded(tmp_path: Path) -> None:
    folder = write_trial(tmp_path, edit_trial=lambda data: [item.update(in_flight=[]) for item in data["passes"]])
    assert {result.decision for result in run("concurrency-held", folder)} == {"not-checked"}


# native-code-loaded


@pytest.mark.parametrize(
    ("modules", "decision"),
    [({"lmcache/c_ops.*": False, "vllm/_C.*": True}, "fail"), ({}, "not-checked"), ({"vllm/_C.*": True}, "pass")],
)
def test_native_code(tmp_path: Path, modules: dict[str, bool], decision: str) -> None:
    folder = write_trial(tmp_path, edit_trial=lambda data: data["effective"].update(modules=modules))
    (result,) = run("native-code-loaded", folder)
    assert result.decision == decision
    if decision == "fail":
        assert result.seen == "not loaded: lmcache/c_ops.*"


@pytest.mark.parametrize(
    ("patterns", "modules", "decision", "seen"),
    [
        (["a", "b"], {"a": True, "b": True}, "pass", "2 loaded"),
        (["a", "b"], {"a": True}, "not-checked", f"{COULD_NOT}: the servers' maps don't tell about b"),
        (["a", "b"], {}, "not-checked", f"{COULD_NOT}: the servers' maps don't tell about a, b"),
        (["a", "b"], {"a": False}, "fail", "not loaded: a"),
        ([], {}, "not-checked", "the stack lists none for this setup"),
    ],
)
def test_native_code_that_nothing_is_known_of_is_not_loaded(
    tmp_path: Path, patterns: list[str], modules: dict[str, bool], decision: str, seen: str
) -> None:
    def edit(data: Any) -> None:
        data["expected"].update(native_patterns=patterns, native_unlisted=[])
        data["effective"].update(modules=modules)

    (result,) = run("native-code-loaded", write_trial(tmp_path, edit_trial=edit))
    assert (result.decision, result.seen, result.required) == (decision, seen, True)


def test_native_code_that_the_stack_does_not_list(tmp_path: Path) -> None:
    def edit(data: Any) -> None:
        data["expected"].update(native_patterns=["a"], native_unlisted=["lmcache"])
        data["effective"].update(modules={"a": True})

    results = run("native-code-loaded", write_trial(tmp_path, edit_trial=edit))
    assert decisions(results) == ["pass", "not-checked"]
    assert results[1].seen == "the stack lists none for lmcache"


# gpu-cache-as-configured


@pytest.mark.parametrize("setup", ["plain", "native-host"])
def test_device_hits_that_were_not_asked_for(tmp_path: Path, setup: str) -> None:
    folder = write_trial(
        tmp_path,
        setup=setup,
        edit_counters=lambda rows: shift(rows, BY_SOURCE, 128, since="burst/warm/2:end", source="local_cache_hit"),
    )
    results = run("gpu-cache-as-configured", folder)
    assert only(results, "fail").seen == "warm 2: gpu 128"
    assert only(results, "fail").workload == "burst"


def test_plain_server_with_an_external_hit(tmp_path: Path) -> None:
    folder = write_trial(
        tmp_path,
        setup="plain",
        version="0.26.0",
        edit_counters=lambda rows: shift(rows, BY_SOURCE, 64, since="repeat/warm/2:end", source="external_kv_transfer"),
    )
    assert only(run("gpu-cache-as-configured", folder), "fail").seen == "warm 2: unknown 64"


def test_device_hits_that_are_unknown(tmp_path: Path) -> None:
    folder = write_trial(tmp_path, edit_counters=lambda rows: drop(rows, BY_SOURCE))
    assert {result.decision for result in run("gpu-cache-as-configured", folder)} == {"not-checked"}


# drained


@pytest.mark.parametrize(("drained", "decision"), [(False, "fail"), (None, "not-checked"), (True, "pass")])
def test_drain(tmp_path: Path, drained: bool | None, decision: str) -> None:
    folder = write_trial(
        tmp_path, setup="native-host", edit_trial=lambda data: data["passes"][0].update(drained=drained)
    )
    assert decisions(run("drained", folder), "repeat") == [decision]


# no-preemption-surprise


def test_preemptions(tmp_path: Path) -> None:
    name = "vllm:num_preemptions_total"
    folder = write_trial(tmp_path, edit_counters=lambda rows: shift(rows, name, 3, since="burst/warm/3:end"))
    results = run("no-preemption-surprise", folder)
    assert only(results, "fail").seen == "3 in warm 3"
    folder = write_trial(tmp_path, edit_counters=lambda rows: drop(rows, name))
    assert {result.decision for result in run("no-preemption-surprise", folder)} == {"not-checked"}


# client-not-saturated


@pytest.mark.parametrize(
    ("change", "decision"),
    [
        ({"loop_lag_max_ns": 900 * MS}, "fail"),
        # 60 ms would be much beside a fast answer, but the cold pass takes seconds.
        ({"loop_lag_max_ns": 60 * MS}, "pass"),
        ({"client_cpu_ns": 10**13}, "fail"),
        # Several processes share that: the busiest one counts.
        ({"client_cpu_ns": 10**13, "client_process_cpu_ns": [MS, 2 * MS]}, "pass"),
        ({"client_cpu_ns": 2 * MS, "client_process_cpu_ns": [MS, 10**13]}, "fail"),
        ({"loop_lag_max_ns": None}, "not-checked"),
        ({"client_cpu_ns": None}, "not-checked"),
        # Kernel stamps are in the records: a busy loop that read every chunk in time falsified nothing.
        ({"loop_lag_max_ns": 900 * MS, "edge_late_max_ns": 3 * MS, "read_late_p99_ns": 2 * MS}, "pass"),
        ({"loop_lag_max_ns": None, "edge_late_max_ns": 3 * MS, "read_late_p99_ns": 2 * MS}, "pass"),
        ({"edge_late_max_ns": 900 * MS, "read_late_p99_ns": 2 * MS}, "fail"),
        ({"edge_late_max_ns": 3 * MS, "read_late_p99_ns": 900 * MS}, "fail"),
        ({"edge_late_max_ns": None, "read_late_p99_ns": 900 * MS}, "fail"),
        # One late read among a hundred, of no first token and no end.
        ({"edge_late_max_ns": 3 * MS, "read_late_p99_ns": 2 * MS, "read_late_max_ns": 900 * MS}, "pass"),
    ],
)
def test_client(tmp_path: Path, change: dict[str, Any], decision: str) -> None:
    folder = write_trial(tmp_path, edit_trial=lambda data: data["passes"][0].update(change))
    assert decisions(run("client-not-saturated", folder), "repeat") == [decision]


# quiet-host


@pytest.mark.parametrize(("other", "decision"), [(0.4, "fail"), (None, "not-checked"), (0.02, "pass")])
def test_noisy_neighbour(tmp_path: Path, other: float | None, decision: str) -> None:
    folder = write_trial(tmp_path, edit_probes=lambda rows: [row.update(cpu_other=other) for row in rows])
    results = run("quiet-host", folder)
    assert {result.decision for result in results} == {decision}
    assert not any(result.required for result in results)


def test_noise_is_said_with_the_passes_that_were_looked_at(tmp_path: Path) -> None:
    folder = write_trial(tmp_path)
    first = Evidence.load(folder).trial.passes[0]

    def blind(rows: Rows) -> None:
        rows[:] = [row for row in rows if row["t_ns"] <= first.end_ns]

    seen = [result.seen for result in run("quiet-host", write_trial(tmp_path, edit_probes=blind))]
    assert seen == ["1.0% in cold 0; 1 of 4 passes had a sample", "no sample fell into a pass"]


def test_client_of_a_pass_that_took_no_time(tmp_path: Path) -> None:
    def still(data: Any) -> None:
        data["passes"][1]["end_ns"] = data["passes"][1]["start_ns"]

    failed = run("client-not-saturated", write_trial(tmp_path, edit_trial=still))[0]
    assert failed.decision == "fail"
    assert "first-hit 1: client took" in failed.seen


# counters-add-up


def overclaim(rows: Rows) -> None:
    """C2a: 17,050 prompt tokens, of which the connector claims 20,480."""
    shift(rows, BY_SOURCE, 20480 - 2944, since="repeat/warm/2:end", source="external_kv_transfer")
    shift(rows, BY_SOURCE, -56, since="repeat/warm/2:end", source="local_compute")
    shift(rows, CACHED, 20480 - 2944, since="repeat/warm/2:end", source="host")
    shift(rows, "vllm:prompt_tokens_total", 17050 - 3000, since="repeat/warm/2:end")


def begin_anew(rows: Rows, since: str) -> None:
    """C3: from this mark on a page of a younger process, with smaller counters."""
    first = next(place for place, row in enumerate(rows) if row["mark"] == since)
    for row in rows[first:]:
        row["pages"]["engine"] = rows[1]["pages"]["engine"].replace("1700000000.0", "1700000777.0")


def restart(rows: Rows) -> None:
    """The engine begins anew in the last pass."""
    begin_anew(rows, "repeat/warm/2:end")


def strangers(rows: Rows) -> None:
    """Somebody else's prompt on the same server."""
    for name, labels in (("vllm:prompt_tokens_total", {}), (BY_SOURCE, {"source": "local_compute"})):
        shift(rows, name, 500, since="repeat/warm/2:end", **labels)


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (
            overclaim,
            "warm 2: sources do not add up to prompt tokens: cpu 20480 + computed 0 = 20480, prompt 17050; "
            "warm 2: client sent 3000, the engine counted 17050",
        ),
        (restart, "warm 2: engine restarted inside the window"),
        (strangers, "warm 2: client sent 3000, the engine counted 3500"),
    ],
)
def test_counters_that_contradict(tmp_path: Path, fault: Callable[[Rows], None], seen: str) -> None:
    folder = write_trial(tmp_path, setup="native-host", edit_counters=fault)
    results = run("counters-add-up", folder)
    failed = next(result for result in results if result.workload == "repeat")
    assert failed.decision == "fail"
    assert failed.seen.startswith(seen)


@pytest.mark.parametrize("younger", [True, False], ids=["start time", "counters alone"])
@pytest.mark.parametrize("setup", ["plain", "prefix-cache"])
def test_engine_that_began_anew_between_two_passes(tmp_path: Path, setup: str, younger: bool) -> None:
    """Each pass's own window is sound then, and the warm-up of the new engine is in the next one."""

    def begin(rows: Rows) -> None:
        first = next(place for place, row in enumerate(rows) if row["mark"] == "repeat/first-hit/1:start")
        gone = {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in rows[first]["pages"]["engine"].splitlines())
            if name.startswith("vllm:")
        }
        for row in rows[first:]:
            lines = []
            for line in row["pages"]["engine"].splitlines():
                name, _, value = line.rpartition(" ")
                lines.append(f"{name} {float(value) - gone[name]!r}" if name in gone else line)
            page = "\n".join(lines) + "\n"
            row["pages"]["engine"] = page.replace("1700000000.0", "1700000777.0") if younger else page

    folder = write_trial(tmp_path, setup=setup, edit_counters=begin)
    assert all(not window.problems for window in Evidence.load(folder).windows)
    failed, other = run("counters-add-up", folder)
    assert (failed.decision, other.decision) == ("fail", "pass")
    assert failed.seen.startswith("before first-hit 1: engine restarted between passes (")


def test_page_of_an_older_process(tmp_path: Path) -> None:
    """Somebody else's server, whose counters are higher: nothing went back."""

    def older(rows: Rows) -> None:
        for row in rows[-3:]:
            row["pages"]["engine"] = row["pages"]["engine"].replace("1700000000.0", "1600000000.0")

    (_, failed) = run("counters-add-up", write_trial(tmp_path, edit_counters=older))
    assert failed.decision == "fail"
    assert "process start time 1700000000.00, then 1600000000.00" in failed.seen


def test_counters_that_are_missing(tmp_path: Path) -> None:
    folder = write_trial(tmp_path, edit_counters=lambda rows: drop(rows, "vllm:prompt_tokens_total"))
    assert {result.decision for result in run("counters-add-up", folder)} == {"not-checked"}


# raw-files-intact


def test_raw_files(tmp_path: Path) -> None:
    folder = write_trial(tmp_path, workloads={"burst": BURST})
    assert decisions(run("raw-files-intact", folder)) == ["pass"]
    (folder / "logs" / "engine.log").unlink()
    (folder / "counters.jsonl").write_text("{}", encoding="utf-8")
    (result,) = run("raw-files-intact", folder)
    assert result.decision == "fail"
    assert "logs/engine.log can't be read" in result.seen
    assert "counters.jsonl has 2 bytes, was written with" in result.seen


def test_a_lost_sampler_is_said(tmp_path: Path) -> None:
    folder = write_trial(tmp_path, setup="plain")
    (folder / "probes.jsonl").write_text("", encoding="utf-8")
    results = run("quiet-host", folder)
    assert {result.decision for result in results} == {"not-checked"}
    assert all("the sampler left no samples" in result.seen for result in results)


def test_a_first_hit_that_should_come_from_disk_and_does_not(tmp_path: Path) -> None:
    def from_disk(rows: Rows) -> None:
        shift(rows, CACHED, -2944, since="repeat/first-hit/1:end", source="host")
        shift(rows, CACHED, 2944, since="repeat/first-hit/1:end", source="disk")

    settings = {"kind": "native", "cpu_bytes": 2**30, "copier": "host", "files": {"first_hit": "files"}}
    for edit, decision in ((from_disk, "pass"), (None, "fail")):
        folder = write_trial(tmp_path / decision, setup="native-host-fs", edit_counters=edit)
        path = folder / "trial.json"
        data = json.loads(path.read_text(encoding="utf-8"))
        data["config"]["setup"] |= settings
        path.write_text(json.dumps(data), encoding="utf-8")
        assert run("tier-was-used", folder)[0].decision == decision
