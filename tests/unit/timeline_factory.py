"""Captures without a server or a GPU: nsys databases by the exporter's documented schema, marks, requests, records.

`write_capture` writes the folder of a capture of one hit, on a made-up device whose times are known to the nanosecond.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from kvladder.config.records import CounterSnapshot, EffectiveConfig, HostRecord, PassRecord
from kvladder.config.timelines import CaptureRecord

MS = 1_000_000
PID, THREAD = 4000, 4001
OFFSET = 7_000_000_000_000
"""CLOCK_MONOTONIC less the recording's own time, in ns."""

_TABLES = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER,
  globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, deprecatedSrcId INTEGER, srcKind INTEGER,
  dstKind INTEGER, srcDeviceId INTEGER, srcContextId INTEGER, dstDeviceId INTEGER, dstContextId INTEGER,
  migrationCause INTEGER, graphNodeId INTEGER, virtualAddress INTEGER, copyCount INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER,
  globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
  globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
  category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
  domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER,
  floatValue REAL, jsonTextId INTEGER, jsonText TEXT, binaryData TEXT);
"""

H2D, D2H, D2D = 1, 2, 8
MARK, PUSH_POP, START_END = 34, 59, 60


class Database:
    """An nsys export under construction. Times are the recording's own."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.path = path
        self._connection = sqlite3.connect(path)
        self._connection.executescript(_TABLES)
        self._strings: dict[str, int] = {}
        self._correlation = 0

    def close(self) -> Path:
        """Write it out."""
        self._connection.commit()
        self._connection.close()
        return self.path

    def _string(self, text: str) -> int:
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 1
            self._connection.execute("INSERT INTO StringIds VALUES (?, ?)", (self._strings[text], text))
        return self._strings[text]

    def _insert(self, table: str, **values: Any) -> None:
        names = ", ".join(f'"{name}"' for name in values)
        marks = ", ".join("?" * len(values))
        self._connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))

    def call(self, name: str, start: int, end: int) -> int:
        """An API call; returns its correlation id."""
        self._correlation += 1
        values = {"eventClass": 0, "globalTid": (PID << 24) | THREAD, "returnValue": 0}
        ids = {"correlationId": self._correlation, "nameId": self._string(name)}
        self._insert("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, **values, **ids)
        return self._correlation

    def copy(self, start: int, end: int, size: int, *, kind: int = H2D, stream: int = 7, call: int = 0) -> None:
        """A copy on a stream."""
        place = {"deviceId": 0, "contextId": 1, "streamId": stream, "globalPid": PID << 24}
        what = {"correlationId": call, "bytes": size, "copyKind": kind, "copyCount": 1}
        self._insert("CUPTI_ACTIVITY_KIND_MEMCPY", start=start, end=end, **place, **what)

    def kernel(self, start: int, end: int, name: str = "gemm", *, stream: int = 0, call: int = 0) -> None:
        """A kernel on a stream."""
        place = {"deviceId": 0, "contextId": 1, "streamId": stream, "globalPid": PID << 24, "correlationId": call}
        text = self._string(name)
        self._insert("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, **place, demangledName=text, shortName=text)

    def range(self, name: str, start: int, end: int, *, kind: int = PUSH_POP, thread: int = THREAD) -> None:
        """An NVTX range."""
        tid = (PID << 24) | thread
        self._insert("NVTX_EVENTS", start=start, end=end, eventType=kind, text=name, globalTid=tid, domainId=0)

    def clock(self, *times: int, late: int = 0) -> None:
        """The plugin's marks of the clock at these times, each ``late`` ns after it was named."""
        for time in times:
            name = f"kvladder:clock:{time - late + OFFSET}"
            tid = (PID << 24) | THREAD
            self._insert("NVTX_EVENTS", start=time, eventType=MARK, textId=self._string(name), globalTid=tid)


def mark(name: str, start: int, end: int | None = None, requests: Iterable[str] = (), **more: Any) -> dict[str, Any]:
    """A line of the plugin's marks; times as in the recording."""
    times = {"start": start + OFFSET, "end": (start if end is None else end) + OFFSET}
    return {"name": name, **times, "pid": PID, "tid": THREAD, "requests": list(requests), **more}


def request(name: str, send: int, first_token: int, **more: Any) -> dict[str, Any]:
    """A line of the client's requests; times as in the recording."""
    times = {"send_ns": send + OFFSET, "first_token_ns": first_token + OFFSET, "end_ns": first_token + OFFSET + MS}
    line = {"workload": "repeat", "pass": "warm", "round": 2, "index": 0, "prompt_tokens": 1000, "status": "ok"}
    return {**line, "response_id": name, **times, **more}


def record(setup: str, profiler: str = "nsys", **more: Any) -> CaptureRecord:
    """The record of a finished capture."""
    host = HostRecord(host_id="cafe", cpu="cpu", cores=2, memory_bytes=1, kernel="6", gpus=[{"name": "GPU"}])
    passes = [
        PassRecord(workload="repeat", name="warm", round=2, concurrency=1, requests=1, failed=0, start_ns=0, end_ns=1)
    ]
    values: dict[str, Any] = {
        "experiment": "made-up",
        "setup": setup,
        "kind": "native",
        "status": "completed",
        "started_at": "2026-11-29T00:00:00+00:00",
        "profiler": profiler,
        "host": host,
        "stack": {},
        "harness": {},
        "effective": EffectiveConfig(),
        "expected": {"tier": "cpu", "kv_bytes_per_token": 1000},
        "servers": [],
        "passes": passes,
    }
    return CaptureRecord(**{**values, **more})


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def one_hit(database: Database, *, copies: int = 2, step: int = 0) -> list[dict[str, Any]]:
    """A hit from 10 to 100 ms: 4 ms until the scheduler has it, a lookup of 1 ms, a load that copies 20 MB in
    ``copies`` pieces from 20 to 60 ms and is noticed at 65, a step from 66 to 95 whose kernel runs until 96, its result
    at 98, and 2 ms back to the client. ``step`` shifts all by so many ns. Returns the marks."""
    name = ["cmpl-a-0-1234"]

    def at(milliseconds: float) -> int:
        return round(milliseconds * MS) + step

    database.clock(*(at(number) for number in (9, 30, 66, 99)))
    call = database.call("cudaMemcpyBatchAsync_v12080", at(19.5), at(19.9))
    length = 40 // copies
    for number in range(copies):
        begin = 20 + number * length
        database.copy(at(begin), at(begin + length) - 1000, 20_000_000 // copies, call=call)
    gemm = database.call("cudaLaunchKernel_v7000", at(70), at(70.1))
    database.kernel(at(70), at(96), call=gemm)
    sampling = database.call("cudaLaunchKernel_v7000", at(95.5), at(95.6))
    database.kernel(at(96.1), at(96.5), "argmax", call=sampling)
    database.copy(at(69), at(69.01), 4096, stream=0, call=database.call("cudaMemcpyAsync_v3020", at(68), at(68.1)))
    database.call("cudaStreamSynchronize_v3020", at(96), at(97))
    return [
        mark("accepted", at(12), requests=["cmpl-a-0"]),
        mark("arrived", at(14), requests=name, tokens=1000),
        mark("schedule", at(15), at(17), []),
        mark("lookup", at(15.5), at(16.5), name, tokens=992),
        mark("execute", at(19), at(20), []),
        mark("load", at(19.2), at(19.95), name),
        mark("loaded", at(64.9), at(65), name),
        mark("execute", at(66), at(95), name, tokens=[8]),
        mark("sample", at(95.2), at(95.8), name),
        mark("update", at(97), at(98), name),
        mark("outputs", at(99), at(99.5), name),
    ]


def write_capture(
    folder: Path, setup: str = "native", *, first_token: float = 100, slower: float = 0, pages: str | None = None
) -> CaptureRecord:
    """A capture of one hit (`one_hit`); ``slower`` delays the client's first token by so many ms."""
    database = Database(folder / "profile" / "engine.sqlite")
    marks = one_hit(database)
    database.close()
    write_lines(folder / "profile" / "marks-4000.jsonl", marks)
    sent = request("cmpl-a", 10 * MS, round((first_token + slower) * MS))
    write_lines(folder / "requests.jsonl", [sent])
    write_lines(folder / "untraced.requests.jsonl", [request("cmpl-b", 0, 60 * MS)])
    snapshots = [
        CounterSnapshot(t_ns=0, mark=f"repeat/warm/2:{when}", pages={"engine": pages}) for when in ("start", "end")
    ]
    lines = [snapshot.model_dump_json(by_alias=True) + "\n" for snapshot in snapshots]
    (folder / "counters.jsonl").write_text("".join(lines), encoding="utf-8")
    done = record(setup, databases={"engine": "profile/engine.sqlite"})
    (folder / "capture.json").write_text(done.model_dump_json(by_alias=True), encoding="utf-8")
    return done


def rows_of(path: Path, table: str) -> int:
    """Rows of a table."""
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
