"""The stand-ins' /metrics pages are recorded ones but for their values: stand-in and parser share no mistake."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
from test_counters_recorded import CPU, H200, setup

from kvladder.config.base import TIERS
from kvladder.counters.reading import Delta, Page, Reading, parse_pages


def stub_pages() -> ModuleType:
    """tests/stub_engine/pages.py, which the stand-in imports as a script's neighbour."""
    path = Path(__file__).parents[1] / "stub_engine" / "pages.py"
    spec = importlib.util.spec_from_file_location("stub_pages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PAGES = stub_pages()
LOADED = {"cpu", "nvme", "remote", "gpu", "loaded_cpu", "loaded_nvme", "loaded_blocks", "loaded_remote"}
LOADED |= {"l1_read_chunks", "l1_hit_tokens", "l2_hit_tokens", "l1_evicted_chunks"}
AFTER_HITS = dict.fromkeys(PAGES.KEYS.keys() - {"started", "capacity_blocks"}, 3.0)
AFTER_COLD = {key: value for key, value in AFTER_HITS.items() if key not in LOADED}
EVERY = [(version, page) for version, pages in PAGES.PAGES.items() for page in pages]


def shape(text: str) -> list[str]:
    """A page without its values: comment lines and series, in their order."""
    return [line if line.startswith("#") else line.rpartition(" ")[0] for line in text.split("\n") if line]


def recorded(version: str, page: str, moment: str) -> str:
    files = [PAGES.RECORDED / f"vllm-{version}" / name / f"{moment}.prom" for name in PAGES.PAGES[version][page]]
    # What is recorded of a family alone may come with its first event.
    return "".join(file.read_text(encoding="utf-8") for file in files if file.exists())


def values(text: str) -> dict[str, float]:
    return {
        series: float(value)
        for series, _, value in (line.rpartition(" ") for line in text.split("\n") if line and line[0] != "#")
    }


@pytest.mark.parametrize(("version", "page"), EVERY)
def test_only_values_differ_from_the_recorded_page(version: str, page: str) -> None:
    """At the start, before any event, and once everything has happened."""
    assert shape(PAGES.render(version, page, {})) == shape(recorded(version, page, "start"))
    assert shape(PAGES.render(version, page, AFTER_HITS)) == shape(recorded(version, page, "after-warm"))


# The other recorded cold passes come after a warm-up with a hit, whose series are there for good.
NO_HIT_YET = [
    ("0.32.0", page)
    for page in ("plain", "prefix-cache", "native", "simple-cpu", "lmcache-mp", "mooncake-store", "lmcache-server")
]


@pytest.mark.parametrize(("version", "page"), NO_HIT_YET)
def test_series_of_hits_come_with_the_first_hit(version: str, page: str) -> None:
    assert shape(PAGES.render(version, page, AFTER_COLD)) == shape(recorded(version, page, "after-cold"))


@pytest.mark.parametrize(("version", "page"), EVERY)
def test_values_are_the_states(version: str, page: str) -> None:
    """Each key that a page knows changes values there, and no other page of counters needs one that nobody has."""
    before, known = values(PAGES.render(version, page, AFTER_HITS)), 0
    for key in AFTER_HITS:
        after = values(PAGES.render(version, page, {**AFTER_HITS, key: 1003.0}))
        changed = {series: after[series] - before[series] for series in before if after[series] != before[series]}
        assert set(changed.values()) <= {1000.0}
        known += bool(changed)
    assert known >= 5


def test_every_key_is_on_some_page() -> None:
    seen = set()
    for version, page in EVERY:
        before = PAGES.render(version, page, AFTER_HITS)
        seen |= {key for key in AFTER_HITS if PAGES.render(version, page, {**AFTER_HITS, key: 1003.0}) != before}
        seen |= {
            key
            for key in ("started", "capacity_blocks")
            if PAGES.render(version, page, {**AFTER_HITS, key: 2.0e9}) != before
        }
    assert seen == PAGES.KEYS.keys()


def test_an_absent_counter_is_absent() -> None:
    text = PAGES.render("0.32.0", "plain", {"computed": None})
    assert "vllm:prompt_tokens_total{" not in text
    assert "vllm:num_requests_running{" in text


def test_what_is_asked_for_by_a_wrong_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no such state: tokens"):
        PAGES.render("0.32.0", "plain", {"tokens": 1.0})
    with pytest.raises(KeyError):
        PAGES.render("0.31.0", "plain", {})


@pytest.mark.parametrize(
    ("connector", "page"),
    [
        (None, "plain"),
        ({"kv_connector": "OffloadingConnector"}, "native"),
        (
            {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"secondary_tiers": [{}]}},
            "native-files",
        ),
        ({"kv_connector": "SimpleCPUOffloadConnector"}, "simple-cpu"),
        ({"kv_connector": "LMCacheMPConnector"}, "lmcache-mp"),
        ({"kv_connector": "MooncakeStoreConnector"}, "mooncake-store"),
    ],
)
def test_the_page_of_an_engine(connector: Mapping[str, object] | None, page: str) -> None:
    assert PAGES.engine_page(connector, prefix_caching=False) == page
    assert PAGES.engine_page(None, prefix_caching=True) == "prefix-cache"


def read(version: str, page: str, before: dict[str, float], after: dict[str, float]) -> Reading:
    """What kvladder reads from the stand-ins of a setup between two states."""
    side = {"lmcache-mp": ("lmcache", "lmcache-server"), "mooncake-store": ("mooncake", "mooncake-master")}.get(page)

    def pages(state: dict[str, float]) -> dict[str, Page | None]:
        texts: dict[str, str | None] = {"engine": PAGES.render(version, page, state)}
        if side is not None:
            texts[side[0]] = PAGES.render(version, side[1], state)
        return parse_pages(texts)

    config = setup("native-host-fs" if page == "native-files" else page)
    return config.read(Delta(pages(before), pages(after)))


STATE = {"computed": 72.0, "external_queries": 1096.0, "device_queries": 1.0, "capacity_blocks": 16384.0}


@pytest.mark.parametrize(
    ("version", "page", "gained", "sources", "loaded"),
    [
        ("0.26.0", "native", {"cpu": 1024, "loaded_cpu": 4096}, {"cpu": 1024}, 4096),
        ("0.32.0", "native", {"cpu": 1024, "loaded_cpu": 4096}, {"cpu": 1024}, 4096),
        ("0.26.0", "native-files", {"nvme": 1024, "loaded_cpu": 4096}, {"unknown": 1024}, 4096),
        ("0.32.0", "native-files", {"nvme": 1024, "loaded_cpu": 4096}, {"nvme": 1024}, 4096),
        ("0.26.0", "simple-cpu", {"cpu": 1024, "loaded_blocks": 64}, {"cpu": 1024}, None),
        ("0.32.0", "simple-cpu", {"cpu": 1024, "loaded_blocks": 64}, {"cpu": 1024}, 64 * 2**21),
        ("0.26.0", "mooncake-store", {"remote": 1024, "loaded_remote": 9}, {"remote": 1024}, 9),
        ("0.32.0", "mooncake-store", {"remote": 1024, "loaded_remote": 9}, {"remote": 1024}, 9),
        # Eight chunks were written and four evicted: four take 8,000 bytes.
        ("0.26.0", "lmcache-mp", {"cpu": 1024, "l1_read_chunks": 4}, {"cpu": 1024}, 8000),
        (
            "0.32.0",
            "lmcache-mp",
            {"cpu": 1024, "l1_read_chunks": 4, "l1_hit_tokens": 512, "l2_hit_tokens": 512},
            {"cpu": 512, "nvme": 512},
            8000,
        ),
    ],
)
def test_readers_understand_the_stand_in(
    version: str, page: str, gained: dict[str, float], sources: dict[str, int], loaded: int | None
) -> None:
    pool = {"l1_written_chunks": 8.0, "l1_evicted_chunks": 4.0, "l1_used_bytes": 8000.0, "requested_tokens": 1096.0}
    before = STATE | pool | {key: 1.0 for key in gained if "loaded" in key or "read" in key}
    after = before | {"computed": 144.0} | {key: before.get(key, 0.0) + value for key, value in gained.items()}
    reading = read(version, page, before, after)
    assert reading.problems == []
    assert reading.by_source == dict.fromkeys(TIERS, 0) | {"computed": 72} | sources
    assert reading.loaded_bytes == loaded


def test_versions_are_those_of_the_stacks() -> None:
    assert {f"vllm-{version}" for version in PAGES.PAGES} == {H200, CPU}
