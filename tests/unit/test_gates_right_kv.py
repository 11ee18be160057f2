"""right-kv: hits that answer as computing does, and every way in which they don't."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from trial_factory import Load, Rows, shift, write_trial

from kvladder.config.experiment import GateConfig
from kvladder.config.records import GateResult, PassRecord, Verdict
from kvladder.gates import client_not_saturated, cold_is_cold, right_kv
from kvladder.gates.base import COULD_NOT, Evidence
from kvladder.judge import BlockVerdict, apply_block, judge_block, judge_trial
from kvladder.report.view import view
from kvladder.stats.logprobs import deviation, greedy
from kvladder.tables.build import build
from kvladder.tables.model import Tables

PROMPTS = 8
LOADS = {
    "repeat": Load(),
    "right-kv": Load(requests=PROMPTS, prompt_tokens=521, output_tokens=2, warm_rounds=1),
}
NOISE = 0.03
"""What hits of the device cache are off in these trials."""

Off = Mapping[tuple[str, int], float]
"""By pass and prompt, how much the most probable token is off."""


def answer(prompt: int, off: float) -> dict[str, float]:
    """Twenty tokens; the first one's log probability is off."""
    logprobs = {str(100 * prompt + rank): -3 - 0.125 * rank for rank in range(20)}
    logprobs[str(100 * prompt)] -= off
    return logprobs


def everywhere(name: str, off: float) -> dict[tuple[str, int], float]:
    return {(name, prompt): off for prompt in range(PROMPTS)}


NOISY = everywhere("first-hit", NOISE) | everywhere("warm", NOISE)


def trial(root: Path, setup: str, off: Off = NOISY, **more: Any) -> Path:
    """A trial with a right-kv pass whose answers are off as said."""
    edit_requests, edit_trial = more.pop("edit_requests", None), more.pop("edit_trial", None)

    def requests(rows: Rows) -> None:
        for row in rows:
            if row["workload"] == "right-kv":
                position = answer(row["index"], off.get((row["pass"], row["index"]), 0))
                row["logprobs"] = [position, {"7": -1.0}]
        if edit_requests is not None:
            edit_requests([row for row in rows if row["workload"] == "right-kv"])

    def record(data: Any) -> None:
        data["config"]["right_kv"] = {"prompts": PROMPTS, "prompt_tokens": 521, "output_tokens": 2, "top": 20}
        del data["config"]["workloads"]["right-kv"]
        if edit_trial is not None:
            edit_trial(data)

    return write_trial(
        root, setup=setup, workloads=more.pop("workloads", LOADS), edit_requests=requests, edit_trial=record, **more
    )


def judged(*folders: Path, **config: Any) -> dict[str, Verdict]:
    """Final verdicts by setup."""
    gates = GateConfig(**config)
    own = [judge_trial(folder, gates) for folder in folders]
    block = judge_block(folders, own, gates)
    assert BlockVerdict.model_validate_json(block.model_dump_json(by_alias=True)) == block
    return {verdict.setup: apply_block(verdict, block) for verdict in own}


def results(verdict: Verdict) -> list[GateResult]:
    return [result for result in verdict.gates if result.gate == "right-kv"]


def the_result(verdict: Verdict) -> GateResult:
    (result,) = results(verdict)
    return result


def test_hits_within_the_spread_of_the_device_cache_are_right(tmp_path: Path) -> None:
    close = everywhere("first-hit", 0.08) | everywhere("warm", NOISE)
    found = judged(trial(tmp_path, "prefix-cache"), trial(tmp_path, "native-host", close), trial(tmp_path, "plain", {}))
    assert {verdict.status for verdict in found.values()} == {"valid"}
    first, later = results(found["native-host"])
    assert (first.decision, later.decision) == ("pass", "pass")
    assert first.expected == "first hits within 0.090 of the cold pass (log probability)"
    assert first.seen == (
        "first hits: 0 of 8 prompts beyond, largest 0.080, median 0.080; "
        "greedy token flipped in 0, equal to prefix-cache in 0"
    )
    assert later.seen.endswith("equal to prefix-cache in 8")
    assert the_result(found["plain"]).seen == "this setup has no tier"


def test_wrong_at_the_first_hit_only_is_told_apart(tmp_path: Path) -> None:
    """One connector deviates on every prompt at the first hit after the store, and is right from the second on."""
    wrong_once = everywhere("first-hit", 0.4) | everywhere("warm", NOISE)
    found = judged(trial(tmp_path, "prefix-cache"), trial(tmp_path, "native-host", wrong_once))
    assert found["prefix-cache"].status == "valid"
    verdict = found["native-host"]
    assert verdict.status == "invalid"
    assert verdict.reason is not None
    assert verdict.reason.startswith("right-kv: expected first hits within 0.090 of the cold pass")
    assert "first hits: 8 of 8 prompts beyond, largest 0.400" in verdict.reason
    assert [result.decision for result in results(verdict)] == ["fail", "pass"]
    first, later = verdict.deviations
    assert (first.name, first.prompts, first.beyond, first.flipped) == ("first-hit", 8, 8, 8)
    assert first.largest == pytest.approx(0.4)
    assert (later.name, later.beyond, later.flipped, later.equal) == ("warm", 0, 0, 8)


def test_one_wrong_prompt_is_enough(tmp_path: Path) -> None:
    one = NOISY | {("warm", 5): 0.1}
    found = judged(trial(tmp_path, "prefix-cache"), trial(tmp_path, "mooncake-store", one))
    verdict = found["mooncake-store"]
    assert verdict.status == "invalid"
    assert [result.decision for result in results(verdict)] == ["pass", "fail"]
    assert "later hits: 1 of 8 prompts beyond, largest 0.100, median 0.030" in results(verdict)[1].seen


def test_a_control_that_repeats_to_the_bit_leaves_the_floor(tmp_path: Path) -> None:
    exact, near, far = {}, everywhere("first-hit", 0.069), everywhere("first-hit", 0.071)
    folders = [
        trial(tmp_path, "prefix-cache", exact),
        trial(tmp_path, "native-host", near),
        trial(tmp_path, "native-host-fs", far),
    ]
    found = judged(*folders)
    assert found["native-host"].status == "valid"
    assert found["native-host-fs"].status == "invalid"
    assert judged(*folders, right_kv_floor=0.08)["native-host-fs"].status == "valid"
    assert judged(*folders, advisory=["right-kv"])["native-host-fs"].status == "valid"


def test_the_factor_is_configured(tmp_path: Path) -> None:
    folders = [trial(tmp_path, "prefix-cache"), trial(tmp_path, "native-host", everywhere("warm", 0.1))]
    assert judged(*folders)["native-host"].status == "invalid"
    assert judged(*folders, right_kv_factor=4)["native-host"].status == "valid"


def test_without_a_control_it_is_not_checked(tmp_path: Path) -> None:
    far = everywhere("first-hit", 0.4)
    verdict = judged(trial(tmp_path, "native-host", far), trial(tmp_path, "plain", {}))["native-host"]
    assert verdict.status == "valid"
    assert the_result(verdict).decision == "not-checked"
    assert "no valid prefix-cache" in the_result(verdict).seen
    assert [(part.limit, part.beyond) for part in verdict.deviations] == [(None, None), (None, None)]


def test_an_invalid_control_is_none(tmp_path: Path) -> None:
    broken = trial(tmp_path, "prefix-cache", edit_requests=lambda rows: rows[3].update(status="failed", error="gone"))
    found = judged(broken, trial(tmp_path, "native-host"))
    assert found["prefix-cache"].status == "invalid"
    assert "no valid prefix-cache" in the_result(found["native-host"]).seen


def test_a_control_that_is_off_itself_measures_nothing(tmp_path: Path) -> None:
    off = everywhere("first-hit", 0.3)
    found = judged(trial(tmp_path, "prefix-cache", off), trial(tmp_path, "native-host"))
    for verdict in found.values():
        assert verdict.status == "invalid"
        assert the_result(verdict).seen.startswith(f"{COULD_NOT}: hits of prefix-cache itself are 0.300 off")
        assert {(part.limit, part.beyond) for part in verdict.deviations} == {(None, None)}


def test_a_control_of_other_prompts_is_none(tmp_path: Path) -> None:
    longer = trial(tmp_path, "prefix-cache", edit_trial=lambda data: data["config"]["right_kv"].update(prompts=16))
    found = judged(longer, trial(tmp_path, "native-host"))
    assert the_result(found["native-host"]).decision == "not-checked"
    assert "no valid prefix-cache with such a pass" in the_result(found["native-host"]).seen


def test_a_cold_pass_that_computes_something_else(tmp_path: Path) -> None:
    other = {(name, prompt): 0.5 for name in ("cold", "first-hit", "warm") for prompt in range(PROMPTS)}
    verdict = judged(trial(tmp_path, "prefix-cache"), trial(tmp_path, "native-host", other))["native-host"]
    assert verdict.status == "invalid"
    assert the_result(verdict).seen == "its cold pass is 0.500 off"
    # Its hits agree with that, and are no more right for it.
    assert [(part.largest, part.beyond) for part in verdict.deviations] == [(0, 8), (0, 8)]


@pytest.mark.parametrize(
    ("edit", "seen"),
    [
        (lambda data: data["config"]["model"].update(weights="dummy"), "dummy weights are no evidence"),
        (lambda data: data["config"].pop("right_kv"), "measured without a right-kv pass"),
        (lambda data: data["config"].update(right_kv=None), "measured without a right-kv pass"),
        (lambda data: data["config"]["setup"].update(chunk_tokens=1024), "not measurable"),
    ],
)
def test_what_is_no_evidence_is_said_and_decides_nothing(
    tmp_path: Path, edit: Callable[[Any], object], seen: str
) -> None:
    far = everywhere("first-hit", 0.4)
    folder = trial(tmp_path, "native-host", far, edit_trial=edit)
    (result,) = right_kv.check(Evidence.load(folder))
    assert result.decision == "not-checked"
    assert result.seen.startswith(seen)
    control = Evidence.load(trial(tmp_path, "prefix-cache"))
    assert right_kv.check_block([Evidence.load(folder), control])["native-host", Evidence.load(folder).key[1]] == []


def no_logprobs(rows: Rows) -> None:
    rows[9].update(logprobs=None)


def failed(rows: Rows) -> None:
    rows[20].update(status="failed")


def few_logprobs(rows: Rows) -> None:
    position = rows[9]["logprobs"][0]
    rows[9]["logprobs"][0] = dict(list(position.items())[:19])


def not_a_number(rows: Rows) -> None:
    """Next to NaN nothing is far off, so it must not get as far as being compared."""
    rows[9]["logprobs"][0]["7"] = float("nan")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"edit_requests": no_logprobs}, "first-hit: 7 of 8 prompts answered with log probabilities"),
        ({"edit_requests": few_logprobs}, "first-hit: 7 of 8 prompts answered with log probabilities"),
        ({"edit_requests": not_a_number}, "first-hit: 7 of 8 prompts answered with log probabilities"),
        ({"edit_requests": failed}, "warm: 7 of 8 prompts"),
        ({"workloads": {"repeat": Load(), "right-kv": Load(7, 1, 521, 2, 1)}}, "cold: 7 of 8 prompts"),
        ({"edit_trial": lambda data: data.update(passes=data["passes"][:4])}, "cold: 0 of 8 prompts"),
    ],
)
def test_evidence_that_must_be_there(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    (result,) = right_kv.check(Evidence.load(trial(tmp_path, "native-host", **change)))
    assert result.required
    assert result.seen.startswith(f"{COULD_NOT}: {why}")


def test_a_pass_shorter_than_asked_for(tmp_path: Path) -> None:
    folder = trial(
        tmp_path, "native-host", edit_trial=lambda data: data["config"]["right_kv"].update(prompts=PROMPTS + 8)
    )
    (result,) = right_kv.check(Evidence.load(folder))
    assert result.seen == f"{COULD_NOT}: cold: 8 of 16 prompts answered with log probabilities"


def test_one_prompt_eight_times_is_one_prompt(tmp_path: Path) -> None:
    def same(rows: Rows) -> None:
        for row in rows:
            row["key"] = "p0"

    (result,) = right_kv.check(Evidence.load(trial(tmp_path, "native-host", edit_requests=same)))
    assert result.seen == f"{COULD_NOT}: cold: 1 of 8 prompts answered with log probabilities"


@pytest.mark.parametrize(("off", "decision"), [(NOISE, "not-checked"), (0.4, "fail")])
def test_a_pass_of_which_most_was_computed_shows_only_what_is_wrong(tmp_path: Path, off: float, decision: str) -> None:
    """Seven prompts were evicted and computed: that they agree with computing says nothing about loading."""
    name, since = "vllm:prompt_tokens_by_source_total", "right-kv/first-hit/1:end"

    def edit(rows: Rows) -> None:
        shift(rows, "vllm:prompt_tokens_cached_by_source_total", -7 * 512, since=since, source="external_unspecified")
        shift(rows, name, -7 * 512, since=since, source="external_kv_transfer")
        shift(rows, name, 7 * 512, since=since, source="local_compute")

    control = Evidence.load(trial(tmp_path, "prefix-cache"))
    folder = trial(tmp_path, "mooncake-store", NOISY | {("first-hit", 3): off}, edit_counters=edit)
    evidence = Evidence.load(folder)
    assert right_kv.check(evidence) == []
    first, later = right_kv.check_block([control, evidence])[evidence.key]
    assert (first.decision, later.decision) == (decision, "pass")
    # The table says "not checked" and "right", or "wrong" and "right".
    beyond = [part.beyond for part in right_kv.deviations([control, evidence])[evidence.key]]
    assert beyond == [None if decision == "not-checked" else 1, 0]
    if decision == "not-checked":
        assert first.seen.startswith("512 of 4096 tokens were loaded, the rest computed; first hits: 0 of 8")


def test_hits_that_were_computed_are_no_evidence(tmp_path: Path) -> None:
    moved, since = PROMPTS * 512, "right-kv/first-hit/1:end"

    def edit(rows: Rows) -> None:
        shift(rows, "vllm:prompt_tokens_cached_by_source_total", -moved, since=since, source="host")
        shift(rows, "vllm:prompt_tokens_by_source_total", -moved, since=since, source="external_kv_transfer")
        shift(rows, "vllm:prompt_tokens_by_source_total", moved, since=since, source="local_compute")

    folder = trial(tmp_path, "native-host", edit_counters=edit)
    (result,) = right_kv.check(Evidence.load(folder))
    assert result.seen == f"{COULD_NOT}: first-hit: no hit in cpu, so nothing that was loaded"
    verdict = judge_trial(folder)
    assert verdict.status == "invalid"
    assert any(r.gate == "tier-was-used" and r.workload == "right-kv" and r.decision == "fail" for r in verdict.gates)


def test_a_hit_whose_tier_the_engine_does_not_name_is_one(tmp_path: Path) -> None:
    def edit(rows: Rows) -> None:
        name, since = "vllm:prompt_tokens_cached_by_source_total", "right-kv/first-hit/1:end"
        shift(rows, name, -PROMPTS * 512, since=since, source="host")

    evidence = Evidence.load(trial(tmp_path, "native-host", edit_counters=edit))
    (first,) = [window for item, window in evidence.passes("right-kv", "first-hit")]
    assert (first.by_source["cpu"], first.by_source["unknown"]) == (0, PROMPTS * 512)
    assert right_kv.check(evidence) == []


def test_gates_on_service_hold_for_right_kv_and_those_on_time_do_not(tmp_path: Path) -> None:
    def late(data: Any) -> None:
        for item in data["passes"]:
            if item["workload"] == "right-kv":
                item["loop_lag_max_ns"] = 10**10

    evidence = Evidence.load(trial(tmp_path, "native-host", edit_trial=late))
    assert evidence.workloads == ["repeat"]
    assert evidence.served == ["repeat", "right-kv"]
    assert [result.workload for result in client_not_saturated.check(evidence)] == ["repeat"]
    assert [(r.workload, r.decision) for r in cold_is_cold.check(evidence)] == [
        ("repeat", "pass"),
        ("right-kv", "pass"),
    ]


def written(root: Path, *folders: Path) -> Tables:
    """The tables of these trials, judged."""
    for folder, verdict in zip(folders, judged(*folders).values(), strict=True):
        (folder / "verdict.json").write_text(verdict.model_dump_json(by_alias=True), encoding="utf-8")
    return build(folders, root / "tables", baseline="plain")


def test_tables_keep_right_kv_apart(tmp_path: Path) -> None:
    wrong_once = everywhere("first-hit", 0.4) | everywhere("warm", NOISE)
    folders = [
        trial(tmp_path, "prefix-cache"),
        trial(tmp_path, "native-host", wrong_once),
        trial(tmp_path, "plain", {}),
    ]
    tables = written(tmp_path, *folders)
    for table in (tables.passes, tables.requests.collect(), tables.metrics, tables.summary):
        assert set(table["workload"]) == {"repeat"}
    columns = ("setup", "pass", "prompts", "beyond", "flipped", "equal_to_control", "verdict")
    rows = [tuple(row[column] for column in columns) for row in tables.right_kv.iter_rows(named=True)]
    assert rows == [
        ("native-host", "first-hit", 8, 8, 8, 0, "wrong"),
        ("native-host", "warm", 8, 0, 0, 8, "right"),
        ("prefix-cache", "first-hit", 8, 0, 0, 8, "right"),
        ("prefix-cache", "warm", 8, 0, 0, 8, "right"),
    ]


def test_report_says_where_it_is_wrong_and_where_nobody_knows(tmp_path: Path) -> None:
    wrong_once = everywhere("first-hit", 0.4) | everywhere("warm", NOISE)
    unmeasured = trial(tmp_path, "mooncake-store", edit_trial=lambda data: data["config"].pop("right_kv"))
    folders = [trial(tmp_path, "prefix-cache"), trial(tmp_path, "native-host", wrong_once), unmeasured]
    names = {name: {} for name in ("plain", "prefix-cache", "native-host", "mooncake-store")}
    shown = view(written(tmp_path, *folders, trial(tmp_path, "plain", {})), {"setups": names, "repeats": 1})["right_kv"]
    assert shown["sentence"] == (
        "Loaded KV is wrong in native-host (first hits only); right in prefix-cache; not checked in mooncake-store."
    )
    rows = {row["setup"].name: row for row in shown["rows"]}
    assert "plain" not in rows
    first, later = rows["native-host"]["groups"]
    assert (first["median"], first["largest"], first["beyond"], first["flipped"]) == (
        "0.400",
        "0.400",
        "8 of 8",
        "8 of 8",
    )
    assert (later["largest"], later["beyond"]) == ("0.030", "0 of 8")
    assert rows["native-host"]["limit"] == "0.090"
    assert rows["mooncake-store"]["why"] == "measured without a right-kv pass"


def test_raw_file_of_right_kv_is_watched(tmp_path: Path) -> None:
    folder = trial(tmp_path, "native-host")
    path = folder / "right-kv.requests.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("-3.0", "-3.5", 1), encoding="utf-8")
    verdict = judge_trial(folder)
    assert verdict.status == "invalid"
    assert verdict.reason is not None
    assert "right-kv.requests.jsonl" in verdict.reason


def test_timed_passes_are_those_of_workloads(tmp_path: Path) -> None:
    record = Evidence.load(trial(tmp_path, "native-host")).trial
    assert {item.workload for item in record.timed} == {"repeat"}
    assert all(isinstance(item, PassRecord) for item in record.timed)
    assert len(record.passes) == len(record.timed) + 3


# Deviation of two answers


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"1": -1.0, "2": -2.0}, {"1": -1.0, "2": -2.0}, 0.0),
        ({"1": -1.0, "2": -2.0}, {"1": -1.25, "2": -1.9}, 0.25),
        # A token that one list lacks is there at most as probable as that list's last: 2.5 - 2 at least.
        ({"1": -1.0, "2": -2.0}, {"1": -1.0, "3": -2.5}, 0.5),
        ({"1": -1.0, "2": -2.0}, {"3": -1.0, "4": -3.0}, 2.0),
    ],
)
def test_deviation(one: dict[str, float], other: dict[str, float], expected: float) -> None:
    assert deviation(one, other) == pytest.approx(expected)
    assert deviation(other, one) == pytest.approx(expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_has_no_deviation(value: float) -> None:
    with pytest.raises(ValueError, match="no finite number"):
        deviation({"1": -1.0}, {"1": value})


def test_greedy_token_of_a_tie_is_the_same_in_any_order() -> None:
    assert greedy({"2": -1.0, "1": -1.0, "3": -2.0}) == greedy({"1": -1.0, "3": -2.0, "2": -1.0}) == "1"
