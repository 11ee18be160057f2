"""Timelines of real vLLM: torch's profiler in the engine, marks of every request, and nothing simulated."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from test_pipeline import CONFIG, HIT, PROMPT, run_pipeline

from kvladder.config.timelines import CaptureRecord
from kvladder.timeline import assemble, tables
from kvladder.timeline.decompose import PARTS

SETUPS = {"native-host": {"kind": "native", "copier": "host", "cpu_bytes": "16MiB"}}
WORKLOADS = {
    "repeat": {"kind": "repeat", "prompt_tokens": PROMPT, "warm_passes": 2},
    "burst": {"kind": "burst", "requests": 4, "prompt_tokens": PROMPT, "warm_passes": 1},
}
TIMED: dict[str, Any] = {
    **CONFIG,
    "experiment": "tiny-timelines",
    "baseline": "native-host",
    "setups": SETUPS,
    "workloads": WORKLOADS,
    "suites": {"main": list(WORKLOADS)},
    "timelines": {"workloads": list(WORKLOADS), "profiler": "torch"},
}
PASSES = ["repeat/cold/0", "repeat/first-hit/1", "repeat/warm/2", "burst/cold/0", "burst/first-hit/1"]


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the timelines of a finished run."""
    folder = tmp_path_factory.mktemp("timelines")
    run_pipeline(TIMED, folder, "timelines", timeout=420)
    return folder / "results" / "tiny-timelines" / "timelines"


@pytest.mark.engine
def test_every_pass_has_a_trace_of_its_own(captured: Path) -> None:
    folder = captured / "captures" / "native-host"
    record = CaptureRecord.model_validate_json((folder / "capture.json").read_text(encoding="utf-8"))
    assert (record.status, record.reason, record.profiler) == ("completed", None, "torch")
    assert [window.name for window in record.windows] == PASSES
    assert len({name for window in record.windows for name in window.files}) == len(PASSES)
    timeline = assemble.load(folder, record)
    assert all(clock.spread < 1_000_000 for clock in timeline.clocks.values())
    # The engine's own scopes, on the plugin's clock, lie inside the steps that the plugin noted.
    steps = [mark for mark in timeline.marks if mark.name == "execute"]
    forward = [event for event in timeline.events if event.name == "gpu_model_runner: forward"]
    assert len(forward) >= len(PASSES)
    assert all(any(step.start <= event.start and event.end <= step.end for step in steps) for event in forward)


@pytest.mark.engine
def test_each_ttft_is_taken_apart_and_next_to_nothing_is_left(captured: Path) -> None:
    rows = tables.load(captured / "tables").decomposition
    assert rows.height == 3 + 2 * 4
    assert rows["problem"].null_count() == rows.height
    for row in rows.iter_rows(named=True):
        assert sum(row[f"{part}_ns"] for part in PARTS) + row["remainder_ns"] == row["ttft_ns"], row
    assert (rows["remainder_ns"] / rows["ttft_ns"]).median() < 0.1
    hits = rows.filter(pl.col("pass") != "cold")
    assert hits["loaded_tokens"].to_list() == [HIT] * hits.height
    assert hits["computed_tokens"].to_list() == [PROMPT - HIT] * hits.height
    assert hits.filter(pl.col("workload") == "repeat")["transfer_ns"].min() > 0
    assert rows.filter(pl.col("pass") == "cold")["computed_tokens"].to_list() == [PROMPT] * 5


@pytest.mark.engine
def test_counters_alone_agree_on_what_they_know(captured: Path) -> None:
    found = tables.load(captured / "tables")
    cold = (pl.col("workload") == "repeat") & (pl.col("pass") == "cold")
    counted, seen = (table.filter(cold).row(0, named=True) for table in (found.counted, found.decomposition))
    assert counted["ttft_ns"] == seen["ttft_ns"]
    assert counted["recompute_ns"] == pytest.approx(seen["recompute_ns"] + seen["sampling_ns"], rel=0.1, abs=2e7)
    assert found.cost.height == len(PASSES)


@pytest.mark.engine
def test_what_is_shown_is_there(captured: Path) -> None:
    for name in ("request", "copy_rate", "decomposition"):
        assert (captured / "figures" / f"{name}.svg").read_text(encoding="utf-8").startswith("<?xml")
    reports = captured.parents[2] / "reports"
    trace = reports / "perfetto" / "tiny-timelines-native-host.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {"execute", "lookup", "load", "copy-load"} <= {event["name"] for event in events}
    assert "| native-host | torch | no device was recorded |" in (captured / "summary.md").read_text(encoding="utf-8")
    page = (reports / "tiny-timelines-timelines.html").read_text(encoding="utf-8")
    assert f'href="{trace.relative_to(reports).as_posix()}"' in page
