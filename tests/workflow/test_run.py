"""The tiny experiment from nothing to its report, on the stand-in engine."""

from __future__ import annotations

import itertools
import json
import re

from .conftest import Done, Project


def test_every_trial_is_measured_and_valid(whole_run: tuple[Project, Done]) -> None:
    project, done = whole_run
    jobs = done.jobs()
    assert jobs["measure_trial"] == 6
    assert jobs["start_setup"] == 3
    trials = project.trials()
    assert len(trials) == 6
    assert {trial["status"] for trial in trials.values()} == {"completed"}
    verdicts = [
        json.loads((project.folder / "results/tiny/trials" / name / "verdict.json").read_text(encoding="utf-8"))
        for name in trials
    ]
    assert {verdict["status"] for verdict in verdicts} == {"valid"}, [verdict["reason"] for verdict in verdicts]


def test_outputs_are_there(whole_run: tuple[Project, Done]) -> None:
    folder = whole_run[0].folder
    for name in ("reports/tiny.html", "reports/tiny.pdf", "results/tiny/summary.md", "results/tiny/tables/summary.csv"):
        assert (folder / name).stat().st_size > 0, name
    assert list((folder / "results/tiny/figures").glob("*.svg"))
    effective = json.loads((folder / "results/tiny/experiment.json").read_text(encoding="utf-8"))
    assert effective["engine"]["max_num_seqs"] == 64, "defaults are filled in"


def test_trials_follow_the_plan_one_after_the_other(whole_run: tuple[Project, Done]) -> None:
    # With --cores 8: neither cores nor another job may let two servers run at once.
    trials = sorted(whole_run[0].trials().values(), key=lambda trial: trial["start_ns"])
    assert [trial["order"] for trial in trials] == list(range(6))
    assert all(before["end_ns"] <= after["start_ns"] for before, after in itertools.pairwise(trials))


def test_bring_ups_come_first(whole_run: tuple[Project, Done]) -> None:
    text = whole_run[1].text
    jobs = re.findall(r"^Job \d+: (start|measure) ", text, re.MULTILINE)
    assert jobs == ["start"] * 3 + ["measure"] * 6, "a setup that can't start is known first"


def test_no_resources_on_the_command_line_lifts_the_cap(project: Project) -> None:
    # A command line's --resources replaces the profile's whole map.
    done = project.snakemake("measure", "--cores", "8", "--resources", "mem_mb=1000", "--config", "repeats=1")
    assert done.code == 0, done.text
    trials = sorted(project.trials().values(), key=lambda trial: trial["start_ns"])
    assert len(trials) == 3
    assert all(before["end_ns"] <= after["start_ns"] for before, after in itertools.pairwise(trials))


def test_parts_by_target(finished: Project) -> None:
    finished.config(repeats=3)
    for target, expected in {
        "setup_plain": {"measure_trial": 1},
        "setup_native+cpu": {"measure_trial": 1},
        "suite_repeat": {"measure_trial": 3},
        "measure": {"measure_trial": 3},
        "start": {},
        "env": {},
        "model": {},
    }.items():
        jobs = finished.plan(target)
        assert {rule: count for rule, count in jobs.items() if rule in ("measure_trial", "start_setup")} == expected
    assert "build_tables" not in finished.plan("judge")
    assert "draw_figure" not in finished.plan("tables")
    assert "write_report" not in finished.plan("figures")
    assert finished.plan("doctor").keys() >= {"doctor"}


def test_dry_run_lists_every_trial_and_estimates(finished: Project, project: Project) -> None:
    first = project.snakemake("-n")
    assert first.jobs()["measure_trial"] == 6
    assert "6 to measure (no times on record yet, so no estimate)" in first.text
    finished.config(repeats=4)
    later = finished.snakemake("-n")
    assert later.jobs()["measure_trial"] == 6
    assert "12 trials: 6 done, 6 to measure (about " in later.text
    assert not (project.folder / "results").exists(), "a dry run writes nothing"


def test_snakemake_report_shows_the_figures(finished: Project) -> None:
    done = finished.snakemake("--report", "report.html")
    assert done.code == 0, done.text
    html = (finished.folder / "report.html").read_text(encoding="utf-8")
    assert "Time to first token" in html


def test_rooflines_by_name(whole_run: tuple[Project, Done], finished: Project) -> None:
    assert "measure_rooflines" not in whole_run[1].jobs(), "a stand-in has no links"
    done = finished.snakemake("probe", "--cores", "2")
    assert done.code == 0, done.text
    assert set(done.jobs()) <= {"measure_rooflines", "probe"}
    (path,) = (finished.folder / "results/tiny/rooflines").glob("*.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {"host_memcpy", "tcp_loopback", "disk_read_direct"} & {link["link"] for link in found["links"]}
    hosts = {trial["host"]["host_id"] for trial in finished.trials().values()}
    assert hosts == {found["host"]["host_id"]} == {path.stem}
    # They are evidence from then on: trials are judged again, nothing is measured again.
    jobs = finished.plan()
    assert jobs["judge_trial"] == 6
    assert not jobs.keys() & {"measure_trial", "start_setup", "measure_rooflines"}
    done = finished.snakemake("judge", "--cores", "2")
    assert done.code == 0, done.text
    verdicts = [json.loads(path.read_text(encoding="utf-8")) for path in finished.folder.rglob("verdict.json")]
    seen = {
        gate["seen"]
        for verdict in verdicts
        for gate in verdict["gates"]
        if gate["gate"] == "below-the-limit" and verdict["setup"] == "native+cpu"
    }
    # A machine that is busy with other tests has rooflines that decide nothing; but they were found.
    assert seen
    assert all("of host_memcpy" in text for text in seen), seen
    assert "Nothing to be done" in finished.snakemake("-n", "judge").text


def test_rooflines_come_with_the_trials_that_are_measured(project: Project, finished: Project) -> None:
    for clone in (project, finished):
        clone.edit("stacks/stub/stack.yaml", "device: none", "device: cpu")
    assert project.plan()["measure_rooflines"] == 1
    assert project.plan("measure")["measure_rooflines"] == 1
    # Where nothing may be measured, they aren't either: an archive is judged on another machine.
    assert "measure_rooflines" not in project.plan(KVLADDER_BUDGET_S="0")
    assert "measure_rooflines" not in finished.plan("judge")
