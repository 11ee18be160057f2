"""Bytes over PCIe by the device's own counters: sums that fit, sums that don't, and the trace that is drawn of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.patches import Rectangle
from table_factory import DEMO, config_of, judge, write_judged
from test_figures import clipped, texts
from test_report import Page, no_pdf, report  # noqa: F401 (a fixture)
from trial_factory import S, write_trial

from kvladder import tables
from kvladder.figures import pcie_trace
from kvladder.figures.parts import style
from kvladder.tables import Tables
from kvladder.tables.pcie import TURN

GPU = {"device": "0", "name": "Test GPU"}
SPANS = {("cold", 0): (10.0, 11.0), ("first-hit", 1): (13.0, 13.2), ("warm", 2): (15.0, 15.2)}
"""Passes by name and round, in seconds."""
TOKENS, PER_TOKEN = 1000, 4_000_000
"""4 GB a pass: less than a turn of the counter. With a twelfth for headers it is more."""
TIMES = (9.5, 10.5, 11.5, 12.5, 13.5, 14.5, 15.5, 16.5)
SENT = (2_200_000_000, 2_200_000_000, 0, 0, 0, 0, 0)
RECEIVED = (0, 0, 0, 4_320_000_000, 0, 4_320_000_000, 0)
"""Between those times, headers included: 1.1 bytes for one of KV that is stored, 1.08 for one that is loaded."""

Edit = Callable[[dict[str, Any]], None]


def samples(*, turn: int = TURN, first: int = 123, times: tuple[float, ...] = TIMES) -> list[dict[str, Any]]:
    """Readings of counters that start over after ``turn`` bytes."""
    rows, sent, received = [], first, first
    for place, time in enumerate(TIMES):
        if place:
            sent, received = sent + SENT[place - 1], received + RECEIVED[place - 1]
        if time in times:
            rows.append({"t_ns": int(time * S), "pcie_tx_bytes": sent % turn, "pcie_rx_bytes": received % turn})
    return rows


def counted(root: Path, rows: list[dict[str, Any]], *edits: Edit, **trial: Any) -> Path:
    """A judged trial of a host tier on one GPU with these samples; ``edits`` change its verdict's windows."""
    folder = write_trial(root, **{"setup": "native-host", **trial})
    judge(folder)
    record = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    record["passes"] = [part for part in record["passes"] if part["workload"] == "repeat" and part["round"] < 3]
    for part in record["passes"]:
        start, end = (int(time * S) for time in SPANS[part["name"], part["round"]])
        part.update(start_ns=start, end_ns=end, durable_ns=0, in_flight=[(start, 1, 1)])
    record["host"]["gpus"] = [GPU]
    record["expected"]["kv_bytes_per_token"] = PER_TOKEN
    verdict = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    verdict["windows"] = [window for window in verdict["windows"] if window["workload"] == "repeat"]
    for window in verdict["windows"]:
        cold = window["name"] == "cold"
        window["by_source"] |= {"computed": TOKENS if cold else 0, "cpu": 0 if cold else TOKENS}
        window["stored_bytes"] = TOKENS * PER_TOKEN if cold else 0
        window["loaded_bytes"] = 0 if cold else TOKENS * PER_TOKEN
        for edit in edits:
            edit(window)
    (folder / "trial.json").write_text(json.dumps(record), encoding="utf-8")
    (folder / "verdict.json").write_text(json.dumps(verdict), encoding="utf-8")
    (folder / "probes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def built(*folders: Path) -> Tables:
    return tables.build(list(folders), folders[0].parents[4] / "tables", baseline="native-host")


def by_direction(data: Tables) -> dict[str, dict[str, Any]]:
    return {row["direction"]: row for row in data.pcie_bytes.iter_rows(named=True)}


def test_sums_by_hand(tmp_path: Path) -> None:
    rows = by_direction(built(counted(tmp_path, samples()), counted(tmp_path, samples(first=4_200_000_000), repeat=1)))
    assert {row["n"] for row in rows.values()} == {2}
    store, load = rows["store"], rows["load"]
    assert (store["counted_bytes"], store["engine_bytes"], store["expected_bytes"]) == (4.4e9, 4e9, 4e9)
    assert store["counted_ratio"] == pytest.approx(1.1) and store["turns"] == 0
    # Each hit turned the counter once, unseen: what samples show is 2 × 25,032,704 bytes.
    assert (load["counted_bytes"], load["engine_bytes"]) == (8.64e9, 8e9)
    assert load["turns"] == 2
    assert load["min_ratio"] == load["max_ratio"] == load["counted_ratio"] == pytest.approx(1.08)


def test_a_counter_of_64_bits_needs_no_turns(tmp_path: Path) -> None:
    rows = by_direction(built(counted(tmp_path, samples(turn=1 << 64, first=1 << 40))))
    assert rows["load"]["turns"] == 0 and rows["load"]["counted_bytes"] == 8.64e9


def test_a_claim_that_is_not_true_stands_out(tmp_path: Path) -> None:
    """Counters of bytes and of tokens that agree and are both a fifth too low: turns can't make up for it."""

    def less(window: dict[str, Any]) -> None:
        if window["name"] != "cold":
            window["by_source"]["cpu"] = TOKENS * 4 // 5
            window["loaded_bytes"] = TOKENS * PER_TOKEN * 4 // 5

    row = by_direction(built(counted(tmp_path, samples(), less)))["load"]
    assert row["counted_ratio"] == pytest.approx(8.64 / 6.4)


def test_an_engine_without_byte_counters_is_compared_by_tokens(tmp_path: Path) -> None:
    rows = by_direction(
        built(counted(tmp_path, samples(), lambda window: window.update(stored_bytes=None, loaded_bytes=None)))
    )
    assert {row["engine_bytes"] for row in rows.values()} == {None}
    assert rows["load"]["counted_ratio"] == pytest.approx(1.08)


@pytest.mark.parametrize(
    ("times", "left"),
    [
        (TIMES[1:], {"load"}),  # nothing from before the cold pass
        (TIMES[:-2], {"store"}),  # nothing from after the last hit
        ((9.5, 10.5, 13.5, 16.5), set()),  # none between the cold pass and the first hit
    ],
)
def test_passes_that_samples_do_not_set_apart_are_left_out(
    tmp_path: Path, times: tuple[float, ...], left: set[str]
) -> None:
    data = built(counted(tmp_path, samples(times=times)))
    assert set(by_direction(data)) == left
    assert data.pcie_trace.height == 2 * (len(times) - 1)  # drawn all the same


def test_a_sum_of_too_many_turns_is_left_out(tmp_path: Path) -> None:
    """60 GB may be off by half a turn for what headers take: any remainder would fit."""

    def more(window: dict[str, Any]) -> None:
        if window["name"] != "cold":
            window["loaded_bytes"] = 30_000_000_000

    assert set(by_direction(built(counted(tmp_path, samples(), more)))) == {"store"}


@pytest.mark.parametrize("missing", ["pcie_tx_bytes", "pcie_rx_bytes"])
def test_a_direction_without_a_counter_has_no_rows(tmp_path: Path, missing: str) -> None:
    rows = [{key: value for key, value in row.items() if key != missing} for row in samples()]
    assert len(by_direction(built(counted(tmp_path, rows)))) == 1


def test_a_counter_that_was_set_back_says_nothing(tmp_path: Path) -> None:
    rows = samples(turn=1 << 64, first=1 << 40)
    for row in rows[5:]:
        row["pcie_rx_bytes"] -= 1 << 40
    assert set(by_direction(built(counted(tmp_path, rows)))) == {"store"}


def test_the_trace_puts_turns_where_the_passes_are(tmp_path: Path) -> None:
    data = built(counted(tmp_path, samples()), counted(tmp_path, samples(), repeat=1))
    trace = data.pcie_trace
    assert set(trace["repeat"]) == {0}  # of each setup one trial
    loads = [
        (row["start_s"], row["pass"], row["turns"], row["gb_per_s"])
        for row in trace.iter_rows(named=True)
        if row["direction"] == "load" and row["gb_per_s"]
    ]
    assert loads == [(2.5, "first-hit", 1, pytest.approx(4.32)), (4.5, "warm", 1, pytest.approx(4.32))]
    stores = trace.filter(trace["direction"] == "store")
    assert stores["gb_per_s"].to_list() == [2.2, 2.2, 0, 0, 0, 0, 0]
    assert stores["pass"].to_list() == ["cold", "cold", None, "first-hit", None, "warm", None]


@pytest.mark.parametrize("width", [style.WIDE, style.NARROW])
def test_the_figure_hatches_what_was_completed_and_clips_nothing(tmp_path: Path, width: float) -> None:
    figure = pcie_trace.draw(built(counted(tmp_path, samples())), width)
    bars = [item for item in figure.axes[0].patches if isinstance(item, Rectangle) and item.get_height()]
    heights = {(round(bar.get_x(), 1), round(bar.get_height(), 2), bool(bar.get_hatch())) for bar in bars}
    assert heights == {(-0.5, -2.2, False), (0.5, -2.2, False), (2.5, 4.32, True), (4.5, 4.32, True)}
    assert {"native-host", "repeat", "cold", "counter started over: completed"} <= set(texts(figure))
    assert clipped(figure) == []


@pytest.mark.usefixtures("no_pdf")
def test_the_report_shows_three_witnesses_and_the_figure(tmp_path: Path) -> None:
    config = config_of(["native-host"], repeats=1, baseline="native-host")
    words = Page(report(tmp_path, [counted(tmp_path, samples())], config)["html"].read_text()).words
    assert "native-host repeat load 1.080 1.000 8.640 8.000 8.000 2 1" in words
    assert pcie_trace.CAPTION in words


@pytest.mark.usefixtures("no_pdf")
def test_without_a_gpu_neither_is_there(tmp_path: Path) -> None:
    folders = write_judged(tmp_path, {name: DEMO[name] for name in ("plain", "native-host")}, repeats=1)
    words = Page(report(tmp_path, folders, config_of(["plain", "native-host"], repeats=1))["html"].read_text()).words
    assert "Bytes over PCIe" not in words and pcie_trace.TITLE not in words
