"""Runs that break off: killed jobs, a killed workflow, set-ups that don't come up, no time left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import CONFIG, Project

SLOW = {"KVLADDER_STUB_US_PER_TOKEN": "30000"}
"""513 tokens take a quarter of a minute: the test gets in between."""


@pytest.fixture
def slow(project: Project) -> Project:
    """One quick setup, whose trials come first or second, and a slow one."""
    project.config(
        repeats=1,
        start="folded",
        setups={"plain": {"kind": "plain"}, "slow": {"kind": "plain", "env": SLOW}},
        # Otherwise the slow one ends by itself within seconds, on a busy machine before the test has acted.
        load=CONFIG["load"] | {"request_s": 300, "stall_s": 300},
    )
    return project


def wait_for(what: Callable[[], Any], seconds: float = 60) -> Any:
    """Poll until it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError("it never came true")


@contextlib.contextmanager
def running(project: Project, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """snakemake in the background, in a session of its own."""
    with (project.folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            project.command(*arguments),
            cwd=project.folder,
            env=project.environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def in_cold_pass(project: Project) -> psutil.Process | None:
    """The job of the slow trial, once its servers are up and warm-up or cold pass is under way."""
    log = next(iter((project.folder / "logs/measure_trial/tiny/slow").rglob("*.log")), None)
    if log is None or "ready after" not in log.read_text(encoding="utf-8"):
        return None
    jobs = [p for p in project.processes() if "measure_trial.py" in " ".join(p.cmdline()) and "bash" not in p.name()]
    return next((job for job in jobs if "/slow/" in " ".join(job.cmdline())), None)


def test_a_killed_job_leaves_no_result(slow: Project) -> None:
    # C13: --keep-incomplete makes a finished output of whatever lies there.
    with running(slow, "measure", "--cores", "2", "--keep-incomplete") as process:
        job = wait_for(lambda: in_cold_pass(slow))
        job.send_signal(signal.SIGKILL)
        assert process.wait(60) != 0
    wait_for(lambda: not slow.processes(), 15)
    trials = slow.trials()
    assert not any(name.startswith("slow/") for name in trials)
    quick = slow.folder / "results/tiny/trials" / next(iter(trials)) / "trial.json"
    before = quick.stat().st_mtime_ns
    assert slow.plan("measure")["measure_trial"] == 1
    assert quick.stat().st_mtime_ns == before


def test_a_half_written_record_is_never_valid(finished: Project) -> None:
    name = next(iter(finished.trials()))
    path = finished.folder / "results/tiny/trials" / name / "trial.json"
    path.write_text(path.read_text(encoding="utf-8")[:500], encoding="utf-8")
    done = finished.snakemake("judge", "--cores", "2")
    assert done.code == 0, done.text
    verdict = json.loads(path.with_name("verdict.json").read_text(encoding="utf-8"))
    assert verdict["status"] == "failed"
    assert verdict["reason"]


def test_a_killed_workflow(slow: Project) -> None:
    with running(slow, "measure", "--cores", "2") as process:
        wait_for(lambda: in_cold_pass(slow))
        second = slow.snakemake("measure", "--cores", "2")
        assert second.code != 0
        assert "lock" in second.text
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for(lambda: not slow.processes(), 20)
    finished = slow.trials()
    assert not any(name.startswith("slow/") for name in finished)
    assert slow.snakemake("--unlock").code == 0
    expected = 2 - len(finished)
    assert slow.plan("measure", "--rerun-incomplete")["measure_trial"] == expected


def test_interrupted_by_hand(slow: Project) -> None:
    with running(slow, "measure", "--cores", "2") as process:
        wait_for(lambda: in_cold_pass(slow))
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
        process.wait(60)
    wait_for(lambda: not slow.processes(), 15)
    assert not any(name.startswith("slow/") for name in slow.trials())


def test_a_setup_that_does_not_come_up(project: Project) -> None:
    broken = {"kind": "plain", "env": {"KVLADDER_STUB_FAULT": "crash-at-start"}}
    project.config(setups={"plain": {"kind": "plain"}, "broken": broken}, repeats=1)
    done = project.snakemake("judge", "--cores", "2")
    assert done.code == 0, "a crash of the engine is a result"
    records = {trial["setup"]: trial for trial in project.trials().values()}
    assert records["plain"]["status"] == "completed"
    assert records["broken"]["status"] == "failed"
    assert "did not come up" in records["broken"]["reason"]
    assert "asked to crash at start" in records["broken"]["reason"], "the engine's own words"
    assert not records["broken"]["servers"], "it wasn't started again"
    assert "Nothing to be done" in project.snakemake("-n", "judge").text
    assert project.snakemake("forget_failed", "--cores", "1").code == 0
    jobs = project.plan("judge")
    assert (jobs["measure_trial"], jobs["start_setup"]) == (1, 1)


GOOD = {"kind": "plain"}
BROKEN = {"kind": "plain", "env": {"KVLADDER_STUB_FAULT": "crash-at-start"}}


def statuses(project: Project, setup: dict[str, Any], **changes: Any) -> list[str]:
    """Measure one setup called plain; how all of its trials of this configuration and of older ones ended."""
    project.config(setups={"plain": setup}, **changes)
    done = project.snakemake("measure", "--cores", "2")
    assert done.code == 0, done.text
    return sorted(trial["status"] for trial in project.trials().values())


def test_a_bring_up_of_another_configuration_condemns_nothing(project: Project) -> None:
    assert statuses(project, GOOD, repeats=1) == ["completed"]
    assert statuses(project, BROKEN, repeats=1) == ["completed", "failed"]
    assert statuses(project, GOOD, repeats=2) == ["completed", "completed", "failed"], "the failed start is the latest"


def test_a_failed_bring_up_says_nothing_where_none_is_waited_for(project: Project) -> None:
    assert statuses(project, BROKEN, repeats=1) == ["failed"]
    assert statuses(project, GOOD, repeats=1, start="folded") == ["completed", "failed"]
    # The same setup whose bring-up failed: folded, its first trial is the bring-up, and tries.
    trials = project.trials()
    statuses(project, BROKEN, repeats=2, start="folded")
    new = [trial for name, trial in project.trials().items() if name not in trials]
    assert new
    assert not any("did not come up when it was started before" in trial["reason"] for trial in new)


def test_no_time_left_before_the_first_trial(project: Project) -> None:
    done = project.snakemake("judge", "--cores", "2", "--config", "repeats=1", KVLADDER_BUDGET_S="0.5")
    assert done.code == 0, done.text
    assert "not started: " in done.text
    assert "3 trials were not started for lack of time" in done.text
    assert not project.trials(), "no result of a trial that wasn't run"
    jobs = project.plan("judge", "--config", "repeats=1")
    assert jobs["measure_trial"] == 3
    assert "start_setup" not in jobs


def test_what_does_not_fit_is_left_out(finished: Project) -> None:
    before = finished.trials()
    finished.config(repeats=40)
    seconds = [(trial["end_ns"] - trial["start_ns"]) / 1e9 for trial in before.values()]
    done = finished.snakemake("-n", KVLADDER_BUDGET_S=str(6 * max(seconds)))
    count = done.jobs()["measure_trial"]
    assert 6 <= count < 60
    assert f"{114 - count} left out: they don't fit into the time budget" in done.text
    finished.config(repeats=40, budget_s=2 * max(seconds))
    assert 2 <= finished.plan()["measure_trial"] < count


def test_a_budget_of_nothing_reports_what_is_there(finished: Project) -> None:
    finished.config(repeats=3)
    jobs = finished.plan(KVLADDER_BUDGET_S="0")
    assert "measure_trial" not in jobs
    assert not jobs.keys() & {"start_setup", "judge_trial"}


def test_settings_of_the_experiment_stay_out_of_other_runs(finished: Project) -> None:
    finished.config(budget_s=1e6, host_slots=1)
    assert "measure_trial" not in finished.plan()
    assert CONFIG["repeats"] == 2


def test_more_than_one_trial_at_once_where_the_config_says_so(project: Project) -> None:
    slots = {f"plain-{k}": {"kind": "plain", "env": {"KVLADDER_STUB_START_S": "2"}} for k in range(2)}
    project.config(repeats=1, start="folded", host_slots=2, setups=slots, baseline="plain-0")
    done = project.snakemake("measure", "--cores", "2")
    assert done.code == 0, done.text
    first, second = sorted(project.trials().values(), key=lambda trial: trial["start_ns"])
    assert second["start_ns"] < first["end_ns"]
    assert Path(project.folder / "results/tiny/experiment.json").is_file()
