"""LMCache's multiprocess server: its own counters say which of its levels a hit came from, and how many bytes moved."""

from __future__ import annotations

from kvladder.counters.reading import Delta, Pages, Reading, activity, engine_reading

SERVER = "lmcache"
"""Name of the LMCache server among a trial's servers."""

WRITTEN = "lmcache_mp_l1_write_chunks_total"
READ = "lmcache_mp_l1_read_chunks_total"
EVICTED = "lmcache_mp_l1_evicted_chunks_total"
USED = "lmcache_mp_l1_memory_usage_bytes"
L2_STORES = "lmcache_mp_l2_store_completed_requests_total"
L2_LOADS = "lmcache_mp_l2_prefetch_load_completed_chunks_total"

WRITES = (
    WRITTEN,
    "lmcache_mp_num_submitted_stores_total",
    "lmcache_mp_num_finished_stores_total",
    "lmcache_mp_l2_store_submitted_requests_total",
    L2_STORES,
)
JOBS = ("lmcache_mp_event_bus_queue_depth", "lmcache_mp_l1_staging_bytes")


def mp_reading(delta: Delta) -> Reading:
    """Tokens by source from the engine, its external hits split by the server into L1 (host) and L2 (disk).

    The server counts what it looked up, which may be more than the engine then loads (at least one token of a prompt
    is always computed); with hits in both levels and unequal sums nobody knows the split.

    Bytes are the server's chunks, written or read, times the bytes that a chunk takes of its pool: nothing of it comes
    from the engine's token counters. With a store to L2, which reads chunks too, the loaded bytes are unknown.
    """
    reading = engine_reading(delta, "cpu")
    _split(delta, reading)
    chunk = _chunk_bytes(delta)
    if chunk is not None:
        written, read = delta.counter(SERVER, WRITTEN), delta.counter(SERVER, READ)
        reading.stored_bytes = None if written is None else round(written * chunk)
        if read is not None and not delta.counter(SERVER, L2_STORES):
            reading.loaded_bytes = round(read * chunk)
    return reading


def mp_store_activity(pages: Pages) -> dict[str, float] | None:
    """The server's counters of stores begun, finished and written; None without its page."""
    return activity(pages, SERVER, WRITES, JOBS)


def _split(delta: Delta, reading: Reading) -> None:
    external = reading.by_source["cpu"]
    second = delta.counter(SERVER, "lmcache_mp_lookup_hit_l2_tokens_total")
    if external and second is None and delta.counter(SERVER, L2_LOADS):
        # LMCache 0.5.3 doesn't count hit tokens by level, only the chunks that it loaded from L2.
        reading.by_source.update(cpu=0, unknown=external)
    if not external or not second:
        return
    first = delta.counter(SERVER, "lmcache_mp_lookup_hit_l1_tokens_total") or 0
    if first == 0:
        reading.by_source.update(cpu=0, nvme=external)
    elif first + second == external:
        reading.by_source.update(cpu=first, nvme=second)
    else:
        reading.by_source.update(cpu=0, unknown=external)


def _chunk_bytes(delta: Delta) -> float | None:
    """Bytes of the pool that one resident chunk takes, from the server's page at the window's end."""
    page = delta.end.get(SERVER)
    if page is None:
        return None
    used, written = page.total(USED), page.total(WRITTEN)
    resident = None if written is None else written - (page.total(EVICTED) or 0)
    return used / resident if used and resident and resident > 0 else None
