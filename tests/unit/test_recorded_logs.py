"""What is read from servers' logs, on recorded ones of both vLLM versions (tests/data/logs)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvladder.serving.rootcause import root_cause
from kvladder.setups.lmcache_v1 import LmcacheV1
from kvladder.trial.readback import connectors_created, engine_version, kv_pool_tokens

RECORDED = Path(__file__).parents[1] / "data" / "logs"
DEGRADED = RECORDED / "vllm-0.32.0" / "lmcache-v1.log"
ENGINES = {
    "vllm-0.26.0": {
        "plain": [],
        "native": ["OffloadingConnector"],
        "simple-cpu": ["SimpleCPUOffloadConnector"],
        "lmcache-mp": ["LMCacheMPConnector"],
        "mooncake-store": ["MooncakeStoreConnector"],
    },
    "vllm-0.32.0": {
        "plain": [],
        "prefix-cache": [],
        "native-host": ["OffloadingConnector"],
        "native-host-fs": ["OffloadingConnector"],
        "lmcache-mp": ["LMCacheMPConnector"],
        "mooncake-store": ["MooncakeStoreConnector"],
    },
}
POOL = {"vllm-0.26.0": 196_608, "vllm-0.32.0": 32_768}


def log(version: str, name: str) -> str:
    # As it is: a log may hold carriage returns and colours.
    with (RECORDED / version / f"{name}.log").open(encoding="utf-8", newline="") as stream:
        return stream.read()


@pytest.mark.parametrize(("version", "name"), [(version, name) for version in ENGINES for name in ENGINES[version]])
def test_what_engines_say_of_themselves(version: str, name: str) -> None:
    text = log(version, name)
    assert kv_pool_tokens(text) == POOL[version]
    assert engine_version(text) == version.removeprefix("vllm-")
    assert connectors_created(text) == ENGINES[version][name]


@pytest.mark.parametrize(
    "path", sorted(set(RECORDED.glob("*/*.log")) - {DEGRADED}), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_a_healthy_server_gives_no_cause(path: Path) -> None:
    """vLLM 0.26 warns with a whole traceback in each start, Mooncake logs an error: neither explains a later death."""
    text = log(path.parent.name, path.stem)
    assert root_cause(text.partition("Application startup complete.")[0]) is None


def test_an_engine_that_went_without_a_word() -> None:
    """Recorded when a server was stopped: all that its API process then says is that the engine is gone."""
    cause = root_cause(log("vllm-0.26.0", "mooncake-store"))
    assert cause is not None
    assert cause.startswith("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")


@pytest.mark.parametrize("name", ENGINES["vllm-0.26.0"])
def test_the_cause_after_a_healthy_start_is_found(name: str) -> None:
    death = (
        "(EngineCore pid=4954) ERROR 11-29 17:39:40 [core.py:1143] EngineCore encountered a fatal error.\n"
        "(EngineCore pid=4954) ERROR 11-29 17:39:40 [core.py:1143] Traceback (most recent call last):\n"
        '(EngineCore pid=4954) ERROR 11-29 17:39:40 [core.py:1143]   File "manager.py", line 9, in prepare_store\n'
        "(EngineCore pid=4954) ERROR 11-29 17:39:40 [core.py:1143] KeyError: 'cmpl-7'\n"
    )
    assert root_cause(log("vllm-0.26.0", name) + death) == "KeyError: 'cmpl-7'"


def test_lmcache_that_gave_up_in_the_engine() -> None:
    """The engine serves on and computes everything; what LMCache runs with is unknown, because it never ran."""
    text = log("vllm-0.32.0", "lmcache-v1")
    assert connectors_created(text) == ["LMCacheConnectorV1"]
    assert LmcacheV1(kind="lmcache-v1", cpu_bytes=2**26).settings_read(text) is None
    assert "System will operate in degraded mode (recompute)" in text
