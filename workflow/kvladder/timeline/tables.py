"""A capture as tables: what is published of it, and all that figures, words and Perfetto files are made of.

Times are ns since the capture's first request was sent. `reduce` makes the tables of one setup, `collect` those of an
experiment.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from kvladder.config.records import CounterSnapshot
from kvladder.config.timelines import CaptureRecord
from kvladder.counters.reading import Delta, Reading, parse_pages
from kvladder.timeline import assemble
from kvladder.timeline.assemble import Request, Timeline
from kvladder.timeline.counters import COUNTED, CountedParts, counted_parts
from kvladder.timeline.decompose import PARTS, Decomposition, decompose

EVENTS: dict[str, Any] = {
    "setup": pl.String,
    "kind": pl.String,
    "process": pl.String,
    "lane": pl.String,
    "name": pl.String,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "busy_ns": pl.Int64,
    "bytes": pl.Int64,
    "count": pl.Int64,
    "step": pl.Int64,
    "requests": pl.String,
}
_KEY: dict[str, Any] = {"setup": pl.String, "workload": pl.String, "pass": pl.String, "round": pl.Int64}
DECOMPOSITION: dict[str, Any] = {
    **_KEY,
    "index": pl.Int64,
    "request": pl.String,
    "prompt_tokens": pl.Int64,
    "send_ns": pl.Int64,
    "ttft_ns": pl.Int64,
    **{f"{part}_ns": pl.Int64 for part in PARTS},
    "remainder_ns": pl.Int64,
    "problem": pl.String,
    "loaded_tokens": pl.Int64,
    "computed_tokens": pl.Int64,
    "transfer_bytes": pl.Int64,
    "transfer_busy_ns": pl.Int64,
    "transfer_hidden_ns": pl.Int64,
    "transfer_count": pl.Int64,
    "transfer_calls": pl.Int64,
    "until_copies_ns": pl.Int64,
    "after_copies_ns": pl.Int64,
    "lookups": pl.Int64,
}
COUNTED_TABLE: dict[str, Any] = {
    **_KEY,
    "ttft_ns": pl.Int64,
    **{f"{part}_ns": pl.Int64 for part in COUNTED},
    "remainder_ns": pl.Int64,
}
COST: dict[str, Any] = {**_KEY, "untraced_ttft_ns": pl.Int64, "traced_ttft_ns": pl.Int64, "ratio": pl.Float64}
CAPTURES: dict[str, Any] = {
    "setup": pl.String,
    "kind": pl.String,
    "host": pl.String,
    "status": pl.String,
    "reason": pl.String,
    "profiler": pl.String,
    "device": pl.Boolean,
    "valid": pl.Boolean,
    "quality": pl.String,
    "clock_spread_ns": pl.Int64,
    "ceiling": pl.Float64,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "captures": CAPTURES,
    "events": EVENTS,
    "decomposition": DECOMPOSITION,
    "counted": COUNTED_TABLE,
    "cost": COST,
}

ReadPass = Callable[[Delta], Reading]


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of an experiment's captures; see `SCHEMAS`. ``captures`` has every setup, the others those that could
    be read."""

    captures: pl.DataFrame
    events: pl.DataFrame
    decomposition: pl.DataFrame
    counted: pl.DataFrame
    cost: pl.DataFrame

    @property
    def setups(self) -> list[str]:
        """Setups whose timeline can be believed, in the order of the configuration."""
        return self.captures.filter(pl.col("valid"))["setup"].to_list()


def reduce(folder: Path, read: ReadPass, ceiling: float | None) -> Tables:
    """The tables of the capture in ``folder``.

    ``read`` is the setup's reading of counters, ``ceiling`` the roofline of the link that its KV takes to the device,
    in bytes per second. A capture that failed, or whose trace can't be read, has a line in ``captures`` that says why.
    """
    record = CaptureRecord.model_validate_json((folder / "capture.json").read_text(encoding="utf-8"))
    row: dict[str, Any] = {
        "setup": record.setup,
        "kind": record.kind,
        "host": _host(record),
        "status": record.status,
        "reason": record.reason,
    }
    row |= {"profiler": record.profiler, "ceiling": ceiling, "valid": False}
    if record.status == "failed":
        return _tables(captures=[row])
    try:
        timeline = assemble.load(folder, record)
    except (ValueError, sqlite3.Error) as error:
        return _tables(captures=[{**row, "reason": str(error)}])
    row |= {
        "device": timeline.sees_device,
        "valid": timeline.quality.valid,
        "quality": str(timeline.quality),
        "clock_spread_ns": max((clock.spread for clock in timeline.clocks.values()), default=None),
    }
    untraced = assemble.requests(folder / "untraced.requests.jsonl")
    origin = min((request.send for request in timeline.requests), default=0)
    return _tables(
        captures=[row],
        events=_events(timeline, origin),
        decomposition=[_decomposed(record.setup, item, origin) for item in decompose(timeline)],
        counted=_counted(folder, record, timeline.requests, read),
        cost=_cost(record.setup, timeline.requests, untraced),
    )


def _host(record: CaptureRecord) -> str:
    """The machine in words."""
    gpus = [
        f"{gpu['name']}, PCIe {gpu.get('pcie_generation_max', '?')} x{gpu.get('pcie_width_max', '?')}"
        for gpu in record.host.gpus
    ]
    return "; ".join([*dict.fromkeys(gpus), f"{record.host.cpu}, {record.host.cores} cores"])


def _tables(**rows: Sequence[Mapping[str, Any]]) -> Tables:
    frames = {name: pl.DataFrame(rows.get(name, []), schema=schema, orient="row") for name, schema in SCHEMAS.items()}
    return Tables(**frames)


def _events(timeline: Timeline, origin: int) -> list[dict[str, Any]]:
    return [
        {
            "setup": timeline.setup,
            "kind": event.kind,
            "process": event.process,
            "lane": event.lane,
            "name": event.name,
            "start_ns": event.start - origin,
            "end_ns": event.end - origin,
            "busy_ns": event.busy,
            "bytes": event.bytes,
            "count": event.count,
            "step": event.step,
            "requests": " ".join(event.requests),
        }
        for event in timeline.events
    ]


def _key(setup: str, request: Request) -> dict[str, Any]:
    return {"setup": setup, "workload": request.workload, "pass": request.name, "round": request.round}


def _decomposed(setup: str, item: Decomposition, origin: int) -> dict[str, Any]:
    request = item.request
    return {
        **_key(setup, request),
        "index": request.index,
        "request": request.id,
        "prompt_tokens": request.prompt_tokens,
        "send_ns": request.send - origin,
        "ttft_ns": request.ttft,
        **{f"{part}_ns": value for part, value in item.parts.items()},
        "remainder_ns": item.remainder,
        "problem": item.problem,
        "loaded_tokens": item.loaded_tokens,
        "computed_tokens": item.computed_tokens,
        "transfer_bytes": item.transfer_bytes,
        "transfer_busy_ns": item.transfer_busy,
        "transfer_hidden_ns": item.transfer_hidden,
        "transfer_count": item.transfer_count,
        "transfer_calls": item.transfer_calls,
        "until_copies_ns": item.until_copies,
        "after_copies_ns": item.after_copies,
        "lookups": item.lookups,
    }


def _grouped(requests: Iterable[Request]) -> dict[tuple[str, str, int], list[Request]]:
    groups: dict[tuple[str, str, int], list[Request]] = {}
    for request in requests:
        groups.setdefault((request.workload, request.name, request.round), []).append(request)
    return groups


def snapshots(folder: Path) -> dict[str, dict[str, str | None]]:
    """The servers' /metrics pages of a capture or a trial, raw, by mark."""
    lines = (folder / "counters.jsonl").read_text(encoding="utf-8").splitlines()
    found = [CounterSnapshot.model_validate_json(line) for line in lines]
    return {snapshot.mark: snapshot.pages for snapshot in found}


def counted_passes(
    pages: Mapping[str, Mapping[str, str | None]], sent: Iterable[Request], read: ReadPass, tier: str | None
) -> Iterator[tuple[Request, CountedParts]]:
    """The decomposition from counters of every pass whose two snapshots are there, with the pass's first request."""
    for (workload, name, number), group in _grouped(sent).items():
        label = f"{workload}/{name}/{number}"
        if f"{label}:start" not in pages or f"{label}:end" not in pages:
            continue
        delta = Delta(parse_pages(pages[f"{label}:start"]), parse_pages(pages[f"{label}:end"]))
        loads = name != "cold" and tier not in (None, "gpu")
        ttfts = [request.ttft for request in group]
        yield group[0], counted_parts(delta, ttfts, read(delta).load_time_ns, loads=loads)


def _counted(folder: Path, record: CaptureRecord, sent: Sequence[Request], read: ReadPass) -> list[dict[str, Any]]:
    passes = counted_passes(snapshots(folder), sent, read, record.expected.get("tier"))
    return [{**_key(record.setup, first), **counted_row(parts)} for first, parts in passes]


def counted_row(parts: CountedParts) -> dict[str, Any]:
    """Columns of a row, in ns."""
    values = {f"{part}_ns": value for part, value in parts.parts.items()}
    return {"ttft_ns": parts.ttft, **values, "remainder_ns": parts.remainder}


def _cost(setup: str, traced: Sequence[Request], untraced: Sequence[Request]) -> list[dict[str, Any]]:
    """Mean TTFT of each pass with and without the profiler: other prompts of the same lengths on the same server."""
    without = _grouped(untraced)
    found = []
    for key, group in _grouped(traced).items():
        if key in without:
            before, after = _mean(without[key]), _mean(group)
            row = {"untraced_ttft_ns": before, "traced_ttft_ns": after, "ratio": after / before}
            found.append({**_key(setup, group[0]), **row})
    return found


def _mean(requests: Sequence[Request]) -> int:
    return round(sum(request.ttft for request in requests) / len(requests))


def write(tables: Tables, folder: Path) -> None:
    """One parquet file a table, and CSV for all but events, of which there are many."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCHEMAS:
        frame: pl.DataFrame = getattr(tables, name)
        frame.write_parquet(folder / f"{name}.parquet", compression="zstd", statistics=False)
        if name != "events":
            frame.write_csv(folder / f"{name}.csv")


def load(folder: Path) -> Tables:
    """Tables that `write` wrote. Raises OSError."""
    return Tables(**{name: pl.read_parquet(folder / f"{name}.parquet") for name in SCHEMAS})


def collect(parts: Iterable[Tables]) -> Tables:
    """The tables of several setups as one, in their order."""
    every = list(parts)
    return Tables(
        **{
            name: pl.concat([getattr(part, name) for part in every]) if every else pl.DataFrame(schema=schema)
            for name, schema in SCHEMAS.items()
        }
    )
