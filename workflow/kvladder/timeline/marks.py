"""What the engine plugin writes down: spans with requests (`kvladder_engine_plugin.marks`), as events.

They are on the client's clock already, need no profiler, and are what ties device work to requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvladder.counters.reading import ENGINE
from kvladder.timeline.model import Event, Kind

KINDS: dict[str, Kind] = {
    "execute": "step",
    "lookup": "lookup",
    "load": "rpc",
    "store": "rpc",
    "copy-load": "cpu_copy",
    "copy-store": "cpu_copy",
}
"""Spans that have a kind of their own; all others are ``engine``."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One span, or one moment. ``tokens``: of its requests in a step, in their order, or what a lookup found."""

    name: str
    start: int
    end: int
    pid: int
    thread: int
    requests: tuple[str, ...]
    tokens: tuple[int, ...] = ()
    bytes: int | None = None

    def event(self, step: int | None = None) -> Event:
        """As an event of the engine."""
        kind = KINDS.get(self.name, "engine")
        return Event(
            kind=kind,
            start=self.start,
            end=self.end,
            process=ENGINE,
            lane=f"thread {self.thread}",
            name=self.name,
            bytes=self.bytes,
            step=step,
            requests=self.requests,
        )


def read(folder: Path) -> list[Mark]:
    """All marks of a capture, by start. A last line that was cut by the process's end is left out."""
    found = [mark for path in sorted(folder.glob("marks-*.jsonl")) for mark in _lines(path)]
    return sorted(found, key=lambda mark: (mark.start, mark.end))


def _lines(path: Path) -> Iterator[Mark]:
    for line in path.read_text(encoding="utf-8").split("\n"):
        if not line.endswith("}"):
            continue
        fields = json.loads(line)
        tokens = fields.get("tokens")
        yield Mark(
            name=fields["name"],
            start=fields["start"],
            end=fields["end"],
            pid=fields["pid"],
            thread=fields["tid"],
            requests=tuple(fields["requests"]),
            tokens=tuple(tokens) if isinstance(tokens, list) else () if tokens is None else (tokens,),
            bytes=fields.get("bytes"),
        )
