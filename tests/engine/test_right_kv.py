"""A tier that gives back wrong KV, on real vLLM through the whole pipeline: caught, in each way of being wrong.

The wrong tier is kvladder's host copier with a fault, put in by a vLLM plugin that only this test has on an engine's
path (``wrong_kv``). All of them hit, move every byte and are fast: only the answers tell them from the honest one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from test_pipeline import CONFIG, run_pipeline

WRONG = Path(__file__).with_name("wrong_kv")
HONEST = {"kind": "native", "copier": "host", "cpu_bytes": "64MiB"}
WAYS = ("swapped-block", "stale-layer", "other-prompt")


def wrong(way: str) -> dict[str, Any]:
    """The honest setup with a fault in its engine's environment."""
    return HONEST | {"env": {"PYTHONPATH": str(WRONG), "KVLADDER_TEST_WRONG_KV": way}}


EXPERIMENT = CONFIG | {
    "experiment": "wrong-kv",
    "baseline": "prefix-cache",
    "setups": {"prefix-cache": {"kind": "prefix-cache"}, "honest": HONEST, **{way: wrong(way) for way in WAYS}},
    "workloads": {"repeat": {"kind": "repeat", "prompt_tokens": 1032}},
    "suites": {"main": ["repeat"]},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run's working folder."""
    folder = tmp_path_factory.mktemp("wrong")
    run_pipeline(EXPERIMENT, folder, "tables", timeout=900)
    return folder


def verdict(run: Path, setup: str) -> dict[str, Any]:
    (path,) = (run / "results" / "wrong-kv" / "trials" / setup / "main").glob("*/verdict.json")
    return json.loads(path.read_text(encoding="utf-8"))


def decisions(found: dict[str, Any]) -> dict[str, set[str]]:
    """What each gate said."""
    by_gate: dict[str, set[str]] = {}
    for result in found["gates"]:
        by_gate.setdefault(result["gate"], set()).add(result["decision"])
    return by_gate


@pytest.mark.engine
@pytest.mark.parametrize("setup", ["prefix-cache", "honest"])
def test_right_kv_passes(run: Path, setup: str) -> None:
    found = verdict(run, setup)
    assert found["status"] == "valid", found["reason"]
    assert decisions(found)["right-kv"] == {"pass"}
    for part in found["deviations"]:
        assert (part["prompts"], part["beyond"], part["flipped"]) == (8, 0, 0)
        assert part["largest"] < part["limit"] / 2


@pytest.mark.engine
@pytest.mark.parametrize("way", WAYS)
def test_wrong_kv_is_caught(run: Path, way: str) -> None:
    found = verdict(run, way)
    assert found["status"] == "invalid"
    assert found["reason"].startswith("right-kv: expected first hits within"), found["reason"]
    # Nothing else that decides notices, or this test would prove less than it says.
    assert {gate["gate"] for gate in found["gates"] if gate["required"] and gate["decision"] == "fail"} == {"right-kv"}
    assert decisions(found)["tier-was-used"] == {"pass"}
    for part in found["deviations"]:
        assert part["beyond"] == part["prompts"] == 8
        assert part["largest"] > 2 * part["limit"]


@pytest.mark.engine
def test_wrong_numbers_are_in_no_table_but_right_kvs(run: Path) -> None:
    tables = run / "results" / "wrong-kv" / "tables"
    assert set(pl.read_parquet(tables / "passes.parquet")["setup"]) == {"prefix-cache", "honest"}
    rows = pl.read_parquet(tables / "right_kv.parquet")
    assert dict(rows.select("setup", "verdict").unique().iter_rows()) == (
        {"prefix-cache": "right", "honest": "right"} | dict.fromkeys(WAYS, "wrong")
    )
