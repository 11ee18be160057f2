"""From the cells' raw files to one table, and to what it says of the goals and of the peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from kvladder.bench.truth import gap_errors, held, ttft_bias
from kvladder.bench.usage import cpu_between
from kvladder.config.bench import BenchGoals, CellRecord
from kvladder.stats.samples import median, quantile

Row = dict[str, Any]

OWN = "kvladder"
TITLES = {OWN: "kvladder", "vllm": "vllm bench serve", "aiperf": "AIPerf", "guidellm": "GuideLLM"}
"""Clients as tables and figures call them, in their order there: the own one first."""
_MS = 1e6
_MB = 1e6

CELLS: dict[str, Any] = {
    "kind": pl.String,
    "client": pl.String,
    "version": pl.String,
    "cores": pl.Int64,
    "shared_core": pl.Boolean,
    "prompt_tokens": pl.Int64,
    "concurrency": pl.Int64,
    "repeat": pl.Int64,
    "requests": pl.Int64,
    "served": pl.Int64,
    "paired": pl.Int64,
    "client_ok": pl.Int64,
    "client_failed": pl.Int64,
    "stopped": pl.Boolean,
    "error": pl.String,
    "wall_s": pl.Float64,
    "ttft_bias_p50_ms": pl.Float64,
    "ttft_bias_p90_ms": pl.Float64,
    "ttft_bias_p99_ms": pl.Float64,
    "ttft_bias_min_ms": pl.Float64,
    "ttft_bias_max_ms": pl.Float64,
    "ttft_bias_all_p99_ms": pl.Float64,
    "first_wave_bias_p50_ms": pl.Float64,
    "first_wave_bias_max_ms": pl.Float64,
    "send_lead_p50_ms": pl.Float64,
    "send_lead_p99_ms": pl.Float64,
    "gaps": pl.Int64,
    "gap_error_p50_ms": pl.Float64,
    "gap_error_p99_ms": pl.Float64,
    "gap_error_max_ms": pl.Float64,
    "longest_gap_written_ms": pl.Float64,
    "longest_gap_seen_ms": pl.Float64,
    "held": pl.Float64,
    "held_share": pl.Float64,
    "rate_per_s": pl.Float64,
    "cpu_s": pl.Float64,
    "cpu_s_per_1000": pl.Float64,
    "peak_rss_mb": pl.Float64,
    "extra_mb_per_1000": pl.Float64,
    "loop_lag_max_ms": pl.Float64,
    "server_cpu_s": pl.Float64,
    "server_jitter_p50_ms": pl.Float64,
    "server_jitter_p99_ms": pl.Float64,
    "server_jitter_max_ms": pl.Float64,
    "server_read_late_p99_ms": pl.Float64,
    "server_write_p50_ms": pl.Float64,
    "server_write_p99_ms": pl.Float64,
}
"""Columns of ``cells``: one row a run of a cell. Quantiles that the sample can't carry, and what a client doesn't say,
are null. Times in milliseconds, memory in MB of 10^6 bytes.

``ttft_bias_*`` leaves the first wave (as many requests as slots) out, ``ttft_bias_all_p99_ms`` has it in.
``gap_error_*`` is of |seen - written|. ``send_lead`` is the part of the bias before the request reached the server's
socket, of clients that record moments. ``held`` is the mean in flight while there was something to send.
``cpu_s`` is the client's whole life, ``cpu_s_per_1000`` from the first arrival to the last write, per 1,000 requests;
the own client's is that of its pass. ``server_jitter`` is write less deadline, ``server_read_late`` read less arrival,
``server_write`` how long writes took.
"""

GOALS: dict[str, Any] = {
    "goal": pl.String,
    "column": pl.String,
    "above": pl.Int64,
    "up_to": pl.Int64,
    "limit": pl.Float64,
    "worst": pl.Float64,
    "where": pl.String,
    "cells": pl.Int64,
    "unknown": pl.Int64,
    "met": pl.Boolean,
}
"""Columns of ``goals``: the worst of the own client's cells on one core. ``column`` is that of ``cells``, ``above`` and
``up_to`` the levels of concurrency that the goal is about, null for no bound. ``met`` is null where nothing could be
checked, or what could be checked keeps the limit while other cells are ``unknown``."""

MACHINES: dict[str, Any] = {
    "host_id": pl.String,
    "cpu": pl.String,
    "cores": pl.Int64,
    "memory_bytes": pl.Int64,
    "kernel": pl.String,
    "cells": pl.Int64,
}
"""Columns of ``machines``: where the cells were measured; one row a machine and boot."""


@dataclass(frozen=True, slots=True)
class BenchTables:
    """The bench's tables: `CELLS`, `GOALS` and `MACHINES` describe their columns."""

    cells: pl.DataFrame
    goals: pl.DataFrame
    machines: pl.DataFrame


def load(folder: Path) -> BenchTables:
    """What `build` wrote. Raises OSError."""
    return BenchTables(*(pl.read_parquet(folder / f"{name}.parquet") for name in ("cells", "goals", "machines")))


def build(folders: Iterable[Path], goals: BenchGoals, out: Path) -> None:
    """Write ``cells``, ``goals`` and ``machines`` (parquet, csv) and ``summary.md``. Equal cells give equal bytes.

    Raises OSError or ValueError for a cell that can't be read.
    """
    records = {folder: _record(folder) for folder in folders}
    rows = sorted((_row(*cell) for cell in records.items()), key=_order)
    judged = judge(rows, goals)
    out.mkdir(parents=True, exist_ok=True)
    tables = (("cells", CELLS, rows), ("goals", GOALS, judged), ("machines", MACHINES, _machines(records.values())))
    for name, schema, table in tables:
        frame = pl.DataFrame(table, schema=schema)
        frame.write_parquet(out / f"{name}.parquet")
        frame.write_csv(out / f"{name}.csv", float_precision=6)
    (out / "summary.md").write_text(summary(rows, judged), encoding="utf-8")


def _order(row: Row) -> tuple[Any, ...]:
    columns = ("kind", "prompt_tokens", "concurrency", "cores", "client", "repeat")
    return ("schedule rate".find(row["kind"]) < 0, *(row[column] for column in columns))


def read_cell(folder: Path) -> Row:
    """One row of ``cells``. Raises OSError or ValueError."""
    return _row(folder, _record(folder))


def _record(folder: Path) -> CellRecord:
    return CellRecord.model_validate_json((folder / "cell.json").read_text(encoding="utf-8"))


def _row(folder: Path, record: CellRecord) -> Row:
    requests = pl.read_parquet(folder / "requests.parquet").sort("arrival_ns", "number")
    cell = record.cell
    own = {
        name: getattr(cell, name) for name in ("client", "cores", "prompt_tokens", "concurrency", "repeat", "requests")
    }
    return {
        "kind": cell.kind,
        **own,
        "version": record.client_version,
        "shared_core": record.shared_core,
        "served": requests.height,
        "paired": requests["client_ok"].count(),
        "client_ok": record.client_ok,
        "client_failed": record.client_failed,
        "stopped": record.exit_code is None,
        "error": record.error,
        "wall_s": record.wall_s,
        "server_cpu_s": record.server_cpu_s,
        **_biases(requests, cell.concurrency),
        **_gaps(requests),
        **_load(requests, record),
        **_server(requests, cell.itl_ms, cell.fault == "none"),
    }


def _machines(records: Iterable[CellRecord]) -> list[Row]:
    columns = [name for name in MACHINES if name != "cells"]
    hosts = (record.host.model_dump() for record in records)
    counts = Counter(tuple(host[name] for name in columns) for host in hosts)
    return [dict(zip(MACHINES, (*host, count), strict=True)) for host, count in sorted(counts.items())]


def _biases(requests: pl.DataFrame, concurrency: int) -> Row:
    stamps = requests.select("client_ttft_ns", "arrival_ns", "write_ns").iter_rows()
    bias = [None if value is None else value / _MS for value in (ttft_bias(*row) for row in stamps)]
    first, rest = bias[:concurrency], bias[concurrency:]
    known = [value for value in rest if value is not None]
    lead = _ms(requests["arrival_ns"] - requests["client_send_ns"])[concurrency:]
    return {
        "ttft_bias_p50_ms": quantile(rest, 0.5),
        "ttft_bias_p90_ms": quantile(rest, 0.9),
        "ttft_bias_p99_ms": quantile(rest, 0.99),
        "ttft_bias_min_ms": min(known, default=None),
        "ttft_bias_max_ms": max(known, default=None),
        "ttft_bias_all_p99_ms": quantile(bias, 0.99),
        "first_wave_bias_p50_ms": median(first),
        "first_wave_bias_max_ms": _largest(first),
        "send_lead_p50_ms": quantile(lead, 0.5),
        "send_lead_p99_ms": quantile(lead, 0.99),
    }


def _gaps(requests: pl.DataFrame) -> Row:
    gaps = requests.select("client_gaps_ns", "write_ns").iter_rows()
    errors = [abs(error) / _MS for row in gaps for error in gap_errors(*row) or ()]
    paired = requests.filter(pl.col("client_gaps_ns").is_not_null())
    written = _ms(paired.select(pl.col("write_ns").list.diff(null_behavior="drop")).to_series().explode())
    seen = _ms(paired["client_gaps_ns"].explode())
    return {
        "gaps": len(errors),
        "gap_error_p50_ms": quantile(errors, 0.5),
        "gap_error_p99_ms": quantile(errors, 0.99),
        "gap_error_max_ms": max(errors, default=None),
        "longest_gap_written_ms": _largest(written),
        "longest_gap_seen_ms": _largest(seen),
    }


def _load(requests: pl.DataFrame, record: CellRecord) -> Row:
    count = requests.height
    ended = requests.filter(pl.col("end_ns").is_not_null())
    row: Row = {
        "cpu_s": record.cpu_s,
        "peak_rss_mb": record.peak_rss_bytes / _MB,
        "extra_mb_per_1000": None if record.extra_rss_bytes is None else record.extra_rss_bytes / _MB / count * 1000,
        "loop_lag_max_ms": None if record.loop_lag_max_ns is None else record.loop_lag_max_ns / _MS,
    }
    if ended.is_empty():
        return row
    arrivals, ends = ended["arrival_ns"].to_list(), ended["end_ns"].to_list()
    flying = held(arrivals, ends, record.cell.concurrency)
    cpu = record.pass_cpu_s
    if cpu is None:
        cpu = cpu_between(record.samples, min(arrivals), max(ends))
    return row | {
        "held": flying,
        "held_share": None if flying is None else flying / record.cell.concurrency,
        "rate_per_s": len(ends) / (max(ends) - min(arrivals)) * 1e9,
        "cpu_s_per_1000": None if cpu is None else cpu / count * 1000,
    }


def _server(requests: pl.DataFrame, itl_ms: float, faultless: bool) -> Row:
    late = _ms(requests["first_read_ns"] - requests["arrival_ns"])
    took = _ms(requests["write_took_ns"].explode())
    row: Row = {
        "server_read_late_p99_ms": quantile(late, 0.99),
        "server_write_p50_ms": quantile(took, 0.5),
        "server_write_p99_ms": quantile(took, 0.99),
    }
    if not faultless:
        return row
    # Every write's lateness behind its own deadline: first token's plus k gaps.
    writes = requests.select("due_ns", "write_ns", k=pl.int_ranges(pl.col("write_ns").list.len())).explode(
        "write_ns", "k"
    )
    jitter = _ms(writes["write_ns"] - writes["due_ns"] - (writes["k"] * round(itl_ms * _MS)))
    return row | {
        "server_jitter_p50_ms": quantile(jitter, 0.5),
        "server_jitter_p99_ms": quantile(jitter, 0.99),
        "server_jitter_max_ms": _largest(jitter),
    }


def _ms(series: pl.Series) -> list[float | None]:
    return (series / _MS).to_list()


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def judge(rows: Sequence[Row], goals: BenchGoals) -> list[Row]:
    """The goals, each against the worst of the own client's runs on one core."""
    own = [row for row in rows if row["client"] == OWN and row["cores"] == 1]
    schedule = [row for row in own if row["kind"] == "schedule"]
    rate = [row for row in own if row["kind"] == "rate"]
    return [
        _goal("TTFT bias, p50, ms", "ttft_bias_p50_ms", schedule, goals.ttft_p50_ms),
        _goal("TTFT bias, p99, up to 256 in flight, ms", "ttft_bias_p99_ms", schedule, goals.ttft_p99_ms, up_to=256),
        _goal(
            "TTFT bias, p99, above 256 in flight, ms",
            "ttft_bias_p99_ms",
            schedule,
            goals.ttft_p99_above_256_ms,
            above=256,
        ),
        _goal("TTFT bias, p99, first wave included, ms", "ttft_bias_all_p99_ms", schedule, goals.first_wave_p99_ms),
        _goal("gap error, p99, ms", "gap_error_p99_ms", schedule, goals.gap_p99_ms),
        _goal("concurrency held, share", "held_share", schedule, goals.concurrency_held),
        _goal("CPU seconds per 1,000 requests", "cpu_s_per_1000", schedule, goals.cpu_s_per_1000),
        _goal("MB beyond the payload per 1,000 requests", "extra_mb_per_1000", schedule, goals.memory_mb_per_1000),
        _goal("requests a second without delay", "rate_per_s", rate, goals.zero_delay_rps),
    ]


AT_LEAST = frozenset({"held_share", "rate_per_s"})
"""Columns of which more is better: a goal for one is a lower limit."""


def _goal(
    name: str, column: str, rows: Sequence[Row], limit: float, *, above: int | None = None, up_to: int | None = None
) -> Row:
    inside = [row for row in rows if (above or 0) < row["concurrency"] <= (up_to or row["concurrency"])]
    known = [row for row in inside if row.get(column) is not None]
    at_least = column in AT_LEAST
    # A bias below zero is one, too.
    worst = (min if at_least else max)(known, key=lambda row: abs(row[column]), default=None)
    met: bool | None = None
    if worst is not None:
        met = worst[column] >= limit if at_least else abs(worst[column]) <= limit
        if met and len(known) < len(inside):
            met = None
    return {
        "goal": name,
        "column": column,
        "above": above,
        "up_to": up_to,
        "limit": limit,
        "worst": None if worst is None else worst[column],
        "where": None if worst is None else place(worst),
        "cells": len(inside),
        "unknown": len(inside) - len(known),
        "met": met,
    }


def place(row: Row) -> str:
    """A cell's point in words: ``16 in flight, 1,000 ids``."""
    return f"{row['concurrency']} in flight, {row['prompt_tokens']:,} ids"


COMPARED = {
    "ttft_bias_p50_ms": "median TTFT bias",
    "ttft_bias_p99_ms": "99th percentile of TTFT bias",
    "gap_error_p99_ms": "99th percentile of gap error",
    "held_share": "concurrency held",
    "cpu_s_per_1000": "CPU per 1,000 requests",
    "peak_rss_mb": "peak memory",
    "rate_per_s": "requests a second",
}
"""What clients are compared by: columns of ``cells``, and their names. A bias counts by its size."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A peer's value beside the own client's at the same point, on as many cores."""

    client: str
    place: str
    column: str
    theirs: float
    mine: float

    @property
    def better(self) -> bool:
        """Whether the peer's is the better one."""
        if self.column in AT_LEAST:
            return self.theirs > self.mine
        return abs(self.theirs) < abs(self.mine)


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Every value of `COMPARED` that a peer and the own client both have at a point."""
    found = []
    points = ("kind", "prompt_tokens", "concurrency", "cores", "repeat")
    own = {tuple(row[p] for p in points): row for row in rows if row["client"] == OWN}
    for row in rows:
        ours = own.get(tuple(row[p] for p in points))
        if ours is None or row["client"] == OWN or row["kind"] not in ("schedule", "rate"):
            continue
        for column in COMPARED:
            if column == "rate_per_s" and row["kind"] != "rate":
                continue  # on a schedule the server sets it
            mine, theirs = ours.get(column), row.get(column)
            if mine is not None and theirs is not None:
                found.append(Comparison(row["client"], place(row), column, theirs, mine))
    return found


def summary(rows: Sequence[Row], judged: Sequence[Row]) -> str:
    """The goals, the clients beside each other, and where a peer is better, as Markdown."""
    lines = [
        "# Client truth",
        "",
        "| goal (own client, one core) | limit | worst | where | met |",
        "| --- | ---: | ---: | --- | --- |",
    ]
    words = {True: "met", False: "**missed**", None: "not checked"}
    for goal in judged:
        worst = f"{_number(goal['worst'])} | {goal['where'] or ''}"
        lines.append(f"| {goal['goal']} | {goal['limit']:g} | {worst} | {words[goal['met']]} |")
    for kind, title in (("schedule", "Scripted answers"), ("rate", "A server without delay")):
        shown = [row for row in rows if row["kind"] == kind]
        if shown:
            lines += ["", f"## {title}", "", *_table(shown)]
    faults = [row for row in rows if row["kind"] not in ("schedule", "rate")]
    if faults:
        lines += ["", "## Streams that misbehave", "", *_fault_table(faults)]
    lines += ["", "## Where a peer is better", ""]
    lines += [
        f"- {each.client}, {each.place}: {COMPARED[each.column]} {each.theirs:.3g} against {each.mine:.3g}"
        for each in comparisons(rows)
        if each.better
    ] or ["Nowhere in these cells."]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| ids | in flight | client | cores | TTFT bias p50 / p99, ms | first wave max, ms | gap error p99, ms | held "
        "| req/s | CPU s per 1,000 | peak MB | server jitter p99, ms |",
        "| ---: | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [
            f"{row['prompt_tokens']:,}",
            str(row["concurrency"]),
            f"{row['client']} {row['version']}",
            f"{row['cores']}{' (one shared with the server)' if row['shared_core'] else ''}",
            f"{_number(row['ttft_bias_p50_ms'])} / {_number(row['ttft_bias_p99_ms'])}",
            *(_number(row.get(name)) for name in ("first_wave_bias_max_ms", "gap_error_p99_ms", "held", "rate_per_s")),
            *(_number(row.get(name)) for name in ("cpu_s_per_1000", "peak_rss_mb", "server_jitter_p99_ms")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _fault_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| the server | client | calls it ok / failed | TTFT bias p50, ms | longest gap written / seen, ms | ended |",
        "| --- | --- | --- | ---: | ---: | --- |",
    ]
    for row in rows:
        ended = f"stopped after {row['wall_s']:.0f} s" if row["stopped"] else f"by itself, {row['wall_s']:.0f} s"
        calls = "no result" if row["client_ok"] is None else f"{row['client_ok']} / {row['client_failed']}"
        gaps = f"{_number(row['longest_gap_written_ms'])} / {_number(row['longest_gap_seen_ms'])}"
        bias = _number(row["first_wave_bias_p50_ms"])
        lines.append(f"| {row['kind']} | {row['client']} {row['version']} | {calls} | {bias} | {gaps} | {ended} |")
    return lines


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
