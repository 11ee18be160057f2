"""A capture's events as a file that https://ui.perfetto.dev opens: Chrome trace JSON, gzip.

One process a server, one track a stream, a thread or a request, each with its name.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from kvladder.timeline.decompose import PARTS
from kvladder.timeline.tables import Tables

CLIENT = "client"


def write(tables: Tables, setup: str, path: Path) -> int:
    """Write one setup's events and requests; returns their number. Equal tables give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(event, separators=(",", ":")) for event in _all(tables, setup)]
    text = '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(lines) + "\n]}\n"
    with path.open("wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as file:
        file.write(text.encode())
    return len(lines)


class _Tracks:
    """Numbers for names, in the order in which they are first seen, and the events that tell Perfetto the names."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._lanes: dict[tuple[str, str], int] = {}

    def number(self, process: str, lane: str) -> tuple[int, int]:
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        return pid, self._lanes.setdefault((process, lane), len(self._lanes) + 1)

    def names(self) -> Iterator[dict[str, Any]]:
        for process, pid in self._processes.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
        for (process, lane), tid in self._lanes.items():
            pid = self._processes[process]
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}


def _all(tables: Tables, setup: str) -> Iterator[dict[str, Any]]:
    tracks = _Tracks()
    spans: list[dict[str, Any]] = []
    for row in tables.decomposition.filter(pl.col("setup") == setup).iter_rows(named=True):
        name = f"{row['workload']} {row['pass']} {row['index']}"
        parts = {part: None if row[f"{part}_ns"] is None else row[f"{part}_ns"] / 1e6 for part in PARTS}
        details = {"prompt_tokens": row["prompt_tokens"], "ttft_ms": row["ttft_ns"] / 1e6, **parts}
        place = tracks.number(CLIENT, f"{row['workload']} request {row['index']}")
        spans.append({**_span(name, row["send_ns"], row["ttft_ns"], place), "cat": "request", "args": details})
    for row in tables.events.filter(pl.col("setup") == setup).iter_rows(named=True):
        details = {key: row[key] for key in ("bytes", "count", "step", "requests") if row[key]}
        if row["bytes"] and row["busy_ns"]:
            details["GB/s"] = round(row["bytes"] / row["busy_ns"], 2)
        place = tracks.number(row["process"], row["lane"])
        length = row["end_ns"] - row["start_ns"]
        span = _span(row["name"] or row["kind"], row["start_ns"], length, place)
        spans.append({**span, "cat": row["kind"], "args": details})
    yield from tracks.names()
    yield from spans


def _span(name: str, start: int, length: int, place: tuple[int, int]) -> dict[str, Any]:
    """A complete event; the format counts in microseconds."""
    return {"ph": "X", "name": name, "ts": start / 1000, "dur": length / 1000, "pid": place[0], "tid": place[1]}
