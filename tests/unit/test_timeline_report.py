"""From captures to tables, words, figures and Perfetto files."""

from __future__ import annotations

import gzip
import importlib
import json
import sqlite3
from pathlib import Path

import polars as pl
import pytest
from timeline_factory import MS, Database, record, write_capture
from trial_factory import write_trial

from kvladder.config.records import Verdict
from kvladder.config.references import Explanation
from kvladder.counters.reading import Delta, Reading
from kvladder.figures.parts.style import save
from kvladder.timeline import perfetto, report, tables, trials
from kvladder.timeline.decompose import PARTS
from kvladder.timeline.tables import Tables
from kvladder.timeline.words import beside, reasons

FIGURES = ("request", "copy_rate", "decomposition")


def unread(delta: Delta) -> Reading:
    """A setup whose counters say nothing."""
    return Reading()


def captured(folder: Path, **slower: float) -> Tables:
    """Captures of these setups, each so many ms slower than the first."""
    parts = []
    for setup, milliseconds in slower.items():
        write_capture(folder / setup, setup, slower=milliseconds)
        parts.append(tables.reduce(folder / setup, unread, 50e9))
    return tables.collect(parts)


def test_tables_survive_their_files(tmp_path: Path) -> None:
    found = captured(tmp_path, native=0, lmcache=20)
    tables.write(found, tmp_path / "tables")
    again = tables.load(tmp_path / "tables")
    for name in tables.SCHEMAS:
        assert getattr(again, name).equals(getattr(found, name)), name
    assert again.setups == ["native", "lmcache"]
    row = again.decomposition.row(0, named=True)
    assert sum(row[f"{part}_ns"] for part in PARTS) + row["remainder_ns"] == row["ttft_ns"] == 90 * MS
    assert row["send_ns"] == 0
    assert again.cost.row(0, named=True)["ratio"] == pytest.approx(1.5)


def test_equal_captures_give_equal_files(tmp_path: Path) -> None:
    for place in ("a", "b"):
        found = captured(tmp_path / place, native=0)
        tables.write(found, tmp_path / place / "tables")
        perfetto.write(found, "native", tmp_path / place / "perfetto.json.gz")
    for path in sorted((tmp_path / "a").rglob("*")):
        if path.is_file() and path.suffix != ".sqlite":
            other = tmp_path / "b" / path.relative_to(tmp_path / "a")
            assert path.read_bytes() == other.read_bytes(), path


def test_a_capture_that_failed_says_why_and_is_in_no_other_table(tmp_path: Path) -> None:
    failed = record("native", status="failed", reason="no trace for window warm within 60 s")
    (tmp_path / "capture.json").write_text(failed.model_dump_json(by_alias=True), encoding="utf-8")
    found = tables.reduce(tmp_path, unread, None)
    assert found.captures.select("reason", "valid").rows() == [("no trace for window warm within 60 s", False)]
    assert (found.setups, found.events.height, found.decomposition.height) == ([], 0, 0)


def test_a_trace_that_cannot_be_read_is_a_reason(tmp_path: Path) -> None:
    write_capture(tmp_path)
    Database(tmp_path / "profile" / "engine.sqlite").close()
    found = tables.reduce(tmp_path, unread, None)
    assert "no clock mark" in found.captures["reason"].item()
    assert found.setups == []


def test_nothing_is_concluded_from_a_trace_with_too_much_lost(tmp_path: Path) -> None:
    write_capture(tmp_path)
    with sqlite3.connect(tmp_path / "profile" / "engine.sqlite") as connection:
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET start = 0, end = 0 WHERE bytes = 4096")
    found = tables.reduce(tmp_path, unread, None)
    assert found.captures.select("valid", "quality").rows() == [(False, "1 of 5 unusable: 1 without a time")]
    assert (found.setups, reasons(found)) == ([], [])


def test_words_name_the_parts_that_make_the_difference(tmp_path: Path) -> None:
    found = captured(tmp_path, native=0, lmcache=20)
    slow = pl.col("setup") == "lmcache"

    def shifted(name: str, more: int) -> pl.Expr:
        return pl.when(slow).then(pl.col(name) + more).otherwise(pl.col(name)).alias(name)

    changed = found.decomposition.with_columns(
        shifted("transfer_ns", 12 * MS),
        shifted("transfer_busy_ns", 12 * MS),
        shifted("recompute_ns", 8 * MS),
        shifted("computed_tokens", 112),
        shifted("client_http_ns", -20 * MS),
    )
    before = found.cost.with_columns(shifted("untraced_ttft_ns", 20 * MS))
    (text,) = reasons(Tables(found.captures, found.events, changed, found.counted, before))
    assert text == (
        "repeat: in these captures a hit takes 90.0 ms in native and 110 ms in lmcache, 20.0 ms more. It spends more "
        "on copying (12.0 ms: 0.02 GB at 0.4 GB/s (1 % of its link) in one call of 2 copies against 0.02 GB at 0.5 "
        "GB/s (1 % of its link) in one call of 2 copies); computing the rest of the prompt (8.0 ms: 120 tokens against "
        "8)."
    )


def test_a_difference_that_passes_without_the_profiler_lack_is_none_but_its_parts_are_named(tmp_path: Path) -> None:
    (text,) = reasons(captured(tmp_path, native=0, lmcache=20))
    assert text == (
        "repeat: in these captures a hit takes 90.0 ms in native and 110 ms in lmcache, 20.0 ms more. Equal passes "
        "without the profiler took 60.0 ms and 60.0 ms: the difference doesn't hold, and neither is called the faster. "
        "Their parts differ all the same, here lmcache against native. It spends more on client and HTTP (20.0 ms)."
    )


def test_what_others_found_stands_beside_the_same_kind_of_setup(tmp_path: Path) -> None:
    explained = Explanation(title="Bench", source="its timelines", hardware="a GPU", kinds={"native": "139 ms"})
    (text,) = beside(captured(tmp_path, native=0), explained)
    assert text == (
        "native in Bench (a GPU; its timelines): 139 ms. Here: 40.0 ms for 0.02 GB in one call, 1.0 ms of lookup and "
        "0.8 ms before the first copy, 5.0 ms after the last."
    )
    assert beside(captured(tmp_path, native=0), None) == []
    assert beside(captured(tmp_path, native=0), Explanation("Bench", "", "", {"plain": "1 s"})) == []


def test_a_difference_within_the_remainder_gets_no_reason(tmp_path: Path) -> None:
    (text,) = reasons(captured(tmp_path, native=0, lmcache=2))
    assert text.endswith("That is within what the timelines leave unexplained (3.0 ms): no reason is given.")


def test_one_setup_is_compared_with_nobody(tmp_path: Path) -> None:
    assert reasons(captured(tmp_path, native=0)) == []


def test_perfetto_gets_names_lanes_and_all_events(tmp_path: Path) -> None:
    found = captured(tmp_path, native=0)
    path = tmp_path / "perfetto.json.gz"
    number = perfetto.write(found, "native", path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert len(events) == number
    named = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"client", "engine", "repeat request 0", "GPU 0 stream 7", "thread 4001"} <= named
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == found.events.height + found.decomposition.height
    request = next(event for event in spans if event["cat"] == "request")
    assert (request["ts"], request["dur"], request["args"]["recompute"]) == (0, 90_000, 30)
    copies = [event for event in spans if event["cat"] == "h2d" and event["args"]["bytes"] == 10_000_000]
    assert [event["args"]["GB/s"] for event in copies] == [0.5, 0.5]
    lanes = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M" and event["tid"]}
    assert {(event["pid"], event["tid"]) for event in spans} <= lanes


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_drawn_the_same_twice(tmp_path: Path, name: str) -> None:
    module = importlib.import_module(f"kvladder.timeline.figures.{name}")
    found = captured(tmp_path, native=0, lmcache=20)
    first, second = (save(module, found, tmp_path / place) for place in ("a", "b"))
    assert [path.name for path in first] == [f"{name}.svg", f"{name}.png", f"{name}.narrow.svg"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_nothing_say_so(name: str) -> None:
    module = importlib.import_module(f"kvladder.timeline.figures.{name}")
    (text,) = module.draw(tables.collect([])).texts
    assert text.get_text().startswith("No capture")


def test_a_request_is_drawn_in_four_lanes_up_to_its_first_token(tmp_path: Path) -> None:
    module = importlib.import_module("kvladder.timeline.figures.request")
    figure = module.draw(captured(tmp_path, native=0, lmcache=20))
    assert [axis.get_title(loc="left") for axis in figure.axes] == [
        "native: repeat, warm, 90.0 ms",
        "lmcache: repeat, warm, 110.0 ms",
    ]
    lanes = figure.axes[0].collections
    copies = lanes[-1].get_paths()
    # Two copies 1 µs apart are one bar.
    assert [round(path.vertices[:, 0].min(), 3) for path in copies] == [10, 59]
    assert max(path.vertices[:, 0].max() for lane in lanes for path in lane.get_paths()) <= 90


def test_the_report_has_every_table_and_escapes_names(tmp_path: Path) -> None:
    found = captured(tmp_path, native=0, lmcache=20)
    rename = pl.col("setup").str.replace("lmcache", "<b>|lm")
    tables.write(Tables(**{name: getattr(found, name).with_columns(rename) for name in tables.SCHEMAS}), tmp_path / "t")
    out = (tmp_path / "r.html", tmp_path / "r.pdf", tmp_path / "summary.md")
    traces = {"native": "native/perfetto.json.gz", "x": "y"}
    compared = {"missing": ["plain"], "compare_with": "vllm-offload-bench"}
    report.build(tmp_path / "t", tmp_path / "none", out, "Made up", traces, **compared)
    html, text = (path.read_text(encoding="utf-8") for path in (out[0], out[2]))
    assert text.startswith("# Made up: where the time to the first token goes\n")
    assert "| native | repeat | warm | 90.0 | 6.0 | 1.0 | 1.2 | 1.0 |" in text
    assert "| native | repeat | warm | 60.0 | 90.0 | 1.50 |" in text
    assert "| native | nsys | 5 records, all usable | 0 |" in text
    assert "| native | repeat | warm | 992 | 8 | 0.02 | 1 | 2 | 40.0 | 0.5 | 1 | 0.8 | 5.0 |" in text
    assert "native in vLLM-offload-bench (8 × RTX A6000, PCIe Gen4 x16; from its per-request GPU timelines)" in text
    assert "<dt>Not captured</dt><dd>plain</dd>" in html
    assert "| <b>\\|lm | repeat | warm | 110.0 |" in text
    assert '<a href="native/perfetto.json.gz">native</a>' in html
    assert 'href="y"' not in html
    assert "&lt;b&gt;|lm" in html
    assert "<b>" not in html
    assert "a hit takes 90.0 ms in native" in html
    assert out[1].read_bytes().startswith(b"%PDF")


def test_a_mean_of_some_requests_is_no_mean(tmp_path: Path) -> None:
    found = captured(tmp_path, native=0)
    other = found.decomposition.with_columns(
        pl.lit(None, dtype=pl.Int64).alias("transfer_ns"), pl.lit(1, dtype=pl.Int64).alias("index")
    )
    both = pl.concat([found.decomposition, other])
    split = report.sections(Tables(found.captures, found.events, both, found.counted, found.cost))[0]
    (row,) = split.rows
    shown = dict(zip(split.heads, row, strict=True))
    assert (shown["Copy"], shown["TTFT"], shown["Staging"]) == ("–", "90.0", "0.0")


def test_timed_trials_are_taken_apart_by_their_counters(tmp_path: Path) -> None:
    folder = write_trial(tmp_path)
    record = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    assert trials.table([folder]).height == 0, "not judged: not in any table"
    verdict = Verdict(
        **{name: record[name] for name in ("experiment", "setup", "suite", "repeat", "run")},
        status="valid",
        reason=None,
        gates=[],
        windows=[],
    )
    (folder / "verdict.json").write_text(verdict.model_dump_json(by_alias=True), encoding="utf-8")
    found = trials.table([folder])
    passes = [item for item in record["passes"] if item["workload"] != "right-kv"]
    assert found.select("workload", "pass", "round").rows() == [
        (item["workload"], item["name"], item["round"]) for item in passes
    ]
    parts = [name for name in found.columns if name.endswith("_ns") and name != "ttft_ns"]
    for row in found.iter_rows(named=True):
        assert sum(row[name] or 0 for name in parts) == row["ttft_ns"] > 0
