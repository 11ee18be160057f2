"""Mooncake store: vLLM's own counters of the connector's operations, and the master's of the pool."""

from __future__ import annotations

from kvladder.counters.reading import ACTIVE, ENGINE, Delta, Pages, Reading, activity, engine_reading

MASTER = "mooncake"
"""Name of the master among a trial's servers."""

BYTES = "vllm:mooncake_store_operation_bytes_total"
TIME = "vllm:mooncake_store_operation_time_seconds_sum"

POOL = (
    "master_put_start_requests_total",
    "master_put_end_requests_total",
    "master_batch_put_start_requests_total",
    "master_batch_put_end_requests_total",
    "master_key_count",
    "master_allocated_bytes",
)


def store_reading(delta: Delta) -> Reading:
    """Tokens by source from the engine; bytes and times summed over the connector's successful puts and gets.

    Times are summed over operations that overlap: they are no wall time.
    """
    reading = engine_reading(delta, "remote")
    reading.stored_bytes = delta.counter(ENGINE, BYTES, operation="save_put", status="ok")
    reading.loaded_bytes = delta.counter(ENGINE, BYTES, operation="load_get", status="ok")
    reading.store_time_ns = delta.time_ns(ENGINE, TIME, operation="save_put", status="ok")
    reading.load_time_ns = delta.time_ns(ENGINE, TIME, operation="load_get", status="ok")
    return reading


def store_activity(pages: Pages) -> dict[str, float] | None:
    """Keys, bytes and put requests of the pool, and puts in flight; None without the master's page.

    The master counts a put when it begins and when it ends. One batch over TCP can take seconds in which nothing
    changes: puts that have begun and neither ended nor been revoked are work in flight, however still the page is.
    """
    found = activity(pages, MASTER, POOL)
    page = pages.get(MASTER)
    if found is None or page is None:
        return found
    for kind in ("put", "batch_put"):
        begun, *ended = (page.total(f"master_{kind}_{step}_requests_total") for step in ("start", "end", "revoke"))
        if begun is not None and ended[0] is not None:
            found[f"{ACTIVE}master_{kind}_in_flight"] = begun - sum(value or 0 for value in ended)
    return found
