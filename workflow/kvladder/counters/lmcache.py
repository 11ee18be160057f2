"""LMCache, as a server of its own or inside the engine: its counters say how much moved, and where hits came from.

Both count chunks or tokens, not bytes. The bytes of one are what the pool's resident ones take of its memory, which is
a number of LMCache's own: nothing here comes from the engine's token counters.
"""

from __future__ import annotations

from kvladder.counters.reading import ACTIVE, ENGINE, Delta, Page, Pages, Reading, activity, engine_reading

SERVER = "lmcache"
"""Name of the LMCache server among a trial's servers."""

WRITTEN = "lmcache_mp_l1_write_chunks_total"
READ = "lmcache_mp_l1_read_chunks_total"
EVICTED = "lmcache_mp_l1_evicted_chunks_total"
USED = "lmcache_mp_l1_memory_usage_bytes"
L2_STORES = "lmcache_mp_l2_store_completed_requests_total"
L2_WRITTEN = "lmcache_mp_l2_store_completed_objects_chunks_total"
L2_READ = "lmcache_mp_l2_prefetch_load_completed_chunks_total"

WRITES = (WRITTEN, L2_WRITTEN)
JOBS = ("lmcache_mp_event_bus_queue_depth", "lmcache_mp_l1_staging_bytes")
BEGUN = {
    # 0.5.6 only.
    "lmcache_mp_num_submitted_stores_total": "lmcache_mp_num_finished_stores_total",
    "lmcache_mp_l2_store_submitted_requests_total": L2_STORES,
}
"""Counters of stores begun, and of those that ended, well or not."""

V1_STORED = "lmcache:num_stored_tokens_total"
V1_LOADED = "lmcache:num_hit_tokens_total"
V1_EVICTED = "lmcache:local_cpu_evict_keys_count_total"
V1_USED = "lmcache:local_cache_usage"

V1_WRITES = (V1_STORED, V1_USED, "lmcache:num_store_requests_total", "lmcache:num_remote_write_bytes_total")


def mp_reading(delta: Delta) -> Reading:
    """Tokens by source from the engine, its external hits split by the server into L1 (host) and L2 (disk).

    The server counts what it looked up, which may be more than the engine then loads (at least one token of a prompt
    is always computed); with hits in both levels and unequal sums nobody knows the split. A store to L2 reads chunks of
    L1 too: with one, the loaded bytes are unknown.
    """
    reading = engine_reading(delta, "cpu")
    _split(delta, reading)
    chunk = _chunk_bytes(delta.end.get(SERVER))
    reading.stored_bytes = _times(delta.counter(SERVER, WRITTEN), chunk)
    if not delta.counter(SERVER, L2_STORES):
        reading.loaded_bytes = _times(delta.counter(SERVER, READ), chunk)
    reading.disk_write_bytes = _times(delta.counter(SERVER, L2_WRITTEN), chunk)
    reading.disk_read_bytes = _times(delta.counter(SERVER, L2_READ), chunk)
    return reading


def mp_store_activity(pages: Pages) -> dict[str, float] | None:
    """The server's counters of chunks written, and stores that have begun and not ended; None without its page."""
    found = activity(pages, SERVER, WRITES, JOBS)
    page = pages.get(SERVER)
    if found is None or page is None:
        return found
    for begun, ended in BEGUN.items():
        count = page.total(begun)
        if count is not None:
            found[f"{ACTIVE}{begun}"] = count - (page.total(ended) or 0)
    return found


def v1_reading(delta: Delta, chunk_tokens: int, tier: str | None) -> Reading:
    """Tokens by source from the engine, bytes from what LMCache says that it stored and retrieved in its process.

    ``tier`` is where hits come from; None: LMCache has more than its pool, and doesn't count hits by place.
    """
    reading = engine_reading(delta, tier)
    token = _token_bytes(delta.end.get(ENGINE), chunk_tokens)
    reading.stored_bytes = _times(delta.counter(ENGINE, V1_STORED), token)
    reading.loaded_bytes = _times(delta.counter(ENGINE, V1_LOADED), token)
    return reading


def v1_store_activity(pages: Pages) -> dict[str, float] | None:
    """What LMCache counts of stores in the engine's process, which end with the step that computed the tokens."""
    return activity(pages, ENGINE, V1_WRITES)


def _split(delta: Delta, reading: Reading) -> None:
    external = reading.by_source["cpu"]
    second = delta.counter(SERVER, "lmcache_mp_lookup_hit_l2_tokens_total")
    if external and second is None and delta.counter(SERVER, L2_READ):
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


def _times(count: int | None, size: float | None) -> int | None:
    return None if count is None or size is None else round(count * size)


def _chunk_bytes(page: Page | None) -> float | None:
    """Bytes of the server's pool that one resident chunk takes."""
    if page is None:
        return None
    return _share(page.total(USED), page.total(WRITTEN), page.total(EVICTED))


def _token_bytes(page: Page | None, chunk_tokens: int) -> float | None:
    """Bytes of the engine's pool that one resident token takes; what is evicted is counted in chunks."""
    if page is None:
        return None
    evicted = page.total(V1_EVICTED)
    return _share(page.total(V1_USED), page.total(V1_STORED), None if evicted is None else evicted * chunk_tokens)


def _share(used: float | None, written: float | None, evicted: float | None) -> float | None:
    """Bytes in use over what is resident: all that was written and not evicted since."""
    resident = None if written is None else written - (evicted or 0)
    return used / resident if used and resident and resident > 0 else None
