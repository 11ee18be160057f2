"""Estimates from recorded times: what is left, what fits, what nobody knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvladder.config.experiment import Trial
from kvladder.plan.estimate import budget, duration, failed_records, outlook, select

PLAN = [
    Trial(setup, "main", repeat, "0" * 8, 2 * repeat + place)
    for repeat in range(2)
    for place, setup in enumerate(["plain", "native"])
]


def finish(folder: Path, trial: Trial, seconds: float, status: str = "completed") -> None:
    path = folder / trial.folder / "trial.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"status": status, "start_ns": 0, "end_ns": int(seconds * 1e9)}), encoding="utf-8")


def test_nothing_on_record_is_said_and_not_guessed(tmp_path: Path) -> None:
    assert outlook(PLAN, tmp_path) == "trial 1 of 4, no times on record yet"
    chosen = select(PLAN, tmp_path, started=["plain", "native"], budget_s=None)
    assert chosen.describe(1) == "4 trials: 0 done, 4 to measure (no times on record yet, so no estimate)"


def test_the_longest_time_on_record_counts_and_an_unknown_setup_takes_the_longest_of_all(tmp_path: Path) -> None:
    finish(tmp_path, PLAN[0], 60)
    assert outlook(PLAN, tmp_path) == "trial 2 of 4, about 3 min left to measure"
    finish(tmp_path, PLAN[1], 30)
    chosen = select(PLAN, tmp_path, started=["plain", "native"], budget_s=None)
    assert chosen.seconds == pytest.approx(90)
    assert chosen.describe(1) == "4 trials: 2 done, 2 to measure (about 2 min, 2 GPU minutes)"


def test_a_failed_trial_is_done_but_says_nothing_about_time(tmp_path: Path) -> None:
    finish(tmp_path, PLAN[0], 1, status="failed")
    assert outlook(PLAN, tmp_path) == "trial 2 of 4, no times on record yet"
    assert failed_records(tmp_path) == [tmp_path / PLAN[0].folder / "trial.json"]


def test_a_budget_cuts_the_list_in_order(tmp_path: Path) -> None:
    finish(tmp_path, PLAN[0], 60)
    chosen = select(PLAN, tmp_path, started=["plain", "native"], budget_s=130)
    assert [len(chosen.done), len(chosen.todo), len(chosen.left_out)] == [1, 2, 1]
    assert not select(PLAN, tmp_path, started=["plain"], budget_s=0).todo


@pytest.mark.parametrize(
    ("environment", "expected"), [({}, 7.0), ({"KVLADDER_BUDGET_S": "0"}, 0.0), ({"KVLADDER_BUDGET_S": " "}, 7.0)]
)
def test_the_environment_wins_over_the_config(environment: dict[str, str], expected: float) -> None:
    assert budget(7.0, environment) == expected


@pytest.mark.parametrize("text", ["soon", "nan", "-5"])
def test_a_budget_that_is_no_number_names_the_variable(text: str) -> None:
    with pytest.raises(ValueError, match=f"KVLADDER_BUDGET_S: expected a number of seconds, got '{text}'"):
        budget(None, {"KVLADDER_BUDGET_S": text})


def test_a_record_that_cannot_be_read_counts_as_failed(tmp_path: Path) -> None:
    finish(tmp_path, PLAN[0], 1)
    finish(tmp_path, PLAN[1], 1)
    cut = tmp_path / PLAN[0].folder / "trial.json"
    cut.write_text(cut.read_text(encoding="utf-8")[:20], encoding="utf-8")
    assert failed_records(tmp_path) == [cut]


@pytest.mark.parametrize(("seconds", "text"), [(45, "45 s"), (720, "12 min"), (11520, "3.2 h")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
