"""The table of predicted and measured hits, and what the report says of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from test_gates_hits import FOUR, HIT, lose, native
from trial_factory import BLOCK, write_trial

from kvladder.judge import judge_trial
from kvladder.report.oracle import hits
from kvladder.tables.build import build
from kvladder.tables.model import Tables

SETUPS = ("plain", "prefix-cache", "native-host")


def judged(root: Path, setup: str, **more: Any) -> Path:
    folder = write_trial(root, setup=setup, workloads=FOUR, **more)
    (folder / "verdict.json").write_text(judge_trial(folder).model_dump_json(by_alias=True), encoding="utf-8")
    return folder


def tables(root: Path, **native_host: Any) -> Tables:
    folders = [judged(root, setup, **(native_host if setup == "native-host" else {})) for setup in SETUPS]
    return build(folders, root / "tables", baseline="plain")


def section(built: Tables) -> dict[str, Any]:
    return hits(built, {name: SimpleNamespace(label=name) for name in SETUPS})


def test_where_everything_fits(tmp_path: Path) -> None:
    built = tables(tmp_path)
    data = built.oracle
    # A setup without a tier has nothing to predict; each other one has three passes.
    assert data.select("setup", "pass").rows() == [
        (setup, name) for setup in ("native-host", "prefix-cache") for name in ("cold", "first-hit", "warm")
    ]
    row = data.row(by_predicate=(pl.col("setup") == "native-host") & (pl.col("pass") == "warm"), named=True)
    assert (row["predicted_cpu"], row["measured_cpu"], row["predicted_gpu"]) == (HIT, HIT, 0)
    assert row["ceiling"] == pytest.approx(HIT / 12_000)
    assert row["working_set_tokens"] == HIT
    assert row["capacity_cpu_tokens"] == 2**30 // 24_576 // BLOCK * BLOCK
    assert row["capacity_gpu_tokens"] is None
    assert (row["exact"], row["agrees"], row["evicts"], row["note"]) == (True, True, False, None)
    said = section(built)
    assert said["rows"] == []
    assert said["sentence"] == (
        "Of 6 passes, 6 hit what the oracle predicts; which is all that tiers without limits would give."
    )


def test_where_the_tier_is_too_small(tmp_path: Path) -> None:
    built = tables(tmp_path, setup_config=native(60), edit_counters=lose(HIT, "first-hit/1", "warm/2"))
    data = built.oracle.filter((pl.col("setup") == "native-host") & (pl.col("pass") != "cold"))
    assert data.select("predicted_hits", "measured_hits", "evicts", "agrees").rows() == [(0, 0, True, True)] * 2
    assert data["note"][0].startswith("thrash: working set 11776 tokens, cpu holds 7680")
    said = section(built)
    assert [(row["setup"].label, row["pass"]) for row in said["rows"]] == [
        ("native-host", "first-hit"),
        ("native-host", "warm"),
    ]
    row = said["rows"][0]
    assert (row["ceiling"], row["predicted"], row["measured"]) == ("98.1 %", "0.0 %", "0.0 %")
    assert (row["working_set"], row["capacity"], row["agrees"]) == ("11,776", "cpu 7,680", True)
    assert said["sentence"] == "Of 6 passes, 6 hit what the oracle predicts."


def test_where_the_counters_say_something_else(tmp_path: Path) -> None:
    """The trial is invalid, and the table shows why."""
    built = tables(tmp_path, edit_counters=lose(BLOCK, "warm/2"))
    (row,) = built.oracle.filter(~pl.col("agrees")).rows(named=True)
    assert (row["status"], row["pass"], row["predicted_cpu"] - row["measured_cpu"]) == ("invalid", "warm", BLOCK)
    assert row["note"] == f"predicted cpu {HIT} hit"
    said = section(built)
    assert [row["agrees"] for row in said["rows"]] == [False]
    assert said["sentence"] == ("Of 6 passes, 5 hit what the oracle predicts; 1 hit something else (native-host).")


def test_a_trial_that_can_not_be_replayed_has_no_rows(tmp_path: Path) -> None:
    folder = judged(tmp_path, "native-host")
    (folder / "four.requests.jsonl").unlink()
    assert not build([folder], tmp_path / "tables", baseline="plain").oracle.height


def test_no_tier_no_section(tmp_path: Path) -> None:
    built = build([judged(tmp_path, "plain")], tmp_path / "tables", baseline="plain")
    assert section(built) == {"sentence": None, "rows": []}
