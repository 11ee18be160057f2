"""Nsight Systems' SQLite export: copies, kernels, synchronisation and NVTX ranges, read row by row.

Tables and columns are those of the exporter's documented schema; a column that an older or newer exporter leaves out is
read as unknown. Times are ns since the recording began, so they are brought onto the client's clock by NVTX marks that
the engine plugin makes (`model.fit_clock`).
"""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kvladder.counters.reading import ENGINE
from kvladder.timeline.model import CLOCK_MARK, Clock, Event, Kind, Quality, fit_clock, merged, usable

REQUEST_RANGE = "kvladder:request:"

COPY_KINDS: dict[int, Kind] = {1: "h2d", 2: "d2h", 8: "d2d", 10: "d2d"}
"""CUPTI's copy kinds: host to device, device to host, inside a device, between devices. The others touch no host."""

MARK, PUSH_POP, START_END = 34, 59, 60
"""NVTX event types. Start/end ranges may begin and end on different threads, push/pop ranges are a thread's own."""

MEMCPY, KERNEL = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_KERNEL"
RUNTIME, SYNC = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
NVTX, STRINGS = "NVTX_EVENTS", "StringIds"

COLUMNS: dict[str, tuple[str, ...]] = {
    MEMCPY: ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "bytes", "copyKind", "copyCount"),
    KERNEL: ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "shortName"),
    RUNTIME: ("start", "end", "globalTid", "correlationId", "nameId"),
    SYNC: ("start", "end", "globalPid", "streamId", "syncType"),
    NVTX: ("start", "end", "eventType", "rangeId", "text", "textId", "globalTid", "domainId"),
    STRINGS: ("id", "value"),
}
"""What is read, and all that `extract` keeps."""

SYNC_CALLS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize")

_LAUNCHING = ("Launch", "Memcpy")

_CACHE_KIB = 65536


@dataclass(frozen=True, slots=True)
class Range:
    """One NVTX range, in the recording's own time."""

    name: str
    start: int
    end: int
    thread: int


def connect(path: Path) -> sqlite3.Connection:
    """Open a database for reading, with little memory: sorting spills to disk. Raises sqlite3.Error."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
    connection.execute("PRAGMA temp_store=FILE")
    return connection


def columns(connection: sqlite3.Connection, table: str) -> set[str]:
    """Columns of a table; empty where there is no such table: nothing of that kind was recorded."""
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}


def rows(connection: sqlite3.Connection, table: str, *, by: str = "start") -> Iterator[tuple[int | str | None, ...]]:
    """Rows of a table as (`COLUMNS`), ordered by ``by``; a column that isn't there is None."""
    have = columns(connection, table)
    if not have:
        return
    wanted = ", ".join(f'"{name}"' if name in have else f'NULL AS "{name}"' for name in COLUMNS[table])
    yield from connection.execute(f'SELECT {wanted} FROM {table} ORDER BY "{by}"')  # noqa: S608 (our own names)


def strings(connection: sqlite3.Connection) -> Callable[[int | None], str]:
    """Look up a string by its id; empty for one that isn't there."""
    found: dict[int, str] = {}

    def text(key: int | None) -> str:
        if key is None:
            return ""
        if key not in found:
            row = connection.execute(f"SELECT value FROM {STRINGS} WHERE id = ?", (key,)).fetchone()  # noqa: S608
            found[key] = row[0] if row else ""
        return found[key]

    return text


def ranges(connection: sqlite3.Connection) -> Iterator[Range]:
    """Every NVTX range of either type, by start; one that never ended is left out."""
    text_of = strings(connection)
    for start, end, kind, _, text, text_id, thread, _ in rows(connection, NVTX):
        if kind in (PUSH_POP, START_END) and end is not None:
            yield Range(str(text or text_of(text_id)), int(start), int(end), int(thread or 0))  # type: ignore[arg-type]


def request_ranges(connection: sqlite3.Connection) -> dict[str, Range]:
    """The ranges that the engine plugin opens for requests, by request: nobody else's, whatever a library marks.

    They overlap and may end on another thread. Raises ValueError where one request has two.
    """
    found: dict[str, Range] = {}
    for each in ranges(connection):
        if each.name.startswith(REQUEST_RANGE):
            request = each.name.removeprefix(REQUEST_RANGE)
            if request in found:
                raise ValueError(f"two NVTX ranges for the request {request}")
            found[request] = each
    return found


def clock(connection: sqlite3.Connection) -> Clock:
    """This recording's clock, from the plugin's marks. Raises ValueError where there is none."""
    text_of = strings(connection)
    marks = []
    for start, _, kind, _, text, text_id, _, _ in rows(connection, NVTX):
        name = str(text or text_of(text_id)) if kind == MARK else ""  # type: ignore[arg-type]
        if name.startswith(CLOCK_MARK):
            marks.append((int(start), int(name.removeprefix(CLOCK_MARK))))  # type: ignore[arg-type]
    return fit_clock(marks)


def read(path: Path, process: str) -> tuple[list[Event], Quality, Clock]:
    """Events of one process's recording, on the client's clock, copies merged.

    Raises ValueError where the recording can't be placed in time, sqlite3.Error for no such database.
    """
    quality = Quality()
    with closing(connect(path)) as connection:
        place = clock(connection)
        launches = _launches(connection)
        events = list(merged(usable(_device(connection, process, place, launches), quality)))
        events += _synchronisation(connection, process, place)
        events += _ranges(connection, process, place)
        for request, each in request_ranges(connection).items():
            lane = f"request {request}"  # requests overlap, and a lane's slices may not
            times = place(each.start), place(each.end)
            events.append(Event("request", *times, process, lane, request, requests=(request,)))
    return sorted(events, key=lambda event: event.start), quality, place


def _launches(connection: sqlite3.Connection) -> dict[int, int]:
    """Start of the API call by correlation id: what was going on in the program when work was put on a stream."""
    text_of = strings(connection)
    found: dict[int, int] = {}
    for start, _, _, correlation, name_id in rows(connection, RUNTIME):
        # Most calls put nothing on a stream; those of a long recording are millions.
        if correlation is not None and any(word in text_of(name_id) for word in _LAUNCHING):  # type: ignore[arg-type]
            found[int(correlation)] = int(start)  # type: ignore[arg-type]
    return found


def _device(connection: sqlite3.Connection, process: str, place: Clock, launches: dict[int, int]) -> Iterator[Event]:
    """Copies and kernels in order of their start. A record without a time keeps its zeros: `usable` counts it."""
    copies = (
        Event(
            kind=COPY_KINDS[int(kind)],
            start=_placed(place, start, end),
            end=_placed(place, end, start),
            process=process,
            lane=f"GPU {device} stream {stream}",
            bytes=None if moved is None else int(moved),
            count=int(count or 1),
            launched=_launch(place, launches, correlation),
        )
        for start, end, device, stream, correlation, _, moved, kind, count in rows(connection, MEMCPY)
        if kind in COPY_KINDS
    )
    text_of = strings(connection)
    kernels = (
        Event(
            kind="kernel",
            start=_placed(place, start, end),
            end=_placed(place, end, start),
            process=process,
            lane=f"GPU {device} stream {stream}",
            name=text_of(name),  # type: ignore[arg-type]
            launched=_launch(place, launches, correlation),
        )
        for start, end, device, stream, correlation, _, name in rows(connection, KERNEL)
    )
    return heapq.merge(copies, kernels, key=lambda event: event.start)


def _placed(place: Clock, time: int | str | None, other: int | str | None) -> int:
    """A record's start or end on the client's clock. One whose buffer was lost has 0 for both, and keeps it."""
    return place(int(time or 0)) if time or other else 0


def _launch(place: Clock, launches: dict[int, int], correlation: int | str | None) -> int | None:
    start = launches.get(int(correlation)) if correlation is not None else None
    return None if start is None else place(start)


def _synchronisation(connection: sqlite3.Connection, process: str, place: Clock) -> Iterator[Event]:
    """API calls in which a thread waits for the device."""
    text_of = strings(connection)
    for start, end, thread, _, name_id in rows(connection, RUNTIME):
        name = text_of(name_id)  # type: ignore[arg-type]
        if name.startswith(SYNC_CALLS) and end is not None:
            lane = f"thread {int(thread or 0) & 0xFFFFFF}"
            yield Event("sync", place(int(start or 0)), place(int(end)), process, lane, name)


LIBRARY_RANGES = ("gpu_model_runner:", "schedule:", "execute_", "lmcache")
"""What names of ranges that say something begin with: the engine's own scopes, and LMCache's functions."""


def _ranges(connection: sqlite3.Connection, process: str, place: Clock) -> Iterator[Event]:
    for each in ranges(connection):
        if each.name.lower().startswith(LIBRARY_RANGES) or (process != ENGINE and "." in each.name):
            kind: Kind = "engine" if process == ENGINE else "rpc"
            lane = f"thread {each.thread & 0xFFFFFF}"
            yield Event(kind, place(each.start), place(each.end), process, lane, each.name)


def extract(source: Path, target: Path, since: int | None = None, until: int | None = None) -> dict[str, int]:
    """A small database with what is read here, of the rows that begin inside [since, until) in the recording's time.

    Returns rows by table. NVTX marks are kept whatever their time, or the extract would have no clock.
    """
    target.unlink(missing_ok=True)
    kept: dict[str, int] = {}
    with closing(connect(source)) as old, closing(sqlite3.connect(target)) as new:
        used: set[int] = set()
        for table, names in COLUMNS.items():
            have = [name for name in names if name in columns(old, table)]
            if not have:
                continue
            listed = ", ".join(f'"{name}"' for name in have)
            new.execute(f"CREATE TABLE {table} ({listed})")
            place = have.index("start") if "start" in have else None
            number = 0
            for row in old.execute(f"SELECT {listed} FROM {table}"):  # noqa: S608 (our own names)
                if table == STRINGS and row[0] not in used:
                    continue
                if place is not None and not _within(row[place], since, until) and table != NVTX:
                    continue
                used |= {row[have.index(name)] for name in ("shortName", "nameId", "textId") if name in have}
                new.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(have))})", row)  # noqa: S608
                number += 1
            kept[table] = number
        new.commit()
        new.execute("VACUUM")
    return kept


def _within(start: int | None, since: int | None, until: int | None) -> bool:
    if start is None:
        return True
    return (since is None or start >= since) and (until is None or start < until)
