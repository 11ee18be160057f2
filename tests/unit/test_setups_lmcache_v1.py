"""LMCache inside the engine: its file, what it says of itself, its counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from test_trial_engine import context, setup

from kvladder.config.base import TIERS
from kvladder.config.stack import load as load_stack
from kvladder.counters.reading import Delta, Reading, parse_pages
from kvladder.trial.engine import engine_spec

ENVS = Path(__file__).parents[2] / "envs"
LABELS = 'model_name="m",role="worker",served_model_name="",worker_id="0"'


def test_everything_of_lmcache_is_in_its_file(tmp_path: Path) -> None:
    one = setup("lmcache-v1", cpu_bytes="1.5GiB", chunk_tokens=128, eviction="LFU", lmcache={"use_layerwise": True})
    spec = engine_spec(one, context(tmp_path), "key")
    assert '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}' in spec.argv
    written = yaml.safe_load((tmp_path / "lmcache.yaml").read_text())
    assert written == {
        "chunk_size": 128,
        "local_cpu": True,
        "max_local_cpu_size": 1.5,
        "cache_policy": "LFU",
        "save_decode_cache": False,
        "save_unfull_chunk": False,
        "use_layerwise": True,
    }
    assert spec.env["LMCACHE_CONFIG_FILE"] == str(tmp_path / "lmcache.yaml")
    assert spec.env["LMCACHE_TRACK_USAGE"] == "false"
    assert spec.env["PYTHONHASHSEED"] == "0"


@pytest.mark.parametrize("key", ["chunk_size", "max_local_cpu_size", "cache_policy"])
def test_a_key_with_a_setting_of_its_own_is_refused(key: str) -> None:
    """Hits and capacity are expected of the setting: another number in the file would make a fault of the engine's."""
    with pytest.raises(ValueError, match=f"{key} is set by the setup's own"):
        setup("lmcache-v1", cpu_bytes=1, lmcache={key: 16})


def test_counters_of_earlier_servers_are_not_added_to(tmp_path: Path) -> None:
    """Where it isn't told, LMCache takes a folder in /tmp that nobody empties."""
    folder = Path(
        engine_spec(setup("lmcache-v1", cpu_bytes=1), context(tmp_path), "key").env["PROMETHEUS_MULTIPROC_DIR"]
    )
    assert folder.is_relative_to(tmp_path)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("prompt", "hit"), [(255, 0), (256, 255), (257, 256), (31_000, 30_976)])
def test_hits_are_whole_chunks_but_for_the_last_token(prompt: int, hit: int) -> None:
    """LMCache finds a prompt of whole chunks entirely, and vLLM computes its last token all the same."""
    assert setup("lmcache-v1", cpu_bytes=1).expected_hit(prompt, 16) == hit


@pytest.mark.parametrize("stack", ["cpu", "cuda"])
def test_a_fallback_to_slow_python_is_seen(stack: str) -> None:
    native = load_stack(ENVS / stack).native
    assert all(native[key] for key in setup("lmcache-v1", cpu_bytes=1).native_modules())


LINE = (
    "[2026-11-29 20:19:48] LMCache INFO: Creating LMCacheEngine with config: {'chunk_size': 256, 'local_cpu': True, "
    "'max_local_cpu_size': 5.0, 'remote_url': None, 'pd_allocation_timeout_sec': inf, 'cache_policy': 'LRU'} "
    "(cache_engine.py:109:lmcache.v1.cache_engine)\n"
)
ADJUSTED = (
    "[2026-11-29 20:19:48] LMCache INFO: Adjusted CPU memory size from 5.00 GB to {} GB (system available: 3.25 GB, "
    "reserve: 0.00 GB) (local_cpu_backend.py:338:lmcache.v1.storage_backend.local_cpu_backend)\n"
)


def test_the_configuration_that_it_says_it_runs_with() -> None:
    """As LMCache 0.5.3 and 0.5.6 log it: what it prints isn't all literals."""
    one = setup("lmcache-v1", cpu_bytes="5GiB")
    said = one.settings_read("first\n" + LINE + ADJUSTED.format("5.00"))
    assert said == {
        "chunk_size": 256,
        "local_cpu": True,
        "max_local_cpu_size": 5.0,
        "remote_url": None,
        "cache_policy": "LRU",
    }
    assert said["max_local_cpu_size"] == one.settings()["max_local_cpu_size"]
    assert one.settings_read("nothing of it\n") is None
    assert one.settings_read("Creating LMCacheEngine with config: {'a': <object at 0x7f>}") == {}


def test_a_pool_that_is_cut_to_the_memory_there_is() -> None:
    """LMCache only mentions it."""
    said = setup("lmcache-v1", cpu_bytes="5GiB").settings_read(LINE + ADJUSTED.format("3.25"))
    assert said["max_local_cpu_size"] == 3.25


def page(prompt: int, external: int, *, stored: int = 0, loaded: int = 0, used: int = 0, evicted: int = 0) -> str:
    source = "vllm:prompt_tokens_by_source_total{source="
    return (
        f"vllm:prompt_tokens_total {prompt}\n"
        f'{source}"local_compute"}} {prompt - external}\n{source}"local_cache_hit"}} 0\n'
        f'{source}"external_kv_transfer"}} {external}\n'
        f"lmcache:num_stored_tokens_total{{{LABELS}}} {stored}\nlmcache:num_hit_tokens_total{{{LABELS}}} {loaded}\n"
        f"lmcache:local_cpu_evict_keys_count_total{{{LABELS}}} {evicted}\n"
        f"lmcache:local_cache_usage{{{LABELS}}} {used}\n"
    )


def read(start: str, end: str, **lmcache: Any) -> Reading:
    reading: Reading = setup("lmcache-v1", cpu_bytes=1, lmcache=lmcache).read(
        Delta(parse_pages({"engine": start}), parse_pages({"engine": end}))
    )
    return reading


def test_bytes_are_those_of_the_pool() -> None:
    """1,024 tokens are resident in 4 MiB once a chunk of 256 was evicted; the engine's counters have no part in it."""
    stored = page(1280, 0, stored=1280, used=4 << 20, evicted=1)
    assert read(page(0, 0), stored).stored_bytes == 1280 * 4096
    hit = read(stored, page(2304, 768, stored=1280, loaded=1024, used=4 << 20, evicted=1))
    assert hit.by_source == dict.fromkeys(TIERS, 0) | {"cpu": 768, "computed": 256}
    assert (hit.stored_bytes, hit.loaded_bytes) == (0, 1024 * 4096)


def test_an_engine_that_never_used_it() -> None:
    """No pool, no bytes of it: unknown, and everything computed, which is what `tier-was-used` fails on."""
    reading = read(page(0, 0), page(1032, 0))
    assert reading.by_source["computed"] == 1032
    assert reading.by_source["cpu"] == 0
    assert (reading.stored_bytes, reading.loaded_bytes) == (None, None)


def test_more_than_one_place_makes_hits_unknown() -> None:
    reading = read(page(0, 0), page(1032, 1024), local_disk="/tmp/x")
    assert (reading.by_source["cpu"], reading.by_source["unknown"]) == (0, 1024)


def test_store_activity_is_lmcaches() -> None:
    one = setup("lmcache-v1", cpu_bytes=1)
    activity = one.store_activity(parse_pages({"engine": page(1280, 0, stored=1280, used=5)}))
    assert activity == {"lmcache:num_stored_tokens_total": 1280.0, "lmcache:local_cache_usage": 5.0}
    # LMCache not running at all: nobody can tell, which isn't rest.
    assert one.store_activity(parse_pages({"engine": "vllm:prompt_tokens_total 1\n"})) is None
