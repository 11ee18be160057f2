"""The truth bench as a workflow: it runs, and only what is stale runs again."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from kvladder.provenance.publish import derived_sums

from .conftest import Done, Project, clone

# Every cell starts a server and a client: minutes on a small machine.
pytestmark = pytest.mark.slow

BENCH: dict[str, Any] = {
    "experiment": "tiny-truth",
    "blocks": [
        {"clients": ["kvladder"], "prompt_tokens": [50], "concurrency": [2], "steady_requests": 10, "ttft_ms": 5},
        {
            "clients": ["kvladder"],
            "concurrency": [2],
            "steady_requests": 2,
            "faults": ["error-200"],
            "output_tokens": 4,
        },
    ],
}
PAGES = {"write_bench_report": 1}
FIGURES = {"draw_bench_figure": 3} | PAGES
TABLES = {"bench_tables": 1} | FIGURES


def run(project: Project, *arguments: str, **changes: Any) -> Done:
    (project.folder / "bench.yaml").write_text(yaml.safe_dump(copy.deepcopy(BENCH) | changes), encoding="utf-8")
    return project.snakemake("-s", "workflow/bench.smk", "--configfile", "bench.yaml", *arguments)


def again(project: Project, **changes: Any) -> dict[str, int]:
    """Jobs of a dry run, less the target."""
    done = run(project, "-n", **changes)
    assert done.code == 0, done.text
    return {rule: count for rule, count in done.jobs().items() if rule != "cells"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A clone whose bench has run."""
    project = clone(tmp_path_factory.mktemp("bench") / "clone")
    done = run(project)
    assert done.code == 0, done.text
    assert done.jobs() == {"build_server": 1, "measure_client": 2} | TABLES
    yield project


@pytest.fixture
def bench(measured: Project, tmp_path: Path) -> Project:
    """A copy of it that a test may change."""
    return measured.copy(tmp_path / "copy")


def test_tables_of_a_run(measured: Project) -> None:
    tables = measured.folder / "results" / "tiny-truth" / "tables"
    cells = pl.read_parquet(tables / "cells.parquet")
    assert cells.select("kind", "client", "served", "paired", "client_ok", "client_failed").rows() == [
        ("schedule", "kvladder", 12, 12, 12, 0),
        ("error-200", "kvladder", 4, 4, 0, 4),
    ]
    assert "| error-200 | kvladder " in (tables / "summary.md").read_text(encoding="utf-8")


def test_the_report_of_a_run(measured: Project) -> None:
    page = (measured.folder / "reports" / "tiny-truth.html").read_text(encoding="utf-8")
    assert "Prompts of 50 ids" in page and "sends an error object after HTTP 200" in page
    assert (measured.folder / "reports" / "tiny-truth.pdf").read_bytes().startswith(b"%PDF")


def test_published_cells_give_the_same_tables_and_figures(bench: Project) -> None:
    results, published = bench.folder / "results", bench.folder / "results" / "published" / "tiny"
    first = derived_sums(results / "tiny-truth")
    assert len(first) == 3 + 2 * 3
    assert publish(bench, "pack", "bench.yaml", "tiny").returncode == 0
    shutil.rmtree(results / "tiny-truth")
    sums = "".join(f"{value}  {name}\n" for name, value in first.items())
    (published / "derived.sha256").write_text(sums, encoding="utf-8")
    done = publish(bench, "rebuild", "tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (results / "tiny-truth").exists()
    assert not list((results / "published-tiny").glob("**/client.log"))
    page = bench.folder / "reports" / "published" / "tiny.html"
    assert "Prompts of 50 ids" in page.read_text(encoding="utf-8")
    # A cell that the archive lacks is an error: nothing is measured for it.
    shutil.rmtree(results / "published-tiny")
    text = (published / "experiment.yaml").read_text(encoding="utf-8")
    (published / "experiment.yaml").write_text(text.replace("ttft_ms: 5", "ttft_ms: 6"), encoding="utf-8")
    lacking = publish(bench, "rebuild", "tiny")
    assert lacking.returncode != 0
    assert "Missing input files for rule bench_tables" in lacking.stdout + lacking.stderr


def publish(project: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvladder.provenance.publish", *arguments],
        cwd=project.folder,
        env=project.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_nothing_to_be_done(bench: Project) -> None:
    assert "Nothing to be done" in run(bench, "-n").text


def test_goals_measure_nothing(bench: Project) -> None:
    assert again(bench, goals={"gap_p99_ms": 7}) == TABLES


def test_another_point_measures_itself(bench: Project) -> None:
    blocks = copy.deepcopy(BENCH["blocks"])
    blocks[0]["concurrency"] = [2, 3]
    assert again(bench, blocks=blocks) == {"measure_client": 1} | TABLES
    blocks[0]["concurrency"] = [2]
    blocks[1]["ttft_ms"] = 9
    assert again(bench, blocks=blocks) == {"measure_client": 1} | TABLES


def test_another_repeat_measures_itself(bench: Project) -> None:
    assert again(bench, repeats=2) == {"measure_client": 2} | TABLES


@pytest.mark.parametrize(
    ("name", "jobs"),
    [
        ("load/connection.py", {"measure_client": 2} | TABLES),
        ("bench/cell.py", {"measure_client": 2} | TABLES),
        ("bench/tables.py", TABLES),
        ("bench/figures/cost.py", FIGURES),
        ("bench/report.py", PAGES),
        ("bench/clients/aiperf.py", {}),
    ],
)
def test_code_that_changed(bench: Project, name: str, jobs: dict[str, int]) -> None:
    bench.append(f"workflow/kvladder/{name}", "\nCHANGED = True\n")
    assert again(bench) == jobs


def test_another_server_is_built_and_measures_all(bench: Project) -> None:
    bench.append("workflow/kvladder/bench/server.c", "\n/* changed */\n")
    assert again(bench) == {"build_server": 1, "measure_client": 2} | TABLES


def test_a_comment_in_python_measures_nothing(bench: Project) -> None:
    bench.append("workflow/kvladder/load/connection.py", "\n# a comment\n")
    assert "measure_client" not in again(bench)


def test_a_config_that_can_not_be_used_starts_nothing(bench: Project) -> None:
    done = run(bench, "-n", blocks=[{"clients": ["curl"], "concurrency": [1]}])
    assert done.code == 1
    assert "kvladder: blocks.0.clients.0: Input should be 'kvladder', 'vllm', 'aiperf' or 'guidellm'" in done.text
    assert "Traceback" not in done.text
