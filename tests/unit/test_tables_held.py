"""Measuring share: what a trial held its GPU or machine for, and what the harness took meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from table_factory import DEMO, config_of, judge, write_judged
from test_report import Page, no_pdf, report  # noqa: F401 (a fixture)
from trial_factory import S, write_trial

from kvladder import tables
from kvladder.tables.held import PARTS

GPU = {
    "device": "0",
    "name": "Test GPU",
    "memory_bytes": 140 << 30,
    "pcie_generation_max": 5,
    "pcie_width_max": 16,
}


def second_by_second(trial: dict[str, Any]) -> None:
    """40 s to ready, 3 s warm-up, 12 s with 7 s of passes, 4 s of right-kv, 1 s to stop: 60 s in all."""
    start = trial["servers"][0]["start_ns"]
    trial["marks"] = {
        "begin": start - S // 4,
        "ready": start + 40 * S,
        "warm": start + 43 * S,
        "measured": start + 55 * S,
        "checked": start + 59 * S,
        "stopped": start + 60 * S,
    }
    trial["end_ns"] = start + 61 * S
    cold, hit = trial["passes"][0], trial["passes"][1]
    right_kv = {**cold, "workload": "right-kv"}
    for part, begin, end, cpu in ((cold, 43, 48, 30), (hit, 50, 52, 40), (right_kv, 55, 59, 900)):
        part.update(
            start_ns=start + begin * S,
            end_ns=start + end * S,
            in_flight=[(start + begin * S, 1, 1)],
            client_cpu_ns=cpu * S // 1000,
        )
    trial["passes"] = [cold, hit, right_kv]
    trial["host"].update(gpus=[GPU], cores=10)


def sampled(rows: list[dict[str, Any]]) -> None:
    """A sampler that takes 20 ms of a core every half second."""
    for place, row in enumerate(rows):
        row["sampler_cpu_ns"] = 500_000_000 + place * 20_000_000


def judged(root: Path, *edits: Callable[[dict[str, Any]], None], status: str = "valid", **trial: Any) -> Path:
    """A trial whose record is edited once it is judged: the passes of right-kv have no requests on disk."""
    folder = write_trial(root, **trial)
    judge(folder, status, None if status == "valid" else "drained: not flat")
    data = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    for edit in edits:
        edit(data)
    (folder / "trial.json").write_text(json.dumps(data), encoding="utf-8")
    return folder


def held(folder: Path) -> dict[str, Any]:
    return tables.build([folder], folder / "tables", baseline="plain").held.row(0, named=True)


def test_a_trial_by_hand(tmp_path: Path) -> None:
    row = held(judged(tmp_path, second_by_second, setup="native-host", edit_probes=sampled))
    assert row["held_s"] == 60
    assert [row[name] for name in PARTS] == [40, 3, 7, 5, 4, 1]
    assert row["rest_s"] == 0 and row["gpus"] == 1
    # 70 ms of CPU in 7 s on ten cores; what right-kv took is no part of it. 20 ms in 500 ms on ten cores.
    assert row["client_cpu_s"] == pytest.approx(0.07)
    assert row["client_share"] == pytest.approx(0.001)
    assert row["sampler_share"] == pytest.approx(0.004)


def test_what_was_not_recorded_is_unknown(tmp_path: Path) -> None:
    def silent(trial: dict[str, Any]) -> None:
        trial["passes"][1]["client_cpu_ns"] = None

    row = held(judged(tmp_path, second_by_second, silent, setup="native-host"))
    assert row["client_share"] is None and row["client_cpu_s"] is None and row["sampler_share"] is None


def test_a_trial_that_failed_keeps_what_it_lost(tmp_path: Path) -> None:
    def broken(trial: dict[str, Any]) -> None:
        for name in ("measured", "checked", "stopped"):
            del trial["marks"][name]

    folder = judged(tmp_path, second_by_second, broken, setup="native-host", failed="engine: KeyError", status="failed")
    row = held(folder)
    assert [row[name] for name in PARTS] == [40, 3, None, None, None, None]
    assert row["held_s"] == 61 and row["rest_s"] == 18


def test_what_right_kv_took_is_unknown_where_it_broke_off(tmp_path: Path) -> None:
    def broken(trial: dict[str, Any]) -> None:
        for name in ("checked", "stopped"):
            del trial["marks"][name]

    folder = judged(tmp_path, second_by_second, broken, setup="native-host", failed="engine: KeyError", status="failed")
    row = held(folder)
    assert [row[name] for name in PARTS] == [40, 3, 7, 5, None, None]
    assert row["held_s"] == 61 and row["rest_s"] == 6


def test_a_trial_without_right_kv_spends_nothing_on_it(tmp_path: Path) -> None:
    row = held(judged(tmp_path, second_by_second, lambda trial: trial["marks"].pop("checked"), setup="plain"))
    assert [row[name] for name in PARTS] == [40, 3, 7, 5, 0, 5]


def test_a_trial_that_started_nothing_held_nothing(tmp_path: Path) -> None:
    folder = write_trial(tmp_path, edit_trial=lambda trial: trial.update(servers=[]))
    judge(folder)
    assert tables.build([folder], tmp_path / "tables", baseline="plain").held.height == 0


@pytest.mark.usefixtures("no_pdf")
def test_the_report_counts_all_trials_and_divides_by_the_valid_ones(tmp_path: Path) -> None:
    folders = [
        judged(tmp_path, second_by_second, setup=setup, repeat=repeat, status=status)
        for setup, repeat, status in (
            ("plain", 0, "valid"),
            ("plain", 1, "valid"),
            ("native-host", 0, "valid"),
            ("native-host", 1, "invalid"),
        )
    ]
    words = Page(report(tmp_path, folders, config_of(["plain", "native-host"], repeats=2))["html"].read_text()).words
    # Four trials of 60 s, three of them valid with 7 s of passes each.
    assert "4 trials held the GPU for 240 s, 80 GPU seconds for each of the 3 valid ones; 9 % of it" in words
    assert "native-host 60.0 6 % 120.0 40.0 3.0 7.0 5.0 4.0 1.0 2" in words
    assert "On 10 cores, the load client took 0.10 % of the host's cores" in words
    assert "GPU 0 Test GPU, 140 GiB, PCIe Gen5, ×16, device 0" in words


@pytest.mark.usefixtures("no_pdf")
def test_without_a_gpu_it_is_the_machine(tmp_path: Path) -> None:
    folders = write_judged(tmp_path, {"plain": DEMO["plain"]}, repeats=1)
    words = Page(report(tmp_path, folders, config_of(["plain"], repeats=1))["html"].read_text()).words
    assert "1 trial held the machine for" in words and "machine seconds for each of the 1 valid ones" in words
