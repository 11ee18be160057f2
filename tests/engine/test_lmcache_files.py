"""LMCache's server with files below its pool, on real vLLM: hits come back from disk, and what comes back is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_pipeline import CONFIG, HIT, PROMPT, run_pipeline, sources

ADAPTERS = ("fs", "fs_native")
LMCACHE = {"kind": "lmcache-mp", "cpu_bytes": "32MiB", "chunk_tokens": 128, "shared_memory": True}
# Of two layers with two heads of 64: bfloat16 keys and values.
PER_TOKEN = 2 * 2 * 2 * 64 * 2

EXPERIMENT = CONFIG | {
    "experiment": "lmcache-files",
    "baseline": "prefix-cache",
    "setups": {
        "prefix-cache": {"kind": "prefix-cache"},
        **{adapter: LMCACHE | {"files": {"adapter": adapter}} for adapter in ADAPTERS},
    },
    "workloads": {"repeat": {"kind": "repeat", "prompt_tokens": PROMPT, "warm_passes": 2}},
    "suites": {"main": ["repeat"]},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run's working folder."""
    folder = tmp_path_factory.mktemp("lmcache-files")
    run_pipeline(EXPERIMENT, folder, "tables", timeout=900)
    return folder


def written(run: Path, adapter: str, name: str) -> dict[str, Any]:
    (path,) = (run / "results" / "lmcache-files" / "trials" / adapter / "main").glob(f"*/{name}.json")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_hits_come_from_disk_first_and_are_right(run: Path, adapter: str) -> None:
    found = written(run, adapter, "verdict")
    assert found["status"] == "valid", found["reason"]
    cold, first, warm = (window for window in found["windows"] if window["workload"] == "repeat")
    assert sources(cold["by_source"]) == {"computed": PROMPT}
    assert sources(first["by_source"]) == {"nvme": HIT, "computed": PROMPT - HIT}
    assert sources(warm["by_source"]) == {"cpu": HIT, "computed": PROMPT - HIT}
    moved = [
        {kind: window[f"{kind}_bytes"] for kind in ("stored", "loaded", "disk_write", "disk_read")}
        for window in (cold, first, warm)
    ]
    size = HIT * PER_TOKEN
    assert moved[0] == {"stored": size, "loaded": 0, "disk_write": size, "disk_read": moved[0]["disk_read"]}
    assert moved[1] == {"stored": 0, "loaded": size, "disk_write": 0, "disk_read": size}
    assert moved[2] == {"stored": 0, "loaded": size, "disk_write": 0, "disk_read": 0}
    decided = {(gate["gate"], gate["decision"]) for gate in found["gates"]}
    assert {("right-kv", "pass"), ("config-readback", "pass"), ("tier-was-used", "pass")} <= decided
    assert all(part["beyond"] == 0 for part in found["deviations"])


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_files_are_past_the_page_cache_and_gone_afterwards(run: Path, adapter: str) -> None:
    disk = written(run, adapter, "trial")["effective"]["details"]["disk"]
    assert disk["files"] > 0 and disk["bytes"] == disk["files"] * 128 * PER_TOKEN
    assert disk["cached_bytes"] == 0
    folder = next((run / "results" / "lmcache-files" / "trials" / adapter / "main").iterdir())
    assert not (folder / "tier").exists()
