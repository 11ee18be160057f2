"""A published table beside the same measurements of this host, where an experiment says which: `compare_with`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import polars as pl

from kvladder.config.references import REFERENCES, Reference, ReferenceRow
from kvladder.figures.parts.style import PASS_LABELS
from kvladder.report.formats import UNKNOWN, plural, ratio, scale
from kvladder.report.sharing import rate
from kvladder.report.values import Row, Setup, Value, cell, cost
from kvladder.report.words import Cell
from kvladder.tables.labels import single_workloads
from kvladder.tables.model import PASSES, Tables

NEAR = 0.1
"""How far off, as a share, our prompts' length may be from a published one to be held against it."""


def compared(tables: Tables, setups: Mapping[str, Setup], config: Mapping[str, Any]) -> Row | None:
    """Columns, lines and notes of the table; None where the experiment names no published one."""
    reference = REFERENCES.get(config.get("compare_with") or "")
    if reference is None:
        return None
    ours = {kind: _setup(tables, setups, kind) for kind in reference.kinds}
    lines: list[Row] = []
    for row in reference.rows:
        lines.append({"what": row.what, "who": reference.title, "own": False, "values": _published(reference, row)})
        lines += _measured(tables, row, ours)
    counts = [_valid(tables, setup) for setup in ours.values()]
    lines.append({"what": "valid trials", "who": "here", "own": True, "values": counts})
    columns = [
        {"title": title, "setup": None if (setup := ours[kind]) is None else setup.label}
        for kind, title in reference.kinds.items()
    ]
    return {"reference": reference, "columns": columns, "lines": lines}


def _valid(tables: Tables, setup: Setup | None) -> Value:
    if setup is None:
        return Value(UNKNOWN)
    mine = tables.trials.filter(pl.col("setup") == setup.name)
    return Value(f"{mine.filter(pl.col('status') == 'valid').height} of {mine.height}")


def _setup(tables: Tables, setups: Mapping[str, Setup], kind: str) -> Setup | None:
    """Our setup of a kind: the one that is called as the kind is, else the first as the report orders them."""
    kinds = dict(tables.trials.drop_nulls("kind").select("setup", "kind").unique().iter_rows())
    found = [setup for name, setup in setups.items() if kinds.get(name) == kind and "A/A control" not in setup.badges]
    return min(found, key=lambda setup: setup.name != kind, default=None)


def _published(reference: Reference, row: ReferenceRow) -> list[Value]:
    """Values as printed, and the ratio to the source's own baseline where both are single times."""
    base = row.values[next(iter(reference.kinds))].seconds
    values = []
    for place, kind in enumerate(reference.kinds):
        value = row.values[kind]
        against = f"{ratio(value.seconds / base)}×" if place and base and value.seconds else ""
        values.append(Value(value.shown, against))
    return values


def _measured(tables: Tables, row: ReferenceRow, ours: Mapping[str, Setup | None]) -> list[Row]:
    """Our lines: a pass each. What this experiment doesn't measure is one line that says so."""
    if row.measures == "sharing" and tables.sharing.height:
        return [
            {"what": row.what, "who": "here", "own": True, "values": [_shared(tables, each) for each in ours.values()]}
        ]
    place = _workload(tables, row) if row.measures != "sharing" else None
    if place is None:
        missing = [Value(UNKNOWN, notes=["not measured in this experiment"]) for _ in ours]
        return [{"what": row.what, "who": "here", "own": True, "values": missing}]
    suite, workload = place
    metric = "wall_s" if row.measures == "wall" else "ttft_s"
    lines = []
    for name in ("cold",) if row.measures == "first-request" else PASSES[1:]:
        found = Cell(suite, workload, metric, name).rows(tables)
        if not found:
            continue
        factor, unit, decimals = scale(
            found[setup.name]["median"] for setup in ours.values() if setup and setup.name in found
        )
        values = []
        for setup in ours.values():
            mine = found.get(setup.name) if setup else None
            if mine is None or setup is None:
                values.append(Value(UNKNOWN))
                continue
            baseline, control = setup.name == tables.baseline, "A/A control" in setup.badges
            if row.measures == "first-request":
                value = cost(mine, baseline, ["within noise"] if mine["within_noise"] and not control else [])
            else:
                value = cell(mine, baseline, control, factor, decimals)
                value = replace(value, value=f"{value.value} {unit}")
            values.append(replace(value, notes=[*value.notes, plural(mine["n"], "trial")]))
        who = f"here, {PASS_LABELS[name]}: {workload}"
        lines.append({"what": row.what, "who": who, "own": True, "values": values})
    return lines


def _workload(tables: Tables, row: ReferenceRow) -> tuple[str, str] | None:
    """Our workload that sends as many prompts of about that length at once; the first as trials run them."""
    for suite, workload in single_workloads(tables, tables.passes):
        passes = tables.passes.filter((pl.col("suite") == suite) & (pl.col("workload") == workload))
        same = passes.filter(
            (pl.col("requests") == row.requests)
            & (pl.col("concurrency") == row.requests)
            & ((pl.col("prompt_length") - row.prompt_tokens).abs() <= NEAR * row.prompt_tokens)
        )
        if same.height == passes.height:
            return suite, workload
    return None


_SHARED = {"found": "yes", "in part": "in part", "not found": "no", None: UNKNOWN}


def _shared(tables: Tables, setup: Setup | None) -> Value:
    """Whether a second engine found what the first one stored, and how fast it loaded it; of the longest prompts."""
    if setup is None:
        return Value(UNKNOWN)
    rows = tables.sharing.filter(pl.col("setup") == setup.name).sort("prompt_length", nulls_last=False).rows(named=True)
    if not rows or setup.name not in tables.tiers():
        return Value(UNKNOWN)
    row = rows[-1]
    speed = "" if row["load_gb_per_s"] is None else f"{rate(row)} GB/s"
    return Value(_SHARED[row["answer"]], speed, notes=[plural(row["n"], "trial")])
