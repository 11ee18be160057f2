"""Two real engines a trial: one finds what the other stored where the setup shares its pool, and only there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_pipeline import CONFIG, HIT, PROMPT, run_pipeline, sources

PROMPTS = 2
TIERS = {"lmcache-mp": "cpu", "mooncake-store": "remote", "native-host": "cpu"}
SHARED = ("lmcache-mp", "mooncake-store")
SHARING: dict[str, Any] = {
    **{key: value for key, value in CONFIG.items() if key != "suites"},
    "experiment": "tiny-sharing",
    "baseline": "mooncake-store",
    "right_kv": None,
    "setups": {
        "mooncake-store": {"kind": "mooncake-store", "segment_bytes": "256MiB", "buffer_bytes": "64MiB"},
        "lmcache-mp": {"kind": "lmcache-mp", "cpu_bytes": "256MiB", "shared_memory": True},
        "native-host": {"kind": "native", "copier": "host", "cpu_bytes": "16MiB"},
    },
    "workloads": {"sharing": {"kind": "sharing", "prompts": PROMPTS, "prompt_tokens": PROMPT}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run's working folder."""
    folder = tmp_path_factory.mktemp("sharing")
    run_pipeline(SHARING, folder, "judge", timeout=1200)
    return folder


def trial(run: Path, setup: str, name: str) -> dict[str, Any]:
    (path,) = (run / "results" / "tiny-sharing" / "trials" / setup / "sharing").glob(f"*/{name}.json")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("setup", TIERS)
def test_what_a_second_engine_finds(run: Path, setup: str) -> None:
    verdict = trial(run, setup, "verdict")
    assert verdict["status"] == "valid", verdict["reason"]
    found = {window["name"]: sources(window["by_source"]) for window in verdict["windows"]}
    everything = {"computed": PROMPTS * PROMPT}
    hit = {TIERS[setup]: PROMPTS * HIT, "computed": PROMPTS * (PROMPT - HIT)}
    assert found == {"cold": everything, "first-hit": hit if setup in SHARED else everything, "warm": hit}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("setup", TIERS)
def test_both_engines_are_alike_and_gone(run: Path, setup: str) -> None:
    record = trial(run, setup, "trial")
    first, second = record["effective"], record["further_engines"]["engine-2"]["effective"]
    for key in ("kv_pool_tokens", "block_size", "connector", "prefix_caching", "engine_version"):
        assert first[key] is not None and first[key] == second[key]
    assert not any(Path("/proc", str(server["pid"])).exists() for server in record["servers"])
