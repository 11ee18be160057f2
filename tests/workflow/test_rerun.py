"""What runs again after a change, and what doesn't: DESIGN's rerun semantics."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path

import pytest

from .conftest import CONFIG, Project

MEASURING = ("measure_trial", "start_setup")


def measuring(jobs: dict[str, int]) -> dict[str, int]:
    """Only the jobs that start servers."""
    return {rule: count for rule, count in jobs.items() if rule in MEASURING}


def test_nothing_to_be_done(finished: Project) -> None:
    done = finished.snakemake("-n")
    assert "Nothing to be done" in done.text


def test_one_setup_changed(finished: Project) -> None:
    data = copy.deepcopy(CONFIG["setups"])
    data["native+cpu"]["cpu_bytes"] = "3MiB"
    finished.config(setups=data)
    before = finished.trials()
    done = finished.snakemake("-n")
    assert measuring(done.jobs()) == {"measure_trial": 2, "start_setup": 1}
    assert "measure plain" not in done.text
    assert "measure prefix-cache" not in done.text
    assert finished.trials() == before, "finished trials of the old configuration stay"


def test_one_more_repeat(finished: Project) -> None:
    finished.config(repeats=3)
    done = finished.snakemake("-n")
    assert measuring(done.jobs()) == {"measure_trial": 3}
    assert "repeat 0 (run" not in done.text
    assert "repeat 1 (run" not in done.text


def test_one_more_setup(finished: Project) -> None:
    finished.config(setups={**CONFIG["setups"], "plain-2": {"kind": "plain"}})
    done = finished.snakemake("-n")
    assert measuring(done.jobs()) == {"measure_trial": 2, "start_setup": 1}


def test_experiment_wide_settings(finished: Project) -> None:
    finished.config(engine={**CONFIG["engine"], "max_num_seqs": 8})
    assert measuring(finished.plan()) == {"measure_trial": 6, "start_setup": 3}
    finished.config(title="Another heading")
    assert not measuring(finished.plan())


def test_gate_settings_and_code(finished: Project) -> None:
    finished.config(gates={"advisory": ["drained"]})
    jobs = finished.plan()
    assert jobs["judge_trial"] == 6
    assert not measuring(jobs)
    finished.config()
    assert not measuring(finished.plan())
    finished.append("workflow/kvladder/gates/drained.py", "\nX = 1\n")
    jobs = finished.plan()
    assert jobs["judge_trial"] == 6
    assert not measuring(jobs)


def test_judging_code(finished: Project) -> None:
    finished.append("workflow/kvladder/judge.py", "\nX = 1\n")
    jobs = finished.plan("judge")
    assert (jobs["judge_trial"], jobs["judge_block"], jobs["settle_verdict"]) == (6, 2, 6)
    assert not measuring(jobs)
    finished.append("workflow/rules/judge.smk", "\n")
    finished.edit("workflow/rules/judge.smk", 'code_of("judge.py", "gates",', 'code_of("judgement.py", "gates",')
    done = finished.snakemake("-n")
    assert done.code != 0
    assert "judgement.py is no file" in done.text, "a dependency that isn't there isn't passed over"


def test_a_gate_that_is_gone(finished: Project) -> None:
    """Nothing is newer than the verdicts, but they aren't what this code says."""
    (finished.folder / "workflow/kvladder/gates/no_preemption_surprise.py").unlink()
    jobs = finished.plan()
    assert (jobs["judge_trial"], jobs["judge_block"]) == (6, 2)
    assert not measuring(jobs)


def test_figure_and_report_code(finished: Project) -> None:
    finished.append("workflow/kvladder/figures/ttft.py", "\nX = 1\n")
    jobs = finished.plan()
    assert jobs["draw_figure"] >= 1
    assert not jobs.keys() & {*MEASURING, "judge_trial", "build_tables"}


def test_report_code_alone(finished: Project) -> None:
    finished.append("workflow/kvladder/report/build.py", "\nX = 1\n")
    assert finished.plan() == {"write_report": 1}


def test_table_code(finished: Project) -> None:
    finished.append("workflow/kvladder/stats/samples.py", "\nX = 1\n")
    jobs = finished.plan()
    assert "build_tables" in jobs
    assert not jobs.keys() & {*MEASURING, "judge_trial"}


@pytest.mark.parametrize(
    "module",
    [
        "trial/runner.py",
        "load/client.py",
        "serving/process.py",
        "workloads/repeat.py",
        "workloads/base.py",
        "setups/base.py",
        "counters/scrape.py",
        "counters/drain.py",
        "config/traffic.py",
        "config/records.py",
        "counters/reading.py",
        "probes/sampler.py",
    ],
)
def test_measuring_code(finished: Project, module: str) -> None:
    finished.append(f"workflow/kvladder/{module}", "\nX = 1\n")
    assert finished.plan("measure")["measure_trial"] == 6


def test_code_of_one_setup(finished: Project) -> None:
    finished.append("workflow/kvladder/setups/native.py", "\nX = 1\n")
    done = finished.snakemake("-n", "measure")
    assert measuring(done.jobs()) == {"measure_trial": 2, "start_setup": 1}
    assert "measure plain" not in done.text


def test_a_new_kind_of_setup_measures_nothing_again(finished: Project) -> None:
    (finished.folder / "workflow/kvladder/setups/fancy.py").write_text('"""New."""\n', encoding="utf-8")
    assert not measuring(finished.plan())


def test_comments_docstrings_and_compiled_files(finished: Project) -> None:
    library = finished.folder / "workflow/kvladder"
    finished.edit("workflow/kvladder/trial/runner.py", '"""', '"""Other words. ')
    finished.append("workflow/kvladder/load/client.py", "\n\n# A comment.\n")
    (library / "trial/__pycache__").mkdir(exist_ok=True)
    (library / "trial/__pycache__/runner.cpython-311.pyc").write_bytes(b"x")
    assert not measuring(finished.plan("measure"))


def test_stack_changed(finished: Project) -> None:
    (finished.folder / "stacks/stub/requirements.lock").write_text("engine==2\n", encoding="utf-8")
    jobs = finished.plan()
    assert jobs["install_stack"] == 1
    assert measuring(jobs) == {"measure_trial": 6, "start_setup": 3}


def test_patch_changed(finished: Project) -> None:
    finished.append("stacks/stub/stack.yaml", "patches: {engine: kvladder-stub-engine}\n")
    patch = finished.folder / "stacks/stub/patches/engine/0.32.0+stub/01-first.patch"
    patch.parent.mkdir(parents=True)
    patch.write_text("--- a/x\n+++ b/x\n", encoding="utf-8")
    assert measuring(finished.plan()) == {"measure_trial": 6, "start_setup": 3}


def test_equal_stack_made_again(finished: Project) -> None:
    shutil.rmtree(finished.folder / "stacks/stub/.venv")
    assert "Nothing to be done" in finished.snakemake("-n").text
    assert finished.snakemake("env").code == 0
    assert (finished.folder / "stacks/stub/.venv/kvladder-stamp.json").is_file()
    assert not measuring(finished.plan())


def test_archived_results_are_plain_inputs(finished: Project, project: Project) -> None:
    """Raw results from elsewhere, as a checkout gives them: no metadata, all file times equal or in any order."""
    for name in ("trials", "start"):
        source = finished.folder / "results/tiny" / name
        shutil.copytree(source, project.folder / "results/tiny" / name, ignore=shutil.ignore_patterns("*verdict.json"))
    for time in (1_000_000_000, 2_000_000_000):
        for path in (project.folder / "results").rglob("*"):
            os.utime(path, (time, time))
        jobs = project.plan()
        assert not measuring(jobs)
        assert jobs["judge_trial"] == 6
        assert jobs["write_report"] == 1


def test_the_whole_folder_moved(finished: Project, tmp_path: Path) -> None:
    moved = Project(tmp_path / "moved")
    finished.folder.rename(moved.folder)
    assert not measuring(moved.plan())
