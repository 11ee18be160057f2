"""A whole run of sweeps: cells through gates, tables, figures and report."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from .conftest import Project

WORKLOADS: dict[str, Any] = {
    "levels": {"kind": "concurrency", "levels": [1, 2, 4], "prompt_tokens": 300},
    "grid": {"kind": "grid", "batches": [1, 4], "lengths": [200, 400, 900], "warm_passes": 2},
    "generate": {"kind": "generate", "prompt_tokens": 300, "output_tokens": 32, "concurrency": 2, "requests": 4},
}


@pytest.mark.slow
def test_sweeps_reach_the_report(project: Project) -> None:
    project.config(repeats=1, workloads=WORKLOADS, suites={"main": list(WORKLOADS)})
    done = project.snakemake("--cores", "4")
    assert done.code == 0, done.text
    results = project.folder / "results" / "tiny"
    trials = pl.read_parquet(results / "tables" / "trials.parquet")
    assert trials.select("setup", "status", "reason").rows() == [
        ("native+cpu", "valid", None),
        ("plain", "valid", None),
        ("prefix-cache", "valid", None),
    ]
    summary = pl.read_parquet(results / "tables" / "summary.parquet")
    cells = summary.filter(pl.col("workload").str.starts_with("grid @"))
    assert set(cells.select("concurrency", "prompt_length").iter_rows()) == {
        (batch, length) for batch in (1, 4) for length in (200, 400, 900)
    }
    assert set(cells["pass"]) == {"cold", "first-hit", "warm"}
    tier = pl.read_parquet(results / "tables" / "break_even.parquet").filter(pl.col("setup") == "native+cpu")
    assert tier.select("pass", "longest", "blocks").rows() == [("first-hit", 900, 1), ("warm", 900, 1)]
    for name in ("grid", "concurrency", "break_even"):
        assert (results / "figures" / f"{name}.svg").is_file()
    report = (project.folder / "reports" / "tiny.html").read_text(encoding="utf-8")
    assert "Break-even: loading against computing" in report and "Batch size × prompt length" in report
    assert "Decoding: generate" in report
    assert "This figure was not drawn" not in report
