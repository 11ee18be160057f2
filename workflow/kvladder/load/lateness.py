"""How late the client was for what the kernel had received: the share of a pass that is the client's own doing."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from kvladder.load.decode import RawStream
from kvladder.load.records import RequestTrace

_P99 = 0.99


@dataclass(frozen=True, slots=True)
class Lateness:
    """Time from the kernel's stamp of a read to the read, in ns; None where the kernel gave no stamps.

    ``p99_ns`` and ``max_ns`` are over all reads with a part of an answer's body, ``edge_max_ns`` over those that
    carried a first token or the end of an answer: the first may hide later chunks, the second keeps a slot empty.
    """

    p99_ns: int | None
    max_ns: int | None
    edge_max_ns: int | None


def lateness(streams: Sequence[RawStream], records: Sequence[RequestTrace]) -> Lateness:
    """Lateness of a pass from its streams and their records, in the same order."""
    known = sorted(late for stream in streams for late in stream.late if late >= 0)
    if not known:
        return Lateness(None, None, None)
    edges = []
    for stream, record in zip(streams, records, strict=True):
        if record.first_token_ns is not None:
            edges.append(stream.late[bisect_left(stream.times, record.first_token_ns)])
        edges += stream.late[-1:]
    place = math.ceil(_P99 * len(known)) - 1
    return Lateness(known[place], known[-1], max((late for late in edges if late >= 0), default=None))
