"""One timeline of a capture: device events and marks together, each tied to steps and requests as far as it is known.

What ties them. Marks know requests. Work on a stream belongs to the span in which its API call was made: kernels to the
worker's step, copies to the connector's ``load``; a load of several requests puts one job after the other on streams,
in the order of its requests. Work of another process (LMCache's server copies on the GPU itself) belongs to the request
whose load that process is at, in the order of all loads; where that can't be told, to the loads that are open at that
time, and it is tagged where that is only one.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from kvladder.config.timelines import CaptureRecord
from kvladder.counters.reading import ENGINE
from kvladder.timeline import marks as mark_files
from kvladder.timeline import nsys, torch_trace
from kvladder.timeline.marks import Mark
from kvladder.timeline.model import COPIES, ON_DEVICE, Clock, Event, Quality

SERVER_LOADS = ("LMCacheDrivenTransferModule.retrieve",)
"""Ranges of another process in each of which it puts one request's load on a stream."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the client saw it; ``id`` is the server's name of the answer, empty where the record has none.
    Times in ns."""

    id: str
    workload: str
    name: str
    round: int
    index: int
    prompt_tokens: int
    send: int
    first_token: int
    end: int

    @property
    def ttft(self) -> int:
        """Time to the first token, in ns."""
        return self.first_token - self.send

    def is_of(self, engine_id: str) -> bool:
        """Whether the engine's id names this request: it appends to the id that the client is told."""
        return engine_id == self.id or engine_id.startswith(f"{self.id}-")


@dataclass(slots=True)
class Timeline:
    """Everything known of one capture, on the client's clock."""

    setup: str
    profiler: str
    requests: list[Request]
    marks: list[Mark]
    events: list[Event]
    quality: Quality
    clocks: dict[str, Clock] = field(default_factory=dict)
    kv_bytes_per_token: int | None = None

    @property
    def sees_device(self) -> bool:
        """Whether the profiler recorded a GPU: without one, computing is known by the worker's steps only."""
        return any(event.kind == "kernel" for event in self.events)


def requests(path: Path) -> list[Request]:
    """Requests that came through, from a capture's ``requests.jsonl``, in the order they were sent."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["status"] != "ok" or None in (row["send_ns"], row["first_token_ns"], row["end_ns"]):
            continue
        found.append(
            Request(
                id=row.get("response_id") or "",
                workload=row["workload"],
                name=row["pass"],
                round=row["round"],
                index=row["index"],
                prompt_tokens=row["prompt_tokens"],
                send=row["send_ns"],
                first_token=row["first_token_ns"],
                end=row["end_ns"],
            )
        )
    return sorted(found, key=lambda request: request.send)


def load(folder: Path, record: CaptureRecord) -> Timeline:
    """The timeline of a finished capture in ``folder``.

    Raises ValueError or sqlite3.Error for a trace that can't be read or placed in time; the message names it.
    """
    quality, clocks, found = Quality(), {}, []
    if record.profiler == "nsys":
        sources = [(name, nsys.read, folder / path) for name, path in record.databases.items()]
    else:
        files = [path for window in record.windows for path in window.files]
        sources = [(ENGINE, torch_trace.read, folder / path) for path in files]
    for name, read, path in sources:
        events, counted, clock = read(path, name)
        found += events
        quality.add(counted)
        clocks[path.name] = clock
    sent = requests(folder / "requests.jsonl")
    first, last = (sent[0].send, max(request.end for request in sent)) if sent else (0, 0)
    marks = [mark for mark in mark_files.read(folder / "profile") if mark.end >= first and mark.start <= last]
    kept = [event for event in found if event.end >= first and event.start <= last]
    tie(kept, marks)
    step = 0
    for mark in marks:
        step += mark.name == "execute"
        event = mark.event(step if mark.name == "execute" else None)
        if mark.name == "copy-load":
            event.requests = _waiting(event, marks)
        kept.append(event)
    return Timeline(
        setup=record.setup,
        profiler=record.profiler,
        requests=sent,
        marks=marks,
        events=sorted(kept, key=lambda event: (event.start, event.end)),
        quality=quality,
        clocks=clocks,
        kv_bytes_per_token=record.expected.get("kv_bytes_per_token"),
    )


def tie(events: Sequence[Event], marks: Sequence[Mark]) -> None:
    """Give device events their step and requests, in place."""
    steps = [mark for mark in marks if mark.name == "execute"]
    loads = [mark for mark in marks if mark.name == "load"]
    samples = [mark for mark in marks if mark.name == "sample"]
    starts = [mark.start for mark in steps]
    sampled = [mark.start for mark in samples]
    jobs = [*_engine_jobs(events, loads), *_server_jobs(events, loads)]
    for event in events:
        if event.kind == "kernel" and event.process == ENGINE:
            when = event.launched if event.launched is not None else event.start
            place = bisect.bisect_right(starts, when) - 1
            if place < 0:
                continue
            event.step = place + 1
            event.requests = steps[place].requests
            last = bisect.bisect_right(sampled, when) - 1
            if last >= 0 and when <= samples[last].end:
                event.name = f"sample: {event.name}"
        elif event.kind in ON_DEVICE and (job := _job_of(event, jobs)) is not None:
            event.requests = (job.request,)
        elif event.kind in COPIES:
            event.requests = _copied_for(event, loads, marks)


@dataclass(frozen=True, slots=True)
class _Job:
    """What a process launched from ``start`` to ``end`` loads KV for one request."""

    process: str
    start: int
    end: int
    request: str


def _job_of(event: Event, jobs: Sequence[_Job]) -> _Job | None:
    when = event.launched
    if when is None or event.kind == "d2h":
        return None
    return next((job for job in jobs if job.process == event.process and job.start <= when <= job.end), None)


def _engine_jobs(events: Sequence[Event], loads: Sequence[Mark]) -> list[_Job]:
    """The jobs of loads with several requests: as many launches as requests, in their order; others aren't told apart.

    OffloadingConnector's ``start_load_kv`` makes one batch of copies a job, and its jobs are what the mark names.
    """
    found: list[_Job] = []
    for load in loads:
        inside = (event.launched for event in events if event.kind == "h2d" and event.process == ENGINE)
        launches = sorted({when for when in inside if when is not None and load.start <= when <= load.end})
        if len(launches) != len(load.requests) or len(launches) < 2:
            continue
        ends = [*(after - 1 for _, after in pairwise(launches)), load.end]
        rows = zip(launches, ends, load.requests, strict=True)
        found += [_Job(ENGINE, start, end, request) for start, end, request in rows]
    return found


def _server_jobs(events: Sequence[Event], loads: Sequence[Mark]) -> list[_Job]:
    """The jobs of another process, which takes loads in the order in which they are asked for; none unless there are
    as many as loads, each begun after it was asked for."""
    asked = [(load.start, request) for load in loads for request in load.requests]
    ranges = sorted((event.start, event.end, event.process) for event in events if event.name in SERVER_LOADS)
    if len(asked) != len(ranges):
        return []
    pairs = list(zip(asked, ranges, strict=True))
    if any(begun < when for (when, _), (begun, _, _) in pairs):
        return []
    return [_Job(process, start, end, request) for (_, request), (start, end, process) in pairs]


def _copied_for(event: Event, loads: Sequence[Mark], marks: Sequence[Mark]) -> tuple[str, ...]:
    """Requests that a copy brings KV for; empty for stores, and where it isn't known."""
    if event.kind == "d2h":
        return ()
    if event.launched is not None:
        within = [mark for mark in loads if mark.start <= event.launched <= mark.end]
        if within:
            return within[-1].requests
        if event.process == ENGINE:
            return ()  # inputs of a step, not KV
    return _waiting(event, marks)


def _waiting(event: Event, marks: Sequence[Mark]) -> tuple[str, ...]:
    """The request whose load was open during an event; empty where that is none, or several."""
    opened = {request for mark in marks if mark.name == "load" and mark.start <= event.end for request in mark.requests}
    done = {request for mark in marks if mark.name == "loaded" and mark.end <= event.start for request in mark.requests}
    waiting = tuple(sorted(opened - done))
    return waiting if len(waiting) == 1 else ()
