"""LMCache's in-process statistics, and the keys of its configuration that kvladder's lmcache-v1 writes."""

import importlib
import re
from pathlib import Path

from kvladder_engine_plugin.lmcache_stats import VARIABLE, count_often, shorten

SETUP = Path(__file__).parents[2] / "workflow" / "kvladder" / "setups" / "lmcache_v1.py"


def test_the_interval_is_ours_whatever_lmcache_asks_for(monkeypatch) -> None:
    observability = importlib.import_module("lmcache.observability")
    seen = []
    monkeypatch.setattr(
        observability.LMCacheStatsLogger, "__init__", lambda self, metadata, log_interval: seen.append(log_interval)
    )
    shorten(0.25)
    shorten(0.5)
    observability.LMCacheStatsLogger(None, log_interval=10)
    assert seen == [0.5]


def test_only_the_variable_asks_for_it_and_only_when_a_connector_is_made(monkeypatch) -> None:
    factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    module = importlib.import_module("kvladder_engine_plugin.lmcache_stats")
    made, shortened = [], []
    monkeypatch.setattr(factory, "create_connector", lambda *args: made.append(args))
    monkeypatch.setattr(module, "shorten", shortened.append)
    monkeypatch.delenv(VARIABLE, raising=False)
    count_often()
    factory.create_connector(1)
    assert (made, shortened) == ([(1,)], [])
    monkeypatch.setenv(VARIABLE, "0.1")
    count_often()
    count_often()
    assert shortened == []
    factory.create_connector(2)
    assert (made, shortened) == ([(1,), (2,)], [0.1])


def test_lmcache_knows_every_key_that_is_written() -> None:
    """It only warns about one that it doesn't know, and runs with its default."""
    known = importlib.import_module("lmcache.v1.config")._CONFIG_DEFINITIONS
    body = SETUP.read_text(encoding="utf-8").partition("def settings(")[2].partition("def settings_read(")[0]
    written = re.findall(r'^ +"(\w+)":', body, re.MULTILINE)
    assert "max_local_cpu_size" in written
    assert set(written) <= known.keys()
    others = re.search(r"^OTHER_TIERS = \((.*)\)$", SETUP.read_text(encoding="utf-8"), re.MULTILINE)
    assert others is not None
    assert set(re.findall(r'"(\w+)"', others[1])) <= known.keys()
