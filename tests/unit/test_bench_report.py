"""The truth bench's figures and report: they say what the tables say, and no more."""

from __future__ import annotations

import hashlib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, get_args

import polars as pl
import pytest
from test_figures import clipped, texts
from test_report import Page

from kvladder.bench import report, tables
from kvladder.bench.figures import FIGURES
from kvladder.bench.tables import CELLS, GOALS, MACHINES, BenchTables, Row
from kvladder.config.bench import BenchConfig, BenchGoals, Client, Fault
from kvladder.figures.parts import style
from kvladder.report import page

EVIL = "<img src=x onerror=alert(1)>"
BIAS = {"kvladder": 0.12, "vllm": 8.7, "aiperf": 37.0, "guidellm": -1.1}


def row(client: str, **changes: Any) -> Row:
    """A row of ``cells``: 256 in flight, off by `BIAS` at the median and ten times that at the 99th percentile."""
    known = {
        "kind": "schedule",
        "client": client,
        "version": "1.2",
        "cores": 1,
        "shared_core": False,
        "prompt_tokens": 1000,
        "concurrency": 256,
        "repeat": 0,
        "requests": 768,
        "served": 768,
        "paired": 768,
        "client_ok": 768,
        "client_failed": 0,
        "stopped": False,
        "wall_s": 3.0,
        "ttft_bias_p50_ms": BIAS[client],
        "ttft_bias_p99_ms": 10 * BIAS[client],
        "ttft_bias_all_p99_ms": 10 * BIAS[client],
        "first_wave_bias_max_ms": 12.5,
        "gap_error_p99_ms": 0.4,
        "held": 250.0,
        "held_share": 250 / 256,
        "cpu_s_per_1000": 0.15,
        "peak_rss_mb": 60.0 if client == "kvladder" else 900.0,
        "extra_mb_per_1000": 20.0,
        "server_jitter_p50_ms": 0.02,
    }
    return dict.fromkeys(CELLS) | known | changes


def built(rows: list[Row]) -> BenchTables:
    machine = {
        "host_id": "h",
        "cpu": "Some CPU",
        "cores": 2,
        "memory_bytes": 24 << 30,
        "kernel": "6.1",
        "cells": len(rows),
    }
    goals = tables.judge(rows, BenchGoals())
    return BenchTables(
        pl.DataFrame(rows, schema=CELLS), pl.DataFrame(goals, schema=GOALS), pl.DataFrame([machine], schema=MACHINES)
    )


def config() -> dict[str, Any]:
    block = {"clients": ["kvladder"], "concurrency": [256]}
    return BenchConfig.model_validate({"experiment": "truth", "blocks": [block]}).model_dump()


def words(rows: list[Row], **changes: Any) -> Page:
    figures = [page.drawing(Path("none"), module) for module in FIGURES.values()]
    seen = {**report.view(built(rows), config() | changes), "figures": figures}
    return Page(page.render("client_truth.html.j2", seen, paged=False))


def levels(client: str, **changes: Any) -> list[Row]:
    return [row(client, concurrency=level, **changes) for level in (1, 16, 64, 256, 512)]


FULL = [one for client in BIAS for ids in (1000, 40_000) for one in levels(client, prompt_tokens=ids)]


def test_every_client_and_fault_has_words() -> None:
    assert set(tables.TITLES) == set(get_args(Client))
    assert set(report.FAULTS) == set(get_args(Fault)) - {"none"}


def test_goals_are_named_with_what_they_missed_by() -> None:
    text = words([row("kvladder", ttft_bias_p99_ms=1.5, gap_error_p99_ms=None)]).words
    # Missed: the tail at 256 and 97.7 % held; met: the median, the first wave, CPU, memory; the rest has no value.
    assert "kvladder on one core: 4 of 9 met, 2 missed, 3 not checked." in text
    assert (
        "Missed : TTFT bias, p99, up to 256 in flight, ms: 1.50 at 256 in flight, 1,000 ids, the goal is ≤ 1." in text
    )
    assert "Missed : concurrency held, share: 0.977 at 256 in flight, 1,000 ids, the goal is ≥ 0.98." in text
    assert "Not checked : gap error, p99, ms: 1 of 1 cell without a value." in text
    assert "Not checked : requests a second without delay: no such cell was measured." in text


def test_clients_beside_each_other() -> None:
    rows = [*FULL, row("kvladder", cores=2, ttft_bias_p50_ms=99.0)]
    text = words(rows).words
    assert "TTFT at 256 in flight, prompts of 1,000 ids, one core:" in text
    assert "AIPerf : off by 37.0 ms (p50) and 370 ms (p99); 250 of 256 kept in flight;" in text
    assert "GuideLLM : off by -1.10 ms (p50)" in text
    assert "off by 99" not in text


def test_where_a_peer_is_better_is_said() -> None:
    better = row("aiperf", ttft_bias_p50_ms=-0.05, held=255.0, held_share=255 / 256)
    text = words([row("kvladder"), better]).words
    assert "A peer is better in 2 of 6 comparisons" in text
    assert "AIPerf : median TTFT bias at 256 in flight, 1,000 ids (-0.0500 against 0.120)." in text
    assert "AIPerf : concurrency held at 256 in flight, 1,000 ids (0.996 against 0.977)." in text
    assert "A peer is better in 0 of 6 comparisons" in words([row("kvladder"), row("vllm")]).words


def test_who_calls_what_a_success() -> None:
    said = {"kind": "error-200", "concurrency": 4}
    rows = [
        row("kvladder", **said, client_ok=0, client_failed=8),
        row("vllm", **said, client_ok=8, client_failed=0),
        row("aiperf", kind="endless", client_ok=None, client_failed=None, stopped=True, wall_s=40.2),
        row("guidellm", kind="crlf", client_ok=0, client_failed=8),
    ]
    seen = words(rows)
    assert "Taken for what they are, all that were tried: by kvladder." in seen.words
    error = "the server sends an error object after HTTP 200 and half of the tokens"
    assert f"vllm bench serve calls it success when {error}." in seen.words
    assert "AIPerf was still running after 40 s when the server never stops sending tokens." in seen.words
    assert "GuideLLM calls it failed when the server ends lines with CR LF." in seen.words
    table = report.view(built(rows), config())["faults"]
    assert table["clients"] == ["kvladder", "vllm bench serve", "AIPerf", "GuideLLM"]
    marked = {each["what"]: [cell["wrong"] for cell in each["cells"]] for each in table["rows"]}
    assert marked[report.FAULTS["error-200"][0]] == [False, True, False, False]
    assert marked[report.FAULTS["endless"][0]] == [False, False, True, False]
    assert marked[report.FAULTS["crlf"][0]] == [False, False, False, True]


def test_limits_are_said_where_they_apply() -> None:
    plain = words([row("kvladder"), row("kvladder", repeat=1)]).words
    assert "500 requests" not in plain and "share one with the server" not in plain and "run once" not in plain
    assert "kvladder, run 2" in plain and "a process on each" not in plain
    assert "a process on each" in words([row("kvladder", cores=2)]).words
    text = words([row("vllm", shared_core=True, cores=2, ttft_bias_p99_ms=None)]).words
    assert "carry no 99th percentile: vllm bench serve, 256 in flight, 1,000 ids." in text
    assert "share one with the server" in text and "run once" in text
    assert "vllm bench serve, 2 cores (one the server’s)" in text


def test_what_is_unknown_is_a_dash_and_trouble_is_named() -> None:
    lost = dict.fromkeys(name for name, kind in CELLS.items() if kind == pl.Float64) | {"wall_s": 240.0}
    view = report.view(built([row("guidellm", **lost, stopped=True, paired=0)]), config())
    ((level, (line,)),) = view["points"][0]["levels"]
    assert (level, line["note"], set(line["values"][:-1])) == (256, "stopped after 240\N{NO-BREAK SPACE}s", {"–"})


def test_nothing_measured_is_a_page() -> None:
    text = words([]).words
    assert "No client was measured" in text and "None was tried." in text
    assert "kvladder on one core: 0 of 9 met, 9 not checked." in text


def test_nothing_from_outside_is_markup() -> None:
    seen = words([row("kvladder", version=EVIL)], experiment=EVIL)
    assert "img" not in seen.tags
    assert seen.words.count(EVIL) >= 3


def test_equal_tables_give_an_equal_report(tmp_path: Path) -> None:
    full = built(FULL)
    for name in ("cells", "goals", "machines"):
        getattr(full, name).write_parquet(tmp_path / f"{name}.parquet")
    for module in FIGURES.values():
        style.save(module, full, tmp_path)
    made = []
    for name in ("one", "two"):
        out = tmp_path / f"{name}.html", tmp_path / f"{name}.pdf"
        report.build(tmp_path, tmp_path, *out, config())
        made.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in out])
    assert made[0] == made[1]
    seen = Page((tmp_path / "one.html").read_text(encoding="utf-8"))
    assert len(seen.ids) == len(set(seen.ids))
    assert seen.tags.count("svg") == 2 * len(FIGURES) and "not drawn" not in seen.words


@pytest.mark.parametrize("width", [style.WIDE, style.NARROW])
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_every_client_and_nothing_clipped(name: str, width: float) -> None:
    figure = FIGURES[name].draw(built(FULL), width)
    assert set(tables.TITLES.values()) <= set(texts(figure))
    assert clipped(figure) == []
    assert len(figure.axes) == 2 * {"bias": 3, "in_flight": 1, "cost": 2}[name]


def test_points_are_the_tables(tmp_path: Path) -> None:
    rows = [
        *levels("kvladder"),
        *levels("guidellm", ttft_bias_p99_ms=None),
        row("kvladder", cores=2, ttft_bias_p50_ms=9.0),
    ]
    rows += [row("kvladder", concurrency=16, repeat=1, ttft_bias_p50_ms=0.3)]
    median, tail, _ = FIGURES["bias"].draw(built(rows)).axes
    points = {line.get_marker(): line.get_xydata().tolist() for line in median.get_lines() if line.get_ls() == "None"}
    own = sorted([[level, 0.12] for level in (1.0, 16.0, 64.0, 256.0, 512.0)] + [[16.0, 0.3]])
    assert sorted(points["o"]) == own
    # A bias below zero is drawn at its size.
    assert sorted(points["s"]) == [[level, 1.1] for level in (1.0, 16.0, 64.0, 256.0, 512.0)]
    middle = next(
        line for line in median.get_lines() if line.get_ls() == "-" and line.get_color() == style.COLOURS["ink"]
    )
    assert dict(middle.get_xydata().tolist())[16.0] == pytest.approx(0.21)
    assert not any(line.get_marker() == "s" and len(line.get_xdata()) for line in tail.get_lines())
    # Two goals: 1 ms up to 256, 1.3 ms above.
    dotted = [line.get_xydata().tolist() for line in tail.get_lines() if line.get_ls() == ":"]
    assert [[y for _, y in line] for line in dotted] == [[1.0, 1.0], [1.3, 1.3]]
    assert dotted[0][1][0] == pytest.approx(256 * 2**0.5) and dotted[1][0][0] == pytest.approx(512 / 2**0.5)
    style.save(FIGURES["bias"], built(rows), tmp_path)
    ET.fromstring((tmp_path / "bias.svg").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FIGURES)
def test_without_cells_a_figure_says_so(name: str) -> None:
    assert texts(FIGURES[name].draw(built([])))[0].startswith("No client was measured")
