"""Where the time went that a trial held its GPU or its machine: the measuring share, and the harness's own CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvladder.config.records import TrialRecord
from kvladder.tables.raw import RawTrial, samples

_S = 1_000_000_000

Row = dict[str, Any]

PARTS = ("start_s", "warm_up_s", "timed_s", "between_s", "right_kv_s", "stop_s")
"""Columns that a trial's held time splits into, in the order in which they come; what is left is ``rest_s``."""


def held_rows(raw: Sequence[RawTrial]) -> Iterable[Row]:
    """Rows of the table ``held``: one a trial that started a process, whatever became of it."""
    for trial in raw:
        if trial.record is not None and trial.record.servers:
            yield {**trial.key, "status": trial.status, **_split(trial.record), **_harness(trial)}


def _split(record: TrialRecord) -> Row:
    """From the first process started until all of them were gone.

    The lease was taken a few tenths of a second before; a trial that waited for another's GPU didn't hold one.
    """
    first, last = min(server.start_ns for server in record.servers), record.marks.get("stopped", record.end_ns)
    ready, warm, measured = (record.marks.get(name) for name in ("ready", "warm", "measured"))
    # Of a trial that came to its end without that mark nothing was to be checked.
    checked = record.marks.get("checked", measured if "stopped" in record.marks else None)
    timed = sum(part.end_ns - part.start_ns for part in record.timed)
    parts = {
        "start_s": _span(first, ready),
        "warm_up_s": _span(ready, warm),
        # Passes of a trial that failed in one of them are no measurement: their time is in the rest.
        "timed_s": None if measured is None else timed / _S,
        "between_s": None if warm is None or measured is None else (measured - warm - timed) / _S,
        "right_kv_s": _span(measured, checked),
        "stop_s": _span(checked, record.marks.get("stopped")),
    }
    held = (last - first) / _S
    rest = held - sum(value for value in parts.values() if value is not None)
    # Of a trial that ended as it should there is none: what sums of floats leave isn't shown.
    return {"gpus": len(record.host.gpus), "held_s": held, **parts, "rest_s": max(0.0, round(rest, 6))}


def _span(start: int | None, end: int | None) -> float | None:
    return None if start is None or end is None else (end - start) / _S


def _harness(trial: RawTrial) -> Row:
    """CPU that the harness's own processes took while passes ran, as shares (0–1) of all of the host's cores."""
    record = trial.record
    assert record is not None  # noqa: S101 (only recorded trials have a row)
    passes = record.timed
    timed = sum(part.end_ns - part.start_ns for part in passes)
    used = [part.client_cpu_ns for part in passes if part.client_cpu_ns is not None]
    row: Row = {"cores": record.host.cores}
    if timed and len(used) == len(passes):
        row |= {"client_cpu_s": sum(used) / _S, "client_share": sum(used) / timed / record.host.cores}
    found = samples(trial.folder).drop_nulls("sampler_cpu_ns")
    if found.height > 1:
        span, taken = (int(found[name][-1]) - int(found[name][0]) for name in ("t_ns", "sampler_cpu_ns"))
        row["sampler_share"] = taken / span / record.host.cores
    return row
