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
LOADED = "lmcache_mp_num_chunks_loaded_total"
EVICTED = "lmcache_mp_l1_evicted_chunks_total"
USED = "lmcache_mp_l1_memory_usage_bytes"
L2_STORES = "lmcache_mp_l2_store_completed_requests_total"
L2_WRITTEN = "lmcache_mp_l2_store_completed_objects_chunks_total"
L2_READ = "lmcache_mp_l2_prefetch_load_completed_chunks_total"
L2_USED = "lmcache_mp_l2_usage_bytes"
L1_HITS = "lmcache_mp_lookup_hit_l1_tokens_total"
L2_HITS = "lmcache_mp_lookup_hit_l2_tokens_total"

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

    What comes from L2 is written to L1 and read there, and a store to L2 reads L1: neither is a store of the engine's,
    nor a load. Nor is a chunk that was looked up and found on the device as well, which counts as read: with such, only
    what LMCache says that it gave to engines counts (on a GPU; elsewhere it doesn't). L2 says itself how many bytes it
    holds; it loses none.
    """
    reading = engine_reading(delta, "cpu")
    _split(delta, reading)
    chunk = _chunk_bytes(delta.end.get(SERVER))
    to_disk, from_disk = delta.counter(SERVER, L2_WRITTEN), delta.counter(SERVER, L2_READ)
    reading.stored_bytes = _times(_without(delta.counter(SERVER, WRITTEN), from_disk), chunk)
    read = _without(delta.counter(SERVER, READ), to_disk) if reading.by_source["gpu"] == 0 else None
    reading.loaded_bytes = _times(delta.counter(SERVER, LOADED) if read is None else read, chunk)
    reading.disk_write_bytes = delta.counter(SERVER, L2_USED)
    reading.disk_read_bytes = _times(from_disk, chunk)
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
    """Share the engine's external hits out over the server's levels, as far as that is sure.

    The server counts what it looked up, which is more than the engine loads where the device has the beginning of a
    prompt, or the prompt is hit whole but for its last token. What one level can't have given, the other has.
    """
    external = reading.by_source["cpu"]
    second = delta.counter(SERVER, L2_HITS)
    if external and second is None and delta.counter(SERVER, L2_READ):
        # LMCache 0.5.3 doesn't count hit tokens by level, only the chunks that it loaded from L2.
        reading.by_source.update(cpu=0, unknown=external)
    if not external or not second:
        return
    host, disk = max(external - second, 0), max(external - (delta.counter(SERVER, L1_HITS) or 0), 0)
    if host + disk > external:
        host, disk = 0, 0
    reading.by_source.update(cpu=host, nvme=disk, unknown=external - host - disk)


def _without(all_chunks: int | None, others: int | None) -> int | None:
    """A count less those of another kind in it; a series that isn't there counts none."""
    return None if all_chunks is None else max(all_chunks - (others or 0), 0)


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
