"""The stand-ins' /metrics pages: recorded real ones with a stand-in's own numbers put in.

A page is made from one that was recorded (``tests/data/metrics``) of the version that is played: families, labels, HELP
and TYPE lines, deprecated aliases, ``_created`` gauges and their order are the real server's, and only values differ.
So a name that the parser has wrong is wrong on the stand-in's page as well. Series that the real server shows only
after their first event behave likewise: they are there once that event is in the state.

The state is a mapping from the keys of `KEYS` to numbers. A key that is left out counts as 0; a key that is None takes
its series off the page, whatever the real server does, for tests of absent counters. What no key speaks of keeps its
recorded value, that of the start where it is there then; so do histograms, and hold no observations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client.utils import floatToGoString

RECORDED = Path(__file__).parents[1] / "data" / "metrics"

State = Mapping[str, float | None]

KEYS = {
    "started": "start of the process, epoch seconds; left out: the recorded one",
    # vLLM: prompt tokens by where their KV came from, and tokens that were looked up.
    "computed": "prompt tokens computed",
    "gpu": "prompt tokens hit in the device prefix cache",
    "cpu": "prompt tokens hit in host memory",
    "nvme": "prompt tokens hit on disk",
    "remote": "prompt tokens hit in a remote pool",
    "device_queries": "prompt tokens looked up in the device prefix cache; 0 with that cache off",
    "external_queries": "prompt tokens looked up by the connector",
    "output": "tokens generated",
    "finished": "requests finished",
    "running": "requests running",
    "waiting": "requests waiting",
    "preemptions": "preemptions",
    # vLLM's connectors: bytes and seconds by the tier that was written or read, jobs in flight.
    "stored_cpu": "bytes copied from the device to host memory",
    "store_cpu_s": "seconds that took",
    "loaded_cpu": "bytes copied from host memory to the device, also of blocks that came from disk before",
    "load_cpu_s": "seconds that took",
    "stored_nvme": "bytes written from host memory to disk",
    "store_nvme_s": "seconds that took",
    "loaded_nvme": "bytes read from disk to host memory",
    "load_nvme_s": "seconds that took",
    "cascades": "writes to disk in flight",
    "promotions": "reads from disk in flight",
    "loaded_blocks": "simple-cpu: blocks loaded",
    "pending_blocks": "simple-cpu: blocks of stores in flight",
    "capacity_blocks": "simple-cpu: blocks that the host tier holds; a label's value",
    "stored_remote": "mooncake-store: bytes put",
    "store_remote_s": "seconds that took, summed over puts",
    "loaded_remote": "mooncake-store: bytes got",
    "load_remote_s": "seconds that took, summed over gets",
    # LMCache's server, page `lmcache-server`.
    "l1_written_chunks": "chunks written to its pool",
    "l1_read_chunks": "chunks read from its pool",
    "l1_evicted_chunks": "chunks evicted from its pool",
    "l1_used_bytes": "bytes of its pool in use",
    "requested_tokens": "tokens looked up",
    "l1_hit_tokens": "tokens found in its pool",
    "l2_hit_tokens": "tokens found in its second level",
    "queued_events": "events that it has not counted yet",
    # The same with a second level, page `lmcache-server-files`.
    "l2_stores": "stores to its second level, begun and ended",
    "l2_written_chunks": "chunks written there",
    "l2_read_chunks": "chunks read from there into its pool",
    "l2_used_bytes": "bytes held there",
    # Mooncake's master, page `mooncake-master`.
    "keys": "keys in the pool",
    "allocated_bytes": "bytes of the pool in use",
    "capacity_bytes": "bytes of the pool",
    "puts_started": "batches of puts begun",
    "puts_ended": "batches of puts ended",
    "puts_revoked": "batches of puts given up",
    "evicted_keys": "keys evicted",
    "evicted_bytes": "bytes evicted",
}
"""What a state may say, in words; the numbers are totals since the process began, but for jobs and sizes."""

PAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "0.26.0": {
        "plain": ("plain",),
        "prefix-cache": ("prefix-cache",),
        "native": ("native",),
        # This version's tiering has two histograms of lookups more, and nothing about tokens or bytes of its disk.
        "native-files": ("native",),
        "simple-cpu": ("simple-cpu",),
        "lmcache-mp": ("lmcache-mp",),
        "mooncake-store": ("mooncake-store",),
        "lmcache-server": ("lmcache-server", "lmcache-server-evictions"),
        "mooncake-master": ("mooncake-master",),
    },
    "0.32.0": {
        "plain": ("plain",),
        "prefix-cache": ("prefix-cache",),
        "native": ("native-host",),
        "native-files": ("native-host-fs",),
        # Its own families alone are recorded, and stand before the engine's.
        "simple-cpu": ("simple-cpu", "prefix-cache"),
        "lmcache-mp": ("lmcache-mp",),
        "mooncake-store": ("mooncake-store",),
        "lmcache-server": ("lmcache-server", "lmcache-server-evictions"),
        "lmcache-server-files": ("lmcache-server-files",),
        "mooncake-master": ("mooncake-master",),
    },
}
"""Recorded folders that a page is made of, by engine version and page."""

TELLS_TIER = frozenset({"native", "native-files", "simple-cpu"})
"""Pages of connectors that tell vLLM 0.32 which tier a hit came from; those of others say ``external_unspecified``."""

EXTERNAL = "cpu+nvme+remote"
PROMPT = f"computed+gpu+{EXTERNAL}"


@dataclass(frozen=True, slots=True)
class Series:
    """A series whose value is a sum of state keys, ``a+b``; ``labels`` are those that tell it from its siblings."""

    name: str
    keys: str
    labels: frozenset[tuple[str, str]] = frozenset()


def _by(name: str, label: str, **keys: str) -> list[Series]:
    """One series a value of ``label``."""
    return [Series(name, key, frozenset({(label, value)})) for value, key in keys.items()]


SERIES = [
    Series("vllm:prompt_tokens_total", PROMPT),
    Series("vllm:prompt_tokens_cached_total", f"gpu+{EXTERNAL}"),
    *_by(
        "vllm:prompt_tokens_by_source_total",
        "source",
        local_compute="computed",
        local_cache_hit="gpu",
        external_kv_transfer=EXTERNAL,
    ),
    Series("vllm:prefix_cache_queries_total", "device_queries"),
    Series("vllm:prefix_cache_hits_total", "gpu"),
    Series("vllm:external_prefix_cache_queries_total", "external_queries"),
    Series("vllm:external_prefix_cache_hits_total", EXTERNAL),
    Series("vllm:generation_tokens_total", "output"),
    *_by("vllm:request_success_total", "finished_reason", length="finished"),
    Series("vllm:num_requests_running", "running"),
    Series("vllm:num_requests_waiting", "waiting"),
    Series("vllm:num_preemptions_total", "preemptions"),
    *_by("vllm:kv_offload_total_bytes_total", "transfer_type", CPU_to_GPU="loaded_cpu", GPU_to_CPU="stored_cpu"),
    *_by("vllm:kv_offload_total_time_total", "transfer_type", CPU_to_GPU="load_cpu_s", GPU_to_CPU="store_cpu_s"),
    Series("vllm:kv_offload_load_bytes_total", "loaded_cpu"),
    Series("vllm:kv_offload_load_time_total", "load_cpu_s"),
    Series("vllm:kv_offload_store_bytes_total", "stored_cpu"),
    Series("vllm:kv_offload_store_time_total", "store_cpu_s"),
    Series("vllm:kv_offload_tiering_read_bytes_total", "loaded_nvme"),
    Series("vllm:kv_offload_tiering_read_time_total", "load_nvme_s"),
    Series("vllm:kv_offload_tiering_write_bytes_total", "stored_nvme"),
    Series("vllm:kv_offload_tiering_write_time_total", "store_nvme_s"),
    Series("vllm:kv_offload_tiering_active_cascade_jobs", "cascades"),
    Series("vllm:kv_offload_tiering_active_promotion_jobs", "promotions"),
    Series("vllm:simple_kv_offload_load_blocks_total", "loaded_blocks"),
    Series("vllm:simple_kv_offload_pending_store_blocks", "pending_blocks"),
    *_by("vllm:mooncake_store_operation_bytes_total", "operation", save_put="stored_remote", load_get="loaded_remote"),
    *_by(
        "vllm:mooncake_store_operation_time_seconds_sum",
        "operation",
        save_put="store_remote_s",
        load_get="load_remote_s",
    ),
    Series("lmcache_mp_l1_write_chunks_total", "l1_written_chunks"),
    Series("lmcache_mp_l1_read_chunks_total", "l1_read_chunks"),
    Series("lmcache_mp_num_chunks_loaded_total", "l1_read_chunks"),
    Series("lmcache_mp_l1_evicted_chunks_total", "l1_evicted_chunks"),
    Series("lmcache_mp_l1_memory_usage_bytes", "l1_used_bytes"),
    Series("lmcache_mp_event_bus_queue_depth", "queued_events"),
    Series("lmcache_mp_lookup_requested_tokens_total", "requested_tokens"),
    Series("lmcache_mp_lookup_hit_tokens_total", "l1_hit_tokens+l2_hit_tokens"),
    Series("lmcache_mp_lookup_hit_l1_tokens_total", "l1_hit_tokens"),
    Series("lmcache_mp_lookup_hit_l2_tokens_total", "l2_hit_tokens"),
    Series("lmcache_mp_l2_store_submitted_requests_total", "l2_stores"),
    Series("lmcache_mp_l2_store_completed_requests_total", "l2_stores"),
    Series("lmcache_mp_l2_store_completed_objects_chunks_total", "l2_written_chunks"),
    Series("lmcache_mp_l2_prefetch_load_completed_chunks_total", "l2_read_chunks"),
    Series("lmcache_mp_l2_usage_bytes", "l2_used_bytes"),
    Series("master_key_count", "keys"),
    Series("master_allocated_bytes", "allocated_bytes"),
    Series("segment_allocated_bytes", "allocated_bytes"),
    Series("master_total_capacity_bytes", "capacity_bytes"),
    Series("segment_total_capacity_bytes", "capacity_bytes"),
    Series("master_batch_put_start_requests_total", "puts_started"),
    Series("master_batch_put_end_requests_total", "puts_ended"),
    Series("master_batch_put_revoke_requests_total", "puts_revoked"),
    Series("master_evicted_key_count", "evicted_keys"),
    Series("master_evicted_size_bytes", "evicted_bytes"),
]

TOLD = _by("vllm:prompt_tokens_cached_by_source_total", "source", device="gpu", host="cpu", disk="nvme", p2p="remote")
UNTOLD = _by("vllm:prompt_tokens_cached_by_source_total", "source", device="gpu", external_unspecified=EXTERNAL)

EVENTS = [
    ("vllm:kv_offload_load_", "", "loaded_cpu"),
    ("vllm:kv_offload_store_", "", "stored_cpu"),
    ("vllm:kv_offload_cpu_", "", "stored_cpu"),
    ("vllm:kv_offload_tiering_read_", "", "loaded_nvme"),
    ("vllm:kv_offload_tiering_write_", "", "stored_nvme"),
    ("vllm:kv_offload_tiering_chunk_hits", "0:primary", "loaded_cpu"),
    ("vllm:kv_offload_tiering_chunk_hits", "1:fs", "loaded_nvme"),
    ("vllm:kv_offload_", "", "external_queries"),
    ("vllm:simple_kv_offload_load_", "", "loaded_blocks"),
    ("vllm:simple_kv_offload_", "", "device_queries"),
    ("vllm:mooncake_store_operation", "save_put", "stored_remote"),
    ("vllm:mooncake_store_operation", "load_get", "loaded_remote"),
    ("vllm:mooncake_store_operation", "", "external_queries"),
    ("lmcache_mp_l1_write_", "", "l1_written_chunks"),
    ("lmcache_mp_l1_read_", "", "l1_read_chunks"),
    ("lmcache_mp_num_chunks_loaded", "", "l1_read_chunks"),
    ("lmcache_mp_l1_evicted_", "", "l1_evicted_chunks"),
    ("lmcache_mp_l2_store_", "", "l2_stores"),
    ("lmcache_mp_l2_load_", "", "l2_read_chunks"),
    ("lmcache_mp_l2_prefetch_load_", "", "l2_read_chunks"),
    ("lmcache_mp_", "", "requested_tokens"),
    ("", "", "finished"),
]
"""With which key above 0 a series comes that isn't there from the start: a name's beginning, a label's value, the key.
The first that fits counts."""

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def engine_page(transfer: Mapping[str, Any] | None, *, prefix_caching: bool) -> str:
    """The page of an engine with this ``--kv-transfer-config``. Raises KeyError for a connector without one."""
    if transfer is None:
        return "prefix-cache" if prefix_caching else "plain"
    if transfer["kv_connector"] == "OffloadingConnector":
        return "native-files" if transfer.get("kv_connector_extra_config", {}).get("secondary_tiers") else "native"
    connectors = {
        "SimpleCPUOffloadConnector": "simple-cpu",
        "LMCacheMPConnector": "lmcache-mp",
        "MooncakeStoreConnector": "mooncake-store",
    }
    return connectors[transfer["kv_connector"]]


def render(version: str, page: str, state: State) -> str:
    """The text of ``page`` (see `PAGES`) as the server of this engine version would show it with these numbers.

    Raises KeyError for a version or page that was never recorded, ValueError for a state key that isn't one of `KEYS`.
    """
    unknown = state.keys() - KEYS.keys()
    if unknown:
        raise ValueError(f"no such state: {', '.join(sorted(unknown))}")
    lines: list[str] = []
    for block in _template(version, page):
        samples = [text for sample in block.samples if (text := _line(sample, state)) is not None]
        if samples or block.always:
            lines += [*block.head, *samples]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class _Sample:
    """One line of a template: the series as written, what its value comes from, and the key that brings it."""

    series: str
    recorded: str
    keys: tuple[str, ...]
    event: str | None


@dataclass(frozen=True, slots=True)
class _Block:
    """One family's HELP and TYPE lines and its samples; ``always``: it is there before its first sample."""

    head: tuple[str, ...]
    samples: tuple[_Sample, ...]
    always: bool


def _line(sample: _Sample, state: State) -> str | None:
    """The sample's line; None while it isn't there."""
    if sample.event is not None and not state.get(sample.event):
        return None
    values = [state.get(key, 0.0) for key in sample.keys]
    if None in values:
        return None
    series = sample.series
    blocks = state.get("capacity_blocks")
    if blocks is not None and "capacity_blocks=" in series:
        series = re.sub(r'capacity_blocks="\d+"', f'capacity_blocks="{blocks:.0f}"', series)
    name = series.partition("{")[0]
    started = state.get("started")
    if started is not None and (name == "process_start_time_seconds" or name.endswith("_created")):
        return f"{series} {floatToGoString(started)}"
    if not sample.keys:
        return f"{series} {sample.recorded}"
    total = float(sum(value for value in values if value is not None))
    # Mooncake's master prints whole numbers, Python's client floats.
    return f"{series} {total:.0f}" if sample.recorded.isdigit() else f"{series} {floatToGoString(total)}"


@cache
def _template(version: str, page: str) -> tuple[_Block, ...]:
    rules: dict[str, list[Series]] = {}
    for series in [*SERIES, *(TOLD if page in TELLS_TIER else UNTOLD)]:
        rules.setdefault(series.name, []).append(series)
    blocks: list[_Block] = []
    for folder in PAGES[version][page]:
        read = RECORDED / f"vllm-{version}" / folder
        first = read / "start.prom"
        text = first.read_text(encoding="utf-8") if first.exists() else ""
        start = dict(sample for _, samples in _blocks(text) for sample in samples)
        heads = {line for line in text.split("\n") if line.startswith("#")}
        for head, lines in _blocks((read / "after-warm.prom").read_text(encoding="utf-8")):
            samples = tuple(_sample(series, value, start, rules) for series, value in lines)
            blocks.append(_Block(head, samples, not samples or not heads.isdisjoint(head)))
    return tuple(blocks)


def _sample(series: str, value: str, start: Mapping[str, str], rules: Mapping[str, list[Series]]) -> _Sample:
    name = series.partition("{")[0]
    labels = frozenset(_LABEL.findall(series))
    keys = next((rule.keys for rule in rules.get(name, []) if labels >= rule.labels), "")
    event = None
    if series not in start:
        values = {text for _, text in labels}
        event = next(key for begin, label, key in EVENTS if name.startswith(begin) and (not label or label in values))
    return _Sample(series, start.get(series, value), tuple(filter(None, keys.split("+"))), event)


def _blocks(text: str) -> Iterator[tuple[tuple[str, ...], list[tuple[str, str]]]]:
    """Families of a page: their comment lines and their (series, value)."""
    head: list[str] = []
    samples: list[tuple[str, str]] = []
    for line in filter(None, text.split("\n")):
        if line.startswith("#"):
            if samples or (head and line.split()[2] != head[-1].split()[2]):
                yield tuple(head), samples
                head, samples = [], []
            head.append(line)
        else:
            series, _, value = line.rpartition(" ")
            samples.append((series, value))
    yield tuple(head), samples
