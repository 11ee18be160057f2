"""Two engines of one setup: what a pass is sent to, what each is made of, what must be hit, and what the gates see."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import polars as pl
import pytest
from test_gates_hits import BY_SOURCE, CACHED, HIT
from test_trial_engine import context, setup, value
from trial_factory import BLOCK, KV_BYTES_PER_TOKEN, Load, Rows, shift, write_trial

from kvladder import tables
from kvladder.config import registry
from kvladder.config.experiment import ConfigError, start_id, validate
from kvladder.config.records import GateResult, Verdict
from kvladder.config.stack import StackConfig
from kvladder.config.traffic import TrafficContext
from kvladder.counters.reading import parse_pages, seen_from
from kvladder.gates.base import Evidence
from kvladder.judge import judge_trial
from kvladder.tables.labels import single_workloads
from kvladder.tables.model import frame
from kvladder.tables.sharing import sharing_rows
from kvladder.trial.engine import engine_spec

FIRST, SECOND = "engine", "engine-2"
WORKLOADS = {"four": Load(requests=4, prompt_tokens=3000, warm_rounds=1)}
STACK = {"python": "3.12", "engine": "v", "engine_version": "1"}


def test_the_first_hit_goes_to_the_engine_that_did_not_store() -> None:
    sharing = registry.load("workloads", "sharing").CONFIG(kind="sharing", prompts=3, prompt_tokens=100, concurrency=2)
    plans = sharing.passes("x", TrafficContext(1, "s/r0", 1000, 16))
    assert [(plan.name, plan.engine, plan.concurrency) for plan in plans] == [
        ("cold", 0, 2),
        ("first-hit", 1, 2),
        ("warm", 0, 2),
    ]
    assert plans[0].requests == plans[1].requests == plans[2].requests
    assert [len(plan.requests) for plan in plans] == [3, 3, 3]


# What each engine is made of.


def second(folder: Path, **changes: Any) -> Any:
    return replace(context(folder), engines=2, **changes).of_engine(1)


def test_what_a_setup_makes_for_an_engine_is_that_engines_alone(tmp_path: Path) -> None:
    native = setup("native", cpu_bytes="1GiB", copier="host", files={})
    ours, other = (native.connector(each) for each in (context(tmp_path), second(tmp_path)))
    assert (ours["engine_id"], other["engine_id"]) == ("exp-x-r0-1234", "exp-x-r0-1234-2")
    roots = [each["kv_connector_extra_config"]["secondary_tiers"][0].pop("root_dir") for each in (ours, other)]
    assert roots == [str(tmp_path / "tier"), str(tmp_path / SECOND / "tier")]
    assert ours["kv_connector_extra_config"] == other["kv_connector_extra_config"]
    assert second(tmp_path).log == tmp_path / "logs" / "engine-2.log"


def test_side_processes_are_the_same_for_both(tmp_path: Path) -> None:
    lmcache = setup("lmcache-mp", cpu_bytes="1GiB")
    assert lmcache.connector(context(tmp_path)) == lmcache.connector(second(tmp_path))


def test_the_engines_bring_mooncakes_pool_together(tmp_path: Path) -> None:
    mooncake = setup("mooncake-store", segment_bytes="1GiB", buffer_bytes="1MiB")
    (tmp_path / SECOND).mkdir()
    sizes = []
    for each in (replace(context(tmp_path), engines=2), second(tmp_path)):
        path = Path(mooncake.engine_env(each)["MOONCAKE_CONFIG_PATH"])
        sizes.append(json.loads(path.read_text(encoding="utf-8"))["global_segment_size"])
    assert sizes == [2**29, 2**29]
    sockets = [
        mooncake.connector(each).get("kv_connector_extra_config") for each in (context(tmp_path), second(tmp_path))
    ]
    assert sockets == [None, {"lookup_rpc_port": 1}], "each scheduler asks its own worker"
    assert mooncake.capacity_bytes() == {"remote": 2**30}


@pytest.mark.parametrize(
    ("engines", "device", "share"), [(1, "cuda", None), (2, "cuda", "0.45"), (2, "cpu", None)], ids=str
)
def test_a_gpu_is_shared_out_over_the_engines(tmp_path: Path, engines: int, device: Any, share: str | None) -> None:
    stack = StackConfig(device=device, **STACK)
    argv = list(engine_spec(setup("plain"), replace(context(tmp_path), engines=engines, stack=stack), "key").argv)
    assert (value(argv, "--gpu-memory-utilization") if "--gpu-memory-utilization" in argv else None) == share


def test_what_is_configured_goes_over_the_share(tmp_path: Path) -> None:
    on_gpu = {"engines": 2, "stack": StackConfig(device="cuda", **STACK)}
    place = replace(context(tmp_path, args={"gpu-memory-utilization": 0.4}), **on_gpu)
    assert value(list(engine_spec(setup("plain"), place, "key").argv), "--gpu-memory-utilization") == "0.4"


@pytest.mark.parametrize(
    ("device", "pool", "together"),
    [("cuda", {}, True), ("cuda", {"kv_pool_bytes": None, "kv_pool_blocks": 64}, False), ("cpu", {}, True)],
    ids=["bytes", "what is free", "cpu"],
)
def test_engines_start_together_unless_they_look_what_is_free(
    tmp_path: Path, device: Any, pool: dict[str, Any], together: bool
) -> None:
    place = replace(context(tmp_path, **pool), engines=2, stack=StackConfig(device=device, **STACK))
    first, other = (engine_spec(setup("plain"), place.of_engine(number), "key") for number in (0, 1))
    assert (first.beside, other.beside) == (False, together)
    assert (first.name, other.name) == (FIRST, SECOND)
    assert first.metrics_url != other.metrics_url


# The experiment.


def experiment(**workloads: Any) -> Any:
    return validate(
        {
            "experiment": "tiny",
            "stack": "stub",
            "model": {"weights": "dummy", "shape": {"num_hidden_layers": 2}},
            "engine": {"max_model_len": 1024, "kv_pool_bytes": "1MiB"},
            "setups": {"plain": {"kind": "plain"}},
            "workloads": workloads,
        }
    )


REPEAT = {"kind": "repeat", "prompt_tokens": 100}
SHARING = {"kind": "sharing", "prompt_tokens": 100}


def test_a_suite_has_as_many_engines_as_a_workload_of_it_needs() -> None:
    both = experiment(repeat=REPEAT, sharing=SHARING)
    assert (both.engines("repeat"), both.engines("sharing"), both.engines()) == (1, 2, 2)
    assert experiment(repeat=REPEAT).engines() == 1


def test_a_bring_up_with_two_engines_is_another_one() -> None:
    one, two = experiment(repeat=REPEAT), experiment(repeat=REPEAT, sharing=SHARING)
    assert start_id(one, "plain", "code") != start_id(two, "plain", "code")
    assert start_id(one, "plain", "code") == start_id(experiment(again=REPEAT), "plain", "code")


def test_there_is_a_pass_through_each_engine() -> None:
    with pytest.raises(ConfigError, match="warm_passes"):
        experiment(sharing={**SHARING, "warm_passes": 1})


# The counters.


def test_a_setup_reads_the_pages_of_one_engine() -> None:
    pages = parse_pages({"mooncake": "m 1\n", FIRST: "x 1\n", SECOND: "x 2\n"})
    for number, name in enumerate((FIRST, SECOND)):
        seen = seen_from(pages, number)
        assert list(seen) == ["mooncake", "engine"]
        assert seen["engine"] is pages[name]
    assert list(seen_from({"lmcache": None}, 0)) == ["lmcache"], "a server that isn't there isn't made up"


# Whole trials. The first hit's traffic is moved to the second engine's page.


def apart(rows: Rows, *, leave: bool = False) -> None:
    """Give the second engine what the first one's counters gained in the first hit; ``leave``: the first keeps it."""
    marks = {row["mark"]: row["pages"] for row in rows}
    begin, end = (numbers(marks[f"four/first-hit/1:{edge}"][FIRST]) for edge in ("start", "end"))
    empty = numbers(rows[0]["pages"][FIRST])
    after = False
    for row in rows:
        after |= row["mark"] == "four/first-hit/1:end"
        page = row["pages"][FIRST]
        gained = {series: end[series] - begin.get(series, 0.0) if after else 0.0 for series in end}
        row["pages"][SECOND] = written(page, {series: empty.get(series, 0.0) + gained[series] for series in end})
        if after and not leave:
            now = numbers(page)
            row["pages"][FIRST] = written(page, {series: now[series] - gained.get(series, 0.0) for series in now})


def numbers(page: str) -> dict[str, float]:
    pairs = (line.rpartition(" ") for line in page.splitlines() if not line.startswith(("#", "process_start")))
    return {series: float(text) for series, _, text in pairs}


def written(page: str, values: dict[str, float]) -> str:
    """The page with these values; a series that isn't among them keeps its own."""
    lines = []
    for line in page.splitlines():
        series = line.rpartition(" ")[0]
        lines.append(f"{series} {values[series]!r}" if series in values else line)
    return "\n".join(lines) + "\n"


def computed_by_the_second(rows: Rows) -> None:
    """Nothing was hit in the first hit, and what was computed was stored."""
    mark = "four/first-hit/1:end"
    shift(rows, BY_SOURCE, -HIT, since=mark, source="external_kv_transfer")
    shift(rows, BY_SOURCE, HIT, since=mark, source="local_compute")
    shift(rows, CACHED, -HIT, since=mark, source="host")
    shift(rows, "vllm:kv_offload_load_bytes_total", -HIT * KV_BYTES_PER_TOKEN, since=mark)


def trial(folder: Path, kind: str, *edits: Any, **second_engine: Any) -> Path:
    def two(data: dict[str, Any]) -> None:
        for item in data["passes"]:
            item["engine"] = int(item["name"] == "first-hit")
        effective = json.loads(json.dumps(data["effective"])) | second_engine
        data["further_engines"] = {SECOND: {"connector": data["expected"]["connector"], "effective": effective}}

    def counters(rows: Rows) -> None:
        for edit in edits or (apart,):
            edit(rows)

    return write_trial(folder, setup=kind, workloads=WORKLOADS, edit_counters=counters, edit_trial=two)


def finding(verdict: Verdict, gate: str) -> GateResult:
    return next(result for result in verdict.gates if result.gate == gate)


@pytest.mark.parametrize("kind", ["lmcache-mp", "mooncake-store"])
def test_a_shared_pool_gives_the_second_engine_what_the_first_stored(tmp_path: Path, kind: str) -> None:
    verdict = judge_trial(trial(tmp_path, kind))
    assert verdict.status == "valid", verdict.reason
    hits = finding(verdict, "hits-as-predicted")
    unit = 256 if kind == "lmcache-mp" else BLOCK
    assert (hits.decision, hits.seen) == ("pass", f"{2 * 4 * (2999 // unit * unit)} hit tokens")


def test_a_tier_of_each_engine_gives_the_second_one_nothing(tmp_path: Path) -> None:
    folder = trial(tmp_path, "native-host", computed_by_the_second, apart)
    verdict = judge_trial(folder)
    assert verdict.status == "valid", verdict.reason
    assert finding(verdict, "hits-as-predicted").seen == f"{HIT} hit tokens"
    assert [each.total for each in Evidence.load(folder).prediction.passes] == [0, 0, HIT]  # type: ignore[union-attr]


def test_a_tier_that_is_shared_and_should_not_be(tmp_path: Path) -> None:
    verdict = judge_trial(trial(tmp_path, "native-host"))
    assert verdict.status == "invalid"
    found = finding(verdict, "hits-as-predicted")
    assert (found.decision, found.expected) == ("fail", "first-hit 1: none hit")
    assert found.seen.startswith(f"first-hit 1: cpu {HIT} hit")
    assert finding(verdict, "tier-was-used").decision == "fail"


def test_requests_that_went_to_the_wrong_engine(tmp_path: Path) -> None:
    verdict = judge_trial(trial(tmp_path, "lmcache-mp", lambda rows: apart(rows, leave=True)))
    found = finding(verdict, "counters-add-up")
    assert found.decision == "fail"
    assert found.seen == "first-hit 1: not sent to engine, which counted 12000 tokens"


def test_an_engine_that_does_not_say_what_it_was_sent(tmp_path: Path) -> None:
    def silent(rows: Rows) -> None:
        apart(rows)
        for row in rows:
            if row["mark"] == "four/cold/0:end":
                lines = row["pages"][SECOND].splitlines()
                kept = [line for line in lines if not line.startswith("vllm:prompt_tokens")]
                row["pages"][SECOND] = "\n".join(kept) + "\n"

    found = finding(judge_trial(trial(tmp_path, "lmcache-mp", silent)), "counters-add-up")
    assert found.decision == "not-checked"
    assert found.seen == "prompt tokens are unknown in at least one pass"


@pytest.mark.parametrize(
    ("differs", "seen"),
    [
        ({"kv_pool_tokens": 20_480}, "kv_pool_tokens 20480"),
        ({"block_size": 16}, "block_size 16"),
        ({"prefix_caching": True}, "prefix_caching on"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_engines_that_are_not_alike(tmp_path: Path, differs: dict[str, Any], seen: str) -> None:
    verdict = judge_trial(trial(tmp_path, "lmcache-mp", **differs))
    found = [result for result in verdict.gates if result.gate == "config-readback"]
    assert [result.decision for result in found] == ["pass", "fail"]
    assert found[1].expected.startswith("engine-2: ") and seen in found[1].seen


def test_a_second_engine_on_slow_python(tmp_path: Path) -> None:
    verdict = judge_trial(trial(tmp_path, "lmcache-mp", modules={"vllm/_C.*\\.so": False}))
    found = finding(verdict, "native-code-loaded")
    assert (found.decision, found.seen) == ("fail", "not loaded: vllm/_C.*\\.so (engine-2)")


# The links of a pool that lies in both engines.


def test_a_pool_of_two_engines_is_reached_by_memory_copies_and_the_network() -> None:
    mooncake = setup("mooncake-store", segment_bytes=1, buffer_bytes=1)
    said = "Transport: memcpy enabled; segment pinned memory is disabled"
    assert mooncake.links("remote", gpu=True, log=said) == ("pageable",)
    assert mooncake.links("remote", gpu=True, log=said, engines=2) == ("tcp_loopback", "pageable")
    rdma = setup("mooncake-store", segment_bytes=1, buffer_bytes=1, protocol="rdma")
    assert rdma.links("remote", gpu=True, log=said, engines=2) == (), "no roofline of the network"


# The table.


def passes(second_hit: int | None, own_hit: int = 1024, repeat: int = 0) -> list[dict[str, Any]]:
    hits = {"cold": 0, "first-hit": second_hit, "warm": own_hit}
    base = {"setup": "s", "suite": "main", "workload": "share", "repeat": repeat, "requests": 1, "concurrency": 1}
    zero = dict.fromkeys(("tokens_gpu", "tokens_nvme", "tokens_remote", "tokens_unknown"), 0)
    return [
        {**base, **zero, "pass": name, "round": place, "prompt_length": 1032, "prompt_tokens": 1032, "tokens_cpu": hit}
        for place, (name, hit) in enumerate(hits.items())
    ]


def table(tmp_path: Path, rows: list[dict[str, Any]], engine: int = 1) -> list[dict[str, Any]]:
    record = Some(timed=[Some(workload="share", engine=number) for number in (0, engine, 0)])
    raw: Any = [Some(suite="main", record=record), Some(suite="main", record=None)]
    times = {"cold": 2.0, "first-hit": 0.5, "warm": 0.25}
    metrics = [
        {key: row[key] for key in ("setup", "suite", "workload", "repeat", "pass")}
        | {"metric": "ttft_s", "value": times[row["pass"]] * (1 + row["repeat"])}
        for row in rows
    ]
    found = sharing_rows(raw, frame("passes", rows), frame("metrics", metrics), frame("limits", []))
    return frame("sharing", found).to_dicts()


@pytest.mark.parametrize(
    ("hit", "answer"), [(1024, "found"), (512, "in part"), (0, "not found"), (None, None)], ids=str
)
def test_the_answer_is_held_against_what_the_storing_engine_hits(
    tmp_path: Path, hit: int | None, answer: str | None
) -> None:
    (row,) = table(tmp_path, passes(hit))
    assert row["answer"] == answer
    assert row["second_hit"] == (None if hit is None else pytest.approx(hit / 1032))
    assert row["own_hit"] == pytest.approx(1024 / 1032)
    assert (row["ttft_second_s"], row["second_to_stored"], row["second_to_own"]) == (0.5, 0.25, 2.0)
    assert (row["n"], row["prompts"], row["load_gb_per_s"]) == (1, 1, None)


def test_trials_that_disagree_found_it_in_part(tmp_path: Path) -> None:
    (row,) = table(tmp_path, passes(1024) + passes(0, repeat=1))
    assert (row["n"], row["answer"]) == (2, "in part")
    assert (row["ttft_second_s"], row["second_to_own"]) == (0.75, 2.0)


def test_a_trial_that_cannot_say_leaves_it_unknown(tmp_path: Path) -> None:
    (row,) = table(tmp_path, passes(1024) + passes(None, repeat=1))
    assert (row["n"], row["answer"]) == (2, None)


def test_parity_asks_the_engine_that_stored(tmp_path: Path) -> None:
    folder = trial(tmp_path, "native-host", computed_by_the_second, apart)
    (folder / "verdict.json").write_text(judge_trial(folder).model_dump_json(by_alias=True), encoding="utf-8")
    parity = tables.build([folder], tmp_path / "tables", baseline="native-host").parity
    (hit,) = parity.filter(pl.col("property") == "hit of a prompt repeated in four").to_dicts()
    assert (hit["asked"], hit["measured"], hit["agrees"]) == (str(HIT // 4), str(HIT // 4), True)


def test_workloads_of_one_engine_are_not_in_it(tmp_path: Path) -> None:
    assert table(tmp_path, passes(1024), engine=0) == []


def test_none_of_it_stands_in_tables_of_first_hits(tmp_path: Path) -> None:
    data = pl.DataFrame({"suite": ["main", "main"], "workload": ["share", "repeat"]})
    seen: Any = Some(sharing=data.head(1), ladder=data.clear(), context={})
    assert single_workloads(seen, data) == [("main", "repeat")]
