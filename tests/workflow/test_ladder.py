"""A whole run of conversations over tiers that hold more and more."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from .conftest import Project

POOL: dict[str, Any] = {
    "kind": "conversation-pool",
    "turns": 4,
    "first_tokens": 256,
    "next_tokens": 128,
    "concurrency": 2,
    "max_requests": 240,
    "order": "fifo",
    "staggered": True,
}
WORKLOADS = {
    "in-gpu": {**POOL, "pool": {"gpu": 0.5}},
    "in-cpu": {**POOL, "pool": {"gpu": 1.5}},
    "in-none": {**POOL, "pool": {"cpu": 1.8}},
}
SETUPS: dict[str, Any] = {
    "plain": {"kind": "plain"},
    "prefix-cache": {"kind": "prefix-cache"},
    "gpu-cpu": {"kind": "native", "prefix_caching": True, "cpu_bytes": {"gpu": 2.0}},
    "lmcache-files": {
        "kind": "lmcache-mp",
        "prefix_caching": True,
        "cpu_bytes": {"gpu": 2.0},
        "chunk_tokens": 128,
        "files": {"first_hit": "host"},
    },
}


@pytest.fixture
def ladder(project: Project) -> Project:
    """The tiny experiment with a ladder."""
    project.config(repeats=1, setups=SETUPS, workloads=WORKLOADS, suites={"ladder": list(WORKLOADS)})
    return project


def test_a_dry_run_lists_every_trial_before_any_capacity_is_known(ladder: Project) -> None:
    assert ladder.plan()["measure_trial"] == 4


@pytest.mark.slow
def test_a_ladder_reaches_the_tables(ladder: Project) -> None:
    done = ladder.snakemake("--cores", "4", timeout=600)
    assert done.code == 0, done.text
    tables = ladder.folder / "results" / "tiny" / "tables"
    trials = pl.read_parquet(tables / "trials.parquet")
    assert trials.select("setup", "status", "reason").rows() == [
        (setup, "valid", None) for setup in ("gpu-cpu", "lmcache-files", "plain", "prefix-cache")
    ]
    # 8,192 tokens in the device pool, twice that in host memory, 643 a conversation: the numbers are resolved.
    for record in ladder.trials().values():
        assert [part["pool"] for part in record["passes"][:3]] == [
            {"size": size, "tokens": 643, "order": "fifo"} for size in (6, 19, 46)
        ]
    sizes = {record["setup"]: record["config"]["setup"].get("cpu_bytes") for record in ladder.trials().values()}
    assert sizes == {"plain": None, "prefix-cache": None, "gpu-cpu": 4 << 20, "lmcache-files": 4 << 20}
    rungs = pl.read_parquet(tables / "ladder.parquet")
    share = {
        (setup, workload): hits / ceiling
        for setup, workload, hits, ceiling in rungs.filter(pl.col("setup") != "plain")
        .select("setup", "workload", "measured_hits", "predicted_ceiling")
        .iter_rows()
    }
    # Each tier holds its pool, and no larger one; what lies below the device takes over from it.
    assert share["prefix-cache", "in-gpu"] == share["gpu-cpu", "in-gpu"] == share["gpu-cpu", "in-cpu"] == 1
    assert share["prefix-cache", "in-cpu"] < 0.5 and share["prefix-cache", "in-none"] < 0.1
    assert share["gpu-cpu", "in-none"] < 0.5
    # Files hold every pool, and are gone with the trial. The counter of what is read comes with the first time.
    assert {share["lmcache-files", workload] for workload in WORKLOADS} == {1}
    files = rungs.filter(pl.col("setup") == "lmcache-files").sort("working_set_tokens")
    assert files["disk_read_bytes"].to_list()[:2] == [None, None] and files["disk_read_bytes"][2] > 0
    assert all(size > 0 for size in files["disk_write_bytes"])
    assert not list(ladder.folder.glob("results/tiny/trials/lmcache-files/*/*/tier"))
    assert rungs.filter(pl.col("setup") == "plain")["measured_hits"].to_list() == [0, 0, 0]
    cliffs = {row["setup"]: row for row in pl.read_parquet(tables / "cliffs.parquet").iter_rows(named=True)}
    assert 6 * 643 < cliffs["prefix-cache"]["tokens"] < 19 * 643 < cliffs["gpu-cpu"]["tokens"] < 46 * 643
    turns = pl.read_parquet(tables / "turns.parquet")
    assert turns.filter(pl.col("setup") == "plain")["turn"].unique().sort().to_list() == [0, 1, 2, 3]
    report = (ladder.folder / "reports" / "tiny.html").read_text(encoding="utf-8")
    assert "Conversations over the working set" in report and "Where hits halve" in report
    assert "This figure was not drawn" not in report
    assert "no valid value" not in report
