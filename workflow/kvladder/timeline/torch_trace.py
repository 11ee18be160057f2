"""torch's profiler traces: Chrome trace JSON, gzip or not, read event by event.

``json`` would take twenty times a trace's size in memory. Events stand one after the other in ``traceEvents``, so they
are cut out by their braces and parsed one at a time.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvladder.timeline.model import CLOCK_MARK, Clock, Event, Kind, Quality, fit_clock, merged, usable

_ARRAY = '"traceEvents"'
_CHUNK = 1 << 20
_COPIES: dict[str, Kind] = {"HtoD": "h2d", "DtoH": "d2h", "DtoD": "d2d", "PtoP": "d2d"}
_DEVICE = {"kernel", "gpu_memcpy"}
_RUNTIME = {"cuda_runtime", "cuda_driver"}
_SYNC = "Synchronize"


class BrokenTrace(ValueError):
    """A trace that can't be read to its end; the message names the file."""


def events(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of ``traceEvents`` in the file's order. Raises BrokenTrace for a file that is cut or is no trace."""
    with closing(cast(BinaryIO, gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb"))) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8")
        decoder = json.JSONDecoder()
        try:
            buffer = _skip_to_array(text)
            while True:
                buffer = buffer.lstrip(", \n\r\t")
                if buffer.startswith("]"):
                    return
                try:
                    event, end = decoder.raw_decode(buffer) if buffer else (None, 0)
                except ValueError:
                    event, end = None, 0
                if end == 0:
                    more = text.read(_CHUNK)
                    if not more:
                        raise BrokenTrace(f"{path.name}: ends in the middle of an event")
                    buffer += more
                    continue
                buffer = buffer[end:]
                if isinstance(event, dict):
                    yield event
        except (EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
            raise BrokenTrace(f"{path.name}: {error}") from error
        except LookupError as error:
            raise BrokenTrace(f"{path.name}: has no {_ARRAY}") from error


def _skip_to_array(text: io.TextIOWrapper) -> str:
    """What follows the opening bracket of the array, as far as it has been read. Raises LookupError without one."""
    buffer = ""
    while chunk := text.read(_CHUNK):
        buffer += chunk
        place = buffer.find(_ARRAY)
        bracket = buffer.find("[", place) if place >= 0 else -1
        if bracket >= 0:
            return buffer[bracket + 1 :]
        if place < 0:
            buffer = buffer[-len(_ARRAY) :]
    raise LookupError


def read(path: Path, process: str) -> tuple[list[Event], Quality, Clock]:
    """Events of one trace on the client's clock, copies merged. Two passes: the file isn't in order of time.

    Raises BrokenTrace, and ValueError where the trace has no clock mark.
    """
    quality, marks, launches = Quality(), [], {}
    device: list[Event] = []
    host: list[Event] = []
    for event in events(path):
        category = event.get("cat")
        if event.get("ph") != "X" or category is None:
            continue
        name, start = str(event.get("name", "")), _ns(event.get("ts"))
        end = start + _ns(event.get("dur"))
        arguments = event.get("args") or {}
        if name.startswith(CLOCK_MARK):
            marks.append((start, int(name.removeprefix(CLOCK_MARK))))
        elif category in _RUNTIME:
            if (correlation := arguments.get("correlation")) is not None:
                launches[correlation] = start
            if _SYNC in name:
                host.append(Event("sync", start, end, process, f"thread {event.get('tid')}", name))
        elif category in _DEVICE:
            device.append(_on_device(event, start, end, process))
        elif category == "user_annotation":
            host.append(Event("engine", start, end, process, f"thread {event.get('tid')}", name))
    place = fit_clock(marks)
    for each in device:
        each.launched = launches.get(each.launched)
    device.sort(key=lambda event: event.start)
    found = list(merged(usable(device, quality)))
    for each in [*found, *host]:
        each.start, each.end = place(each.start), place(each.end)
        each.launched = None if each.launched is None else place(each.launched)
    return sorted([*found, *host], key=lambda event: event.start), quality, place


def _on_device(event: dict[str, Any], start: int, end: int, process: str) -> Event:
    """One record of the device; until all are read, its launch is the correlation id."""
    name, arguments = str(event.get("name", "")), event.get("args") or {}
    kinds = _COPIES.items() if event["cat"] == "gpu_memcpy" else ()
    copy = next((kind for word, kind in kinds if word in name), None)
    return Event(
        kind=copy or "kernel",
        start=start,
        end=end,
        process=process,
        lane=f"GPU {arguments.get('device', event.get('pid'))} stream {arguments.get('stream', event.get('tid'))}",
        name="" if copy else name,
        bytes=arguments.get("bytes") if copy else None,
        launched=arguments.get("correlation"),
    )


def _ns(microseconds: Any) -> int:
    return round(float(microseconds) * 1000) if microseconds is not None else 0
