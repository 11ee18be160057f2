"""The right-kv passes in a whole run: after everything timed, on record, and in no table of times."""

from __future__ import annotations

import csv
import json

from .conftest import Done, Project


def test_every_trial_with_a_tier_ends_with_them(whole_run: tuple[Project, Done]) -> None:
    project = whole_run[0]
    for name, trial in project.trials().items():
        if trial["setup"] == "plain":
            assert {item["workload"] for item in trial["passes"]} == {"repeat"}
            continue
        assert [item["name"] for item in trial["passes"][-3:]] == ["cold", "first-hit", "warm"]
        assert {item["workload"] for item in trial["passes"][:-3]} == {"repeat"}
        assert trial["config"]["right_kv"]["prompt_tokens"] == 521
        assert trial["marks"]["measured"] <= trial["passes"][-3]["start_ns"] < trial["marks"]["checked"]
        path = project.folder / "results/tiny/trials" / name / "right-kv.requests.jsonl"
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert len(records) == 24
        assert all(len(record["logprobs"][0]) == 20 for record in records)


def test_dummy_weights_are_said_to_be_no_evidence(whole_run: tuple[Project, Done]) -> None:
    folder = whole_run[0].folder / "results/tiny"
    seen = {}
    for path in folder.glob("trials/*/*/*/verdict.json"):
        verdict = json.loads(path.read_text(encoding="utf-8"))
        (result,) = [gate for gate in verdict["gates"] if gate["gate"] == "right-kv"]
        seen[verdict["setup"]] = (result["decision"], result["seen"].partition(":")[0])
    dummy = ("not-checked", "dummy weights are no evidence")
    assert seen == {"plain": ("not-checked", "this setup has no tier"), "prefix-cache": dummy, "native+cpu": dummy}


def test_times_of_them_are_no_result(whole_run: tuple[Project, Done]) -> None:
    with (whole_run[0].folder / "results/tiny/tables/passes.csv").open(encoding="utf-8") as file:
        assert {row["workload"] for row in csv.DictReader(file)} == {"repeat"}
