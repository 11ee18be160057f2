"""Readings of recorded /metrics pages (tests/data/metrics): what the published trials and those of a CPU really had."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvladder.config import registry
from kvladder.config.base import TIERS
from kvladder.counters.mooncake import store_activity
from kvladder.counters.reading import ACTIVE, Delta, Page, Reading, parse_page, parse_pages
from kvladder.setups.base import SetupConfig

RECORDED = Path(__file__).parents[1] / "data" / "metrics"
H200, CPU = "vllm-0.26.0", "vllm-0.32.0"
GIB = 2**30

SETUPS: dict[str, dict[str, Any]] = {
    "plain": {"kind": "plain"},
    "prefix-cache": {"kind": "prefix-cache"},
    "native": {"kind": "native", "cpu_bytes": 32 * GIB},
    "native-host": {"kind": "native", "copier": "host", "cpu_bytes": "512MiB"},
    "native-host-fs": {"kind": "native", "copier": "host", "cpu_bytes": "16MiB", "files": {}},
    "simple-cpu": {"kind": "simple-cpu", "cpu_bytes": 32 * GIB},
    "lmcache-mp": {"kind": "lmcache-mp", "cpu_bytes": 32 * GIB},
    "lmcache-mp-files": {"kind": "lmcache-mp", "cpu_bytes": "32MiB", "chunk_tokens": 128, "files": {}},
    "lmcache-v1": {"kind": "lmcache-v1", "cpu_bytes": "64MiB"},
    "mooncake-store": {"kind": "mooncake-store", "segment_bytes": 32 * GIB, "buffer_bytes": 4 * GIB},
}
SIDE = {
    "lmcache-mp": ("lmcache", "lmcache-server"),
    "lmcache-mp-files": ("lmcache", "lmcache-server-files"),
    "mooncake-store": ("mooncake", "mooncake-master"),
}


def setup(name: str) -> SetupConfig:
    config: SetupConfig = registry.load("setups", SETUPS[name]["kind"]).CONFIG.model_validate(SETUPS[name])
    return config


def pages(version: str, name: str, moment: str) -> dict[str, Page | None]:
    """The parsed pages of a setup's servers at one moment."""
    folders = {"engine": name}
    if name in SIDE:
        server, folder = SIDE[name]
        folders[server] = folder
    texts = {server: (RECORDED / version / folder / f"{moment}.prom").read_text() for server, folder in folders.items()}
    return parse_pages(texts)


def window(version: str, name: str, start: str, end: str) -> Reading:
    return setup(name).read(Delta(pages(version, name, start), pages(version, name, end)))


@dataclass(frozen=True)
class Case:
    """What a window must read as; sources that aren't named are 0, bytes that aren't are unknown."""

    version: str
    setup: str
    start: str
    end: str
    sources: dict[str, int]
    stored: int | None = None
    loaded: int | None = None
    written: int | None = None
    read: int | None = None


# One prompt of 31,000 tokens at 128 KiB of KV each, on an H200. It is hit in blocks of 16 tokens, LMCache's in chunks
# of 256; the whole of it is stored but for the last block or chunk, which isn't full.
PROMPT, BLOCKS, CHUNKS, PER_TOKEN = 31_000, 30_992, 30_976, 131_072
COLD = {"computed": PROMPT}


def hit(tier: str, tokens: int) -> dict[str, int]:
    return {tier: tokens, "computed": PROMPT - tokens}


CASES = [
    Case(H200, "plain", "before-cold", "after-cold", COLD),
    Case(H200, "plain", "after-cold", "after-warm", COLD),
    Case(H200, "prefix-cache", "before-cold", "after-cold", COLD),
    Case(H200, "prefix-cache", "after-cold", "after-warm", hit("gpu", BLOCKS)),
    Case(H200, "native", "before-cold", "after-cold", COLD, stored=BLOCKS * PER_TOKEN, loaded=0),
    Case(H200, "native", "after-cold", "after-warm", hit("cpu", BLOCKS), stored=0, loaded=BLOCKS * PER_TOKEN),
    # This version counts none of its bytes. Its device cache is emptied before the hit, after a prompt of one token.
    Case(H200, "simple-cpu", "before-cold", "after-cold", COLD),
    Case(H200, "simple-cpu", "before-warm", "after-warm", hit("cpu", BLOCKS)),
    Case(H200, "lmcache-mp", "before-cold", "after-cold", COLD, stored=CHUNKS * PER_TOKEN, loaded=0),
    Case(H200, "lmcache-mp", "after-cold", "after-warm", hit("cpu", CHUNKS), stored=0, loaded=CHUNKS * PER_TOKEN),
    Case(H200, "mooncake-store", "before-cold", "after-cold", COLD, stored=BLOCKS * PER_TOKEN, loaded=0),
    Case(
        H200, "mooncake-store", "after-cold", "after-warm", hit("remote", BLOCKS), stored=0, loaded=BLOCKS * PER_TOKEN
    ),
    # A CPU; 4 KiB a token. Seven prompts, 17,464 tokens, stored in chunks of 128 (LMCache: 256); then eleven more that
    # hit. A series that comes with its first event is unknown before it, not 0.
    Case(CPU, "plain", "start", "after-cold", {"computed": 17_464}),
    Case(CPU, "prefix-cache", "start", "after-cold", {"computed": 17_464}),
    Case(CPU, "prefix-cache", "after-cold", "after-warm", {"gpu": 25_600, "computed": 88}),
    Case(CPU, "native-host", "start", "after-cold", {"computed": 17_464}, stored=17_408 * 4096, loaded=0),
    Case(
        CPU, "native-host", "after-cold", "after-warm", {"cpu": 25_600, "computed": 88}, stored=0, loaded=25_600 * 4096
    ),
    Case(CPU, "lmcache-mp", "start", "after-cold", {"computed": 17_464}, stored=17_408 * 4096),
    Case(
        CPU, "lmcache-mp", "after-cold", "after-warm", {"cpu": 25_600, "computed": 88}, stored=0, loaded=25_600 * 4096
    ),
    Case(CPU, "mooncake-store", "start", "after-cold", {"computed": 17_464}, stored=17_408 * 4096),
    Case(CPU, "mooncake-store", "after-cold", "after-warm", {"remote": 25_600, "computed": 88}, 0, 25_600 * 4096),
    # LMCache gave up in the engine's process and says so in its log only: nothing hits, nobody counts.
    Case(CPU, "lmcache-v1", "after-cold", "after-warm", {"computed": 1032}),
    # One prompt of 1,032 tokens at 1 KiB: stored, hit on disk (host memory was emptied, after a prompt of one token),
    # hit in host memory. The disk's bytes are counted apart from those between host memory and device.
    Case(CPU, "native-host-fs", "before-cold", "after-cold", {"computed": 1032}, 2**20, 0, written=2**20, read=0),
    Case(
        CPU,
        "native-host-fs",
        "after-cold",
        "after-disk",
        {"nvme": 1024, "computed": 9},
        0,
        2**20,
        written=0,
        read=2**20,
    ),
    Case(CPU, "native-host-fs", "after-disk", "after-warm", {"cpu": 1024, "computed": 8}, 0, 2**20, written=0, read=0),
    # The same prompt in LMCache's server, emptied by itself. What it reads for the disk and writes from there is no
    # traffic of the engine's.
    Case(CPU, "lmcache-mp-files", "before-cold", "after-cold", {"computed": 1032}, 2**20, 0, written=2**20, read=0),
    Case(
        CPU,
        "lmcache-mp-files",
        "after-cold",
        "after-disk",
        {"nvme": 1024, "computed": 9},
        0,
        2**20,
        written=0,
        read=2**20,
    ),
    Case(
        CPU, "lmcache-mp-files", "after-disk", "after-warm", {"cpu": 1024, "computed": 8}, 0, 2**20, written=0, read=0
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.version}-{case.setup}-{case.end}")
def test_windows_of_recorded_pages(case: Case) -> None:
    """Exact tokens by source and bytes; the sources add up to the prompt tokens, and no line is lost."""
    ends = pages(case.version, case.setup, case.end)
    assert all(page is not None and page.broken == 0 for page in ends.values())
    reading = window(case.version, case.setup, case.start, case.end)
    assert reading.problems == []
    assert reading.preemptions == 0
    assert reading.by_source == dict.fromkeys(TIERS, 0) | case.sources
    assert reading.prompt_tokens == sum(case.sources.values())
    assert (reading.stored_bytes, reading.loaded_bytes) == (case.stored, case.loaded)
    assert (reading.disk_write_bytes, reading.disk_read_bytes) == (case.written, case.read)


def test_times_come_with_the_bytes() -> None:
    """55.2 GB/s from the H200 and 34.2 to it in the first hit; a pool's times are summed over operations that overlap;
    LMCache counts none."""
    stored = window(H200, "native", "before-cold", "after-cold")
    loaded = window(H200, "native", "after-cold", "after-warm")
    assert (stored.store_time_ns, loaded.load_time_ns) == (73_564_479, 118_626_495)
    put = window(H200, "mooncake-store", "before-cold", "after-cold")
    got = window(H200, "mooncake-store", "after-cold", "after-warm")
    assert (put.store_time_ns, got.load_time_ns) == (4_546_621_809, 1_522_206_903)
    assert window(H200, "lmcache-mp", "after-cold", "after-warm").load_time_ns is None


def test_native_with_files_does_not_guess_before_032() -> None:
    """vLLM 0.26 counts an external hit as such, wherever it came from; its pages are equal with a disk and without."""
    edges = Delta(pages(H200, "native", "after-cold"), pages(H200, "native", "after-warm"))
    with_files = registry.load("setups", "native").CONFIG.model_validate({**SETUPS["native"], "files": {}})
    reading = with_files.read(edges)
    assert reading.by_source == dict.fromkeys(TIERS, 0) | {"unknown": BLOCKS, "computed": PROMPT - BLOCKS}
    # What went to the device is known all the same, and that nothing is known of the disk.
    assert reading.loaded_bytes == BLOCKS * PER_TOKEN
    assert (reading.disk_write_bytes, reading.disk_read_bytes) == (None, None)


def test_simple_cpu_in_032_counts_blocks_of_a_known_size() -> None:
    """Its families beside an engine's page; 1,937 blocks of 16 tokens, of which the configured memory holds 16,384."""
    engine = {
        moment: (RECORDED / CPU / "prefix-cache" / f"{moment}.prom").read_text()
        for moment in ("after-cold", "after-warm")
    }
    both = {
        moment: parse_pages({"engine": text + (RECORDED / CPU / "simple-cpu" / f"{moment}.prom").read_text()})
        for moment, text in engine.items()
    }
    reading = setup("simple-cpu").read(Delta(both["after-cold"], both["after-warm"]))
    assert reading.loaded_bytes == BLOCKS * PER_TOKEN
    # Ordinary stores are counted nowhere.
    assert reading.stored_bytes is None


def test_bytes_of_lmcache_while_it_evicts() -> None:
    """Recorded with a pool of 4 MiB: 11 chunks of 256 KiB came, 6 went, and those that stay give a chunk's size."""
    edges = [
        parse_pages({"lmcache": (RECORDED / CPU / "lmcache-server" / f"{moment}-eviction.prom").read_text()})
        for moment in ("before", "after")
    ]
    assert setup("lmcache-mp").read(Delta(*edges)).stored_bytes == 11 * 256 * 1024


TIERED = ("native", "lmcache-mp", "mooncake-store")


@pytest.mark.parametrize(
    ("version", "name"),
    [*((H200, name) for name in TIERED), (CPU, "native-host-fs"), (CPU, "lmcache-mp"), (CPU, "mooncake-store")],
)
def test_store_activity_covers_traffic_and_jobs(version: str, name: str) -> None:
    """What a drain waits for: it moves in the cold pass, rests in the hits, and nothing was in flight after either."""
    first = "before-cold" if (RECORDED / version / name / "before-cold.prom").exists() else "start"
    before, cold, warm = (
        setup(name).store_activity(pages(version, name, at)) for at in (first, "after-cold", "after-warm")
    )
    assert cold
    assert warm
    assert before != cold
    traffic = {key: value for key, value in cold.items() if not key.startswith(ACTIVE)}
    assert any(value > 0 for value in traffic.values())
    assert {key: warm[key] for key in traffic} == traffic
    assert not any(value for activity in (cold, warm) for key, value in activity.items() if key.startswith(ACTIVE))


def test_nothing_tells_of_simple_cpus_stores_before_032() -> None:
    assert setup("simple-cpu").store_activity(pages(H200, "simple-cpu", "after-cold")) is None
    storing = (RECORDED / CPU / "simple-cpu" / "storing.prom").read_text()
    activity = setup("simple-cpu").store_activity(parse_pages({"engine": storing}))
    assert activity == {f"{ACTIVE}vllm:simple_kv_offload_pending_store_blocks": 1937.0}


def test_a_put_in_flight_while_nothing_moves() -> None:
    """Recorded in the middle of a batch of gigabytes: seven batches begun, six ended. A trial that took this for rest
    found half of its prompt (results/published/offload-h200)."""
    page = parse_pages({"mooncake": (RECORDED / H200 / "mooncake-master" / "put-in-flight.prom").read_text()})
    activity = store_activity(page)
    assert activity is not None
    assert activity[f"{ACTIVE}master_batch_put_in_flight"] == 1


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*/*/*.prom")), ids=lambda path: "-".join(path.parts[-3:]))
def test_every_line_of_a_recorded_page_is_read(path: Path) -> None:
    """None is broken, and what says when a counter was made is taken for none itself."""
    text = path.read_text()
    page = parse_page(text)
    series = [line for line in text.split("\n") if line and not line.startswith("#") and "_created" not in line]
    assert page.broken == 0
    assert sum(len(values) for values in page.samples.values()) == len(series)
    assert not any(name.endswith("_created") for name in page.samples)
