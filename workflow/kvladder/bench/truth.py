"""What a client reported against what the server logged, request by request.

Bias of TTFT = TTFT that the client reports - (start of the first token's write - arrival of the request's first byte).
Arrival is stamped by the kernel when the bytes reach the server's socket, the write by the server right before write():
what lies between is the server's and the same for every client, what lies outside is the client's. Error of a gap =
gap between two chunks as the client reports it - gap between their writes. A client that counts more or fewer chunks
than were written has no gap errors for that request. All clocks run at CLOCK_MONOTONIC's rate; only differences are
compared, so that clients may use another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvladder.bench.clients.base import Observation
from kvladder.bench.server import Served


def ttft_bias(ttft_ns: int | None, arrival_ns: int, write_ns: Sequence[int]) -> int | None:
    """A client's TTFT less the true one; None where either is unknown."""
    if ttft_ns is None or not write_ns:
        return None
    return ttft_ns - (write_ns[0] - arrival_ns)


def gap_errors(gaps_ns: Sequence[int] | None, write_ns: Sequence[int]) -> list[int] | None:
    """Reported gap less written gap, chunk by chunk; None where the client has none or another number of them."""
    if gaps_ns is None or len(gaps_ns) != max(0, len(write_ns) - 1):
        return None
    return [seen - (later - earlier) for seen, (earlier, later) in zip(gaps_ns, pairwise(write_ns), strict=True)]


@dataclass(frozen=True, slots=True)
class Pair:
    """A served request and what the client says about it, None where it says nothing."""

    served: Served
    seen: Observation | None


def pair(served: Sequence[Served], seen: Sequence[Observation]) -> list[Pair]:
    """Every served request in order of arrival, with the observation that names it by number or by request id.

    Observations that name none (a request that failed before its first token) stay unpaired. Raises ValueError for two
    observations of one request, or one of a request that was never served.
    """
    by_id = {request.request_id: request.number for request in served if request.request_id}
    known = {request.number for request in served}
    by_number: dict[int, Observation] = {}
    for observation in seen:
        number = observation.number
        if number is None and observation.request_id is not None:
            number = by_id.get(observation.request_id)
        if number is None:
            continue
        if number not in known:
            raise ValueError(f"the client reports a request {number} that the server never had")
        if number in by_number:
            raise ValueError(f"the client reports request {number} twice")
        by_number[number] = observation
    order = sorted(served, key=lambda request: request.arrival_ns)
    return [Pair(request, by_number.get(request.number)) for request in order]


def held(arrivals: Sequence[int], ends: Sequence[int], concurrency: int) -> float | None:
    """Mean requests in flight, as the server saw them, from the arrival that fills the last slot to the last arrival.

    Before it the client fills its slots, after it there is nothing left to send. None where nothing lies between.
    """
    order = sorted(arrivals)
    if len(order) <= concurrency:
        return None
    start, stop = order[concurrency - 1], order[-1]
    if stop <= start:
        return None
    inside = 0
    for arrival, end in zip(arrivals, ends, strict=True):
        inside += max(0, min(end, stop) - max(arrival, start))
    return inside / (stop - start)
