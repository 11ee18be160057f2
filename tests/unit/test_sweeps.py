"""Sweeps over requests in flight and prompt length: cells in the tables, break-even, figures, report."""

from __future__ import annotations

import hashlib
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import polars as pl
import pytest
from matplotlib.patches import Rectangle
from table_factory import LENGTHS, SWEEPS, SWEPT, config_of, judge, write_judged
from test_figures import clipped, texts
from trial_factory import Family, Load, write_trial

from kvladder import tables
from kvladder.config import registry
from kvladder.config.sources import read
from kvladder.config.traffic import TrafficContext
from kvladder.figures import break_even, burst_wall, concurrency, grid, tokens_by_source, ttft
from kvladder.figures.parts import style
from kvladder.figures.parts.lines import MOST_LINES
from kvladder.report import page
from kvladder.report.build import build
from kvladder.report.limits import limits
from kvladder.tables import Tables
from kvladder.tables.break_even import hit_row, payback
from kvladder.tables.labels import single_workloads, workload_order
from kvladder.tables.model import frame
from kvladder.tables.sweeps import sweeps

ROOT = Path(__file__).resolve().parents[2]
MODULES = [break_even, concurrency, grid]
OTHERS = [burst_wall, tokens_by_source, ttft]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    root = tmp_path_factory.mktemp("swept")
    return tables.build(write_judged(root, SWEPT, suites=SWEEPS), root / "tables", baseline="plain")


@pytest.fixture(scope="module")
def unswept(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    root = tmp_path_factory.mktemp("unswept")
    setups = {name: SWEPT[name] for name in ("plain", "native")}
    folders = write_judged(root, setups, repeats=1, suites={"demo": {"repeat": Load()}})
    return tables.build(folders, root / "tables", baseline="plain")


def without(data: Tables, setup: str, workload: str) -> Tables:
    """The tables as if this setup had no value in this cell."""
    gone = (pl.col("setup") == setup) & (pl.col("workload") == workload)
    return Tables(**{**vars(data), "summary": data.summary.filter(~gone)})


def test_cells_are_told_apart_by_name_and_by_columns(swept: Tables) -> None:
    found = {sweep.workload: sweep for sweep in sweeps(swept.summary)}
    assert set(found) == {"concurrency", "grid"}
    assert found["concurrency"].cells == {(level, 500): f"concurrency @ {level}" for level in (1, 2, 4, 8)}
    assert found["grid"].cells == {
        (batch, length): f"grid @ {batch} × {length} tokens" for batch in (1, 2, 4) for length in LENGTHS
    }
    for table in (swept.passes, swept.metrics, swept.summary):
        row = table.filter(pl.col("workload") == "grid @ 4 × 1600 tokens")
        assert set(row.select("concurrency", "prompt_length").iter_rows()) == {(4, 1600)}
    cell = swept.requests.filter(pl.col("workload") == "grid @ 4 × 1600 tokens").collect()
    assert set(cell["prompt_tokens"]) == {1600}
    assert len(workload_order(swept, swept.passes)) == 4 + 15
    assert single_workloads(swept, swept.passes) == []


def test_only_lengths_that_differ_are_named_by_them(tmp_path: Path) -> None:
    load = Load(warm_rounds=0, cells=((1, 300), (1, 600)))
    folders = write_judged(tmp_path, {"plain": SWEPT["plain"]}, repeats=1, suites={"s": {"w": load}})
    built = tables.build(folders, tmp_path / "out", baseline="plain")
    assert workload_order(built, built.passes) == [("s", "w @ 300 tokens"), ("s", "w @ 600 tokens")]


def test_a_pass_of_several_lengths_is_one_measurement(tmp_path: Path) -> None:
    def mixed(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["prompt_tokens"] = 300 + row["index"] + row["round"]

    load = {"s": {"w": Load(requests=2, warm_rounds=0)}}
    folder = write_trial(tmp_path, setup="plain", suite="s", workloads=load["s"], edit_requests=mixed)
    judge(folder)
    built = tables.build([folder], tmp_path / "out", baseline="plain")
    assert workload_order(built, built.passes) == [("s", "w")]
    assert set(built.passes["prompt_length"]) == {None}
    assert set(built.summary["prompt_length"]) == {None}


def test_prompt_tokens_per_second_is_over_the_wall_time(swept: Tables) -> None:
    row = swept.passes.filter(
        (pl.col("setup") == "plain") & (pl.col("workload") == "grid @ 4 × 800 tokens") & (pl.col("repeat") == 0)
    ).row(0, named=True)
    assert row["prompt_tokens_per_s"] == pytest.approx(4 * 800 / row["wall_s"])


def test_parity_has_one_row_a_sweep(swept: Tables) -> None:
    rows = swept.parity.filter(pl.col("property").str.starts_with("hit of") & (pl.col("setup") == "native"))
    assert rows["property"].to_list() == [
        "hit of one prompt of each of 4 cells repeated in concurrency",
        "hit of one prompt of each of 15 cells repeated in grid",
    ]
    asked = 3 * sum((length - 1) // 128 * 128 for length in LENGTHS)
    assert rows.row(1, named=True)["asked"] == rows.row(1, named=True)["measured"] == str(asked)


def test_the_table_says_where_loading_beats_computing(swept: Tables) -> None:
    rows = {(row["setup"], row["pass"]): row for row in swept.break_even.iter_rows(named=True)}
    assert {setup for setup, _ in rows} == {"prefix-cache", "native", "lmcache-mp", "mooncake-store"}
    native = rows["native", "warm"]
    # 0.08 · t + 0.6 s = t at t = 0.652 s, and a prompt of 3,000 tokens takes 3.4 s.
    assert (native["answer"], native["blocks"], native["crossings"]) == ("from", 3, 1)
    assert native["tokens"] == pytest.approx(0.652 / 3.4 * 3000, rel=0.05)
    assert native["tokens_low"] <= native["tokens"] <= native["tokens_high"]
    assert rows["lmcache-mp", "first-hit"]["answer"] == "already"
    never = rows["mooncake-store", "first-hit"]
    assert (never["answer"], never["longest"], never["hits_to_pay"]) == ("never", 2900, math.inf)


def test_pay_back_is_by_length(swept: Tables) -> None:
    sweep = next(each for each in sweeps(swept.summary) if each.workload == "grid")
    cells = hit_row(sweep, swept.passes, "native", "warm")
    paid = payback(swept.summary, cells, "native", "warm")
    assert list(paid) == list(LENGTHS)
    assert paid[200] == math.inf and paid[2900] == 1
    gone = without(swept, "native", "grid @ 1 × 1600 tokens")
    assert payback(gone.summary, cells, "native", "warm")[1600] is None


def test_a_prompt_too_short_to_be_stored_says_nothing_of_loading(tmp_path: Path) -> None:
    # Chunks of 256 tokens: 200 are computed each time, a little faster or slower than by the baseline.
    coarse = ("lmcache-mp", Family("cpu", 256, 1.3, 1.3, 1.0, "LMCacheMPConnector", ("lmcache",)))
    loads = {"s": {"grid": Load(warm_rounds=0, cells=((1, 200), (1, 400), (2, 200), (2, 400)))}}
    folders = write_judged(tmp_path, {"plain": SWEPT["plain"], "coarse": coarse}, repeats=1, suites=loads)
    built = tables.build(folders, tmp_path / "out", baseline="plain")
    row = built.break_even.row(0, named=True)
    assert (row["answer"], row["shortest"], row["longest"]) == ("never", 400, 400)
    assert [len(line.get_xdata()) for line in break_even.draw(built).axes[0].lines] == [2, 1]


def test_a_baseline_with_a_tier_computes_nothing_to_compare_with(tmp_path: Path) -> None:
    setups = {name: SWEPT[name] for name in ("plain", "prefix-cache", "native")}
    folders = write_judged(tmp_path, setups, repeats=1, suites=SWEEPS)
    built = tables.build(folders, tmp_path / "out", baseline="prefix-cache")
    assert built.break_even.height == 0 and not break_even.applies(built)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("width", [style.WIDE, style.NARROW])
def test_a_figure_of_a_sweep_shows_each_setup_and_clips_nothing(swept: Tables, module: Any, width: float) -> None:
    assert module.applies(swept)
    figure = module.draw(swept, width)
    shown = texts(figure)
    for setup in ("native", "lmcache-mp", "mooncake-store", "prefix-cache"):
        assert setup in shown
    assert clipped(figure) == []


def test_a_setup_without_a_value_is_named(tmp_path: Path) -> None:
    setups = {name: SWEPT[name] for name in ("plain", "native", "mooncake-store")}
    folders = write_judged(tmp_path, setups, repeats=1, suites=SWEEPS, invalid=[("mooncake-store", 0)])
    built = tables.build(folders, tmp_path / "out", baseline="plain")
    for module in MODULES:
        assert "no value: mooncake-store" in texts(module.draw(built))


def test_a_setup_looks_the_same_in_every_figure(swept: Tables) -> None:
    looks: dict[str, set[tuple[Any, ...]]] = {}
    for module in (break_even, concurrency):
        for handle in module.draw(swept).legends[0].legend_handles:
            look = (handle.get_color(), handle.get_marker(), handle.get_linestyle())
            looks.setdefault(handle.get_label(), set()).add(look)
    assert {len(each) for each in looks.values()} == {1}
    # No two setups share a marker: colour is never the only code.
    assert len({next(iter(each))[1] for each in looks.values()}) == len(looks)


def test_the_ring_stands_at_the_break_even(swept: Tables) -> None:
    found = swept.break_even.filter((pl.col("setup") == "native") & (pl.col("pass") == "first-hit"))["tokens"].item()
    panel = break_even.draw(swept).axes[0]
    rings = [line for line in panel.lines if line.get_markerfacecolor() == "none"]
    assert [tuple(ring.get_xydata()[0]) for ring in rings] == [(pytest.approx(found), 1.0)]
    assert f"{found:,.0f}" in texts(panel.figure)


def test_a_cell_has_its_ratio_and_one_without_is_hatched(swept: Tables) -> None:
    name = "grid @ 2 × 800 tokens"
    row = swept.summary.filter(
        (pl.col("setup") == "native")
        & (pl.col("workload") == name)
        & (pl.col("metric") == "wall_s")
        & (pl.col("pass") == "first-hit")
    ).row(0, named=True)
    assert f"{row['ratio']:.2f}" in texts(grid.draw(swept))
    hatched = [
        patch
        for axis in grid.draw(without(swept, "native", name)).axes
        for patch in axis.patches
        if isinstance(patch, Rectangle) and patch.get_hatch()
    ]
    assert [patch.get_xy() for patch in hatched] == [(LENGTHS.index(800), 1)]


@pytest.mark.parametrize("module", MODULES)
def test_without_a_sweep_a_figure_does_not_apply(unswept: Tables, module: Any) -> None:
    assert not module.applies(unswept)
    assert texts(module.draw(unswept))[0].startswith("No valid trial")


@pytest.mark.parametrize("module", OTHERS)
def test_figures_of_single_workloads_leave_sweeps_alone(swept: Tables, unswept: Tables, module: Any) -> None:
    assert not module.applies(swept)
    assert module.applies(unswept)


def test_equal_tables_give_equal_bytes(swept: Tables, tmp_path: Path) -> None:
    digests = []
    for folder in ("a", "b"):
        for module in MODULES:
            for path in style.save(module, swept, tmp_path / folder):
                if path.suffix == ".svg":
                    ET.fromstring(path.read_text(encoding="utf-8"))
        files = sorted((tmp_path / folder).iterdir())
        digests.append([(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files])
    assert digests[0] == digests[1] and len(digests[0]) == 3 * len(MODULES)


def test_many_setups_are_reduced_and_counted(tmp_path: Path) -> None:
    setups = {"plain": SWEPT["plain"], **{f"{'n' * 60}{number:02d}": SWEPT["native"] for number in range(30)}}
    loads = {"s": {"grid": Load(warm_rounds=0, cells=((1, 300), (1, 600), (2, 300), (2, 600)))}}
    built = tables.build(write_judged(tmp_path, setups, repeats=1, suites=loads), tmp_path / "out", baseline="plain")
    for module, hidden in ((grid, 30 - grid.MOST_SETUPS), (break_even, 30 - MOST_LINES)):
        for width in (style.WIDE, style.NARROW):
            figure = module.draw(built, width)
            assert clipped(figure) == []
            assert any(f"and {hidden} more setups" in text for text in texts(figure))


def said(root: Path, repeats: int, setups: dict[str, Any], loads: dict[str, Any], monkeypatch: Any) -> str:
    monkeypatch.setattr(page, "pdf", lambda html: b"")
    built = tables.build(
        write_judged(root, setups, repeats=repeats, suites=loads), root / "tables", baseline="plain"
    )  # fmt: skip
    for kind in registry.kinds("figures"):
        style.save(registry.load("figures", kind), built, root / "figures")
    out = [root / f"r.{ending}" for ending in ("html", "pdf", "md")]
    suites = {name: list(loads[name]) for name in loads}
    build(root / "tables", root / "figures", *out, config_of(setups, repeats, suites=suites))
    assert "Break-even: loading against computing" in out[0].read_text(encoding="utf-8")
    return out[2].read_text(encoding="utf-8").replace("**", "")


def test_the_report_puts_a_sweep_into_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Load(kind="generate", requests=4, concurrency=2, prompt_tokens=500, output_tokens=32, warm_rounds=0)
    text = said(tmp_path, 3, SWEPT, {"sweeps": {**SWEEPS["sweeps"], "generate": generate}}, monkeypatch)
    assert (
        "One request at a time, a first hit beats computing it: lmcache-mp already at the shortest (200 tokens); "
        "mooncake-store never (up to 2,900 tokens); native from 5"
    ) in text
    assert "tokens on (3 blocks)." in text
    assert (
        "What a dearer first request costs is paid back, at 2,900 tokens: lmcache-mp after 1 hit; mooncake-store never;"
        in text
    )
    assert "lmcache-mp in 15 of 15 cells" in text and "mooncake-store in 0 of 15 cells" in text
    assert "With 8 requests in flight, prompt tokens per second on a first hit against plain's: lmcache-mp 8." in text
    assert "Time per output token while storing, against plain's in the same pass:" in text
    assert "## Decoding: generate" in text
    # Cells have one table together and no section, headline or paragraph each.
    assert "## grid @" not in text and "grid @" not in text
    assert text.count("| 4 × 2,900 |") == 1


def test_the_cells_of_a_sweep_are_one_row_in_tables_of_limits(swept: Tables) -> None:
    cells = [f"concurrency @ {level}" for level in (1, 2)]
    rate = {"setup": "native", "suite": "sweeps", "pass": "first-hit", "direction": "load", "basis": "engine"}
    rates = [
        {**rate, "workload": cell, "n": n, "link": "pinned_h2d", "gb_per_s": gb, "percent": 2 * gb}
        for cell, n, gb in zip(cells, (3, 2), (31.0, 44.4), strict=True)
    ]
    crossed = {"setup": "native", "suite": "sweeps", "direction": "load", "expected_bytes": 1e9}
    counts = [
        {**crossed, "workload": cell, "n": 2, "counted_bytes": ratio * 1e9, "engine_bytes": engine, "turns": 1}
        | {"min_ratio": ratio - 0.01, "max_ratio": ratio + 0.01}
        for cell, ratio, engine in zip(cells, (1.08, 1.1), (1e9, None), strict=True)
    ]
    data = Tables(**{**vars(swept), "limits": frame("limits", rates), "pcie_bytes": frame("pcie_bytes", counts)})
    setups: Any = {"native": Some(name="native", label="native")}
    seen = limits(data, setups)
    ((row,), (crossing,)) = seen["rows"], seen["pcie"]
    assert seen["columns"] == ["Load, first hit"]
    assert (row["workload"], row["links"], row["n"]) == ("concurrency, 2 cells", ["pinned host memory to GPU"], 2)
    assert row["cells"] == [{"rate": "31.0–44.4", "percent": "62–89 %"}]
    assert (crossing["workload"], crossing["ratio"], crossing["range"]) == (
        "concurrency, 2 cells",
        "1.090",
        "1.070–1.110",
    )
    assert (crossing["sizes"], crossing["engine_ratio"]) == (["2.180", "–", "2.000"], "–"), "one cell's isn't known"
    assert (crossing["turns"], crossing["n"]) == (2, 2)


def test_one_block_of_a_sweep_has_no_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setups = {name: SWEPT[name] for name in ("plain", "native")}
    text = said(tmp_path, 1, setups, SWEEPS, monkeypatch)
    assert "tokens on (1 block)." in text
    assert "(one block, no interval)" in text
    assert "No trial is valid" not in text


def test_the_published_sweeps_stand_beside_the_offload_experiment() -> None:
    sweeps_config, offload = (read([ROOT / "config" / f"{name}.yaml"]) for name in ("offload-sweeps", "offload"))
    for part in ("stack", "model", "engine", "baseline"):
        assert getattr(sweeps_config, part) == getattr(offload, part), part
    assert {name: setup.kind for name, setup in sweeps_config.setups.items()} == {
        name: setup.kind for name, setup in offload.setups.items()
    }


def test_no_tier_of_the_published_sweeps_evicts() -> None:
    config = read([ROOT / "config" / "offload-sweeps.yaml"])
    per_token, pool = config.kv_bytes_per_token(), config.pool_tokens()
    assert per_token is not None and pool is not None and config.right_kv is not None
    traffic = TrafficContext(seed=0, namespace="r0", vocab_size=128_256, block_size=16)
    stored = max(workload.longest_prompt() for workload in config.workloads.values())  # the warm-up prompt
    stored += config.right_kv.prompts * (config.right_kv_tokens() + config.right_kv.output_tokens)
    for name in config.suite_map()["main"]:
        for plan in config.workloads[name].passes(name, traffic):
            tokens = [len(item.prompt) + item.output_tokens for item in plan.requests]
            # What is in flight at once has room on the device, or requests would be preempted.
            assert plan.concurrency <= config.engine.max_num_seqs
            assert plan.concurrency * max(tokens) <= pool
            stored += sum(tokens) if plan.name == "cold" else 0
    for name, setup in config.setups.items():
        for size in setup.capacity_bytes().values():
            # Nine tenths: lmcache-mp is told to evict at 95 %, mooncake-store does so by itself.
            assert stored * per_token <= 0.9 * size, name
    assert stored * per_token > 0.8 * 64 * 2**30  # pinning more than is needed is paid in every start-up
