"""The decomposition of a pass's mean TTFT from /metrics alone: what every trial has, without a profiler.

Histograms of the engine give means over a window. What it doesn't count is None, and its time is in the remainder.

``client_http``: the client's mean TTFT less the engine's own. ``queue``: time until first scheduled; a request that
loads waits there for its KV, and nobody can tell the one from the other, so it is unknown then and ``load_wait`` is
that time less lookup and transfer. ``lookup``: LMCache's own histogram. ``transfer``: the connector's load time, an
upper bound where loads run side by side. ``recompute``: from first scheduled to first token, less what of a transfer
doesn't fit into the wait before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvladder.counters.reading import ENGINE, NS, Delta

COUNTED = ("client_http", "queue", "lookup", "load_wait", "transfer", "recompute")
"""Parts that counters can give; the others are in the remainder."""

_QUEUE, _PREFILL = "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds"
_TTFT, _LOOKUP = "vllm:time_to_first_token_seconds", "vllm:lmcache_mp_lookup_duration_seconds"


@dataclass(frozen=True, slots=True)
class CountedParts:
    """Means over the requests of a pass, in ns. ``remainder`` may be negative: counters are means of their own."""

    ttft: int
    parts: dict[str, int | None]

    @property
    def remainder(self) -> int:
        """What the known parts leave of the client's mean TTFT."""
        return self.ttft - sum(value for value in self.parts.values() if value is not None)


def counted_parts(delta: Delta, ttfts: Sequence[int], load_time_ns: int | None, *, loads: bool) -> CountedParts:
    """Split the mean of the client's ``ttfts`` (ns) by what the engine counted in the same window.

    ``load_time_ns`` is the connector's, over all requests; ``loads`` says whether the pass loads KV from a tier. Raises
    ValueError without a TTFT.
    """
    if not ttfts:
        raise ValueError("no request has a TTFT: there is nothing to split")
    mean = round(sum(ttfts) / len(ttfts))
    engine, queue, prefill = (_mean(delta, name) for name in (_TTFT, _QUEUE, _PREFILL))
    lookup = _mean(delta, _LOOKUP)
    transfer = 0 if not loads else None if load_time_ns is None else round(load_time_ns / len(ttfts))
    waited = None
    if loads and queue is not None:
        waited = max(queue - (transfer or 0) - (lookup or 0), 0)
        if transfer is not None:
            transfer = min(transfer, queue + (prefill or 0))
            # A connector that loads inside the step: its copies are in the step's time.
            prefill = None if prefill is None else prefill - max(transfer - queue, 0)
    return CountedParts(
        ttft=mean,
        parts={
            "client_http": None if engine is None else max(mean - engine, 0),
            "queue": None if loads else queue,
            "lookup": lookup if loads else 0,
            "load_wait": waited if loads else 0,
            "transfer": transfer,
            "recompute": prefill,
        },
    )


def _mean(delta: Delta, name: str) -> int | None:
    histogram = delta.histogram(ENGINE, name)
    mean = histogram.mean() if histogram is not None else None
    return None if mean is None else round(mean * NS)
