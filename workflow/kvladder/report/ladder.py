"""The tier ladder in the report: conversations by working set, hits by tier against the oracle, and each cliff."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from kvladder.report.formats import UNKNOWN, listing, number, percent, plural, ratio, scale, significant, span
from kvladder.report.values import Row, Setup, Value
from kvladder.report.words import Paragraph
from kvladder.stats.paired import paired_ratio
from kvladder.stats.samples import clean, median
from kvladder.tables.ladder import by_working_set, shown_order
from kvladder.tables.model import CACHES, Tables

_METRICS = {"tokens_per_s": "Prompt and output tokens per second", "ttft_median_s": "Time to first token"}


def section(tables: Tables, setups: Mapping[str, Setup]) -> Row | None:
    """Tables of the order policy that was run first: throughput and TTFT by working set, hits, cliffs. None without."""
    order = shown_order(tables)
    if order is None:
        return None
    mine = tables.ladder.filter(pl.col("order") == order)
    shown = [setup for name, setup in setups.items() if name in set(mine["setup"])]
    return {
        "what": _describe(mine, order),
        "columns": shown,
        "tables": [_metric(tables, mine, shown, metric) for metric in _METRICS],
        "hits": list(_hits(tables, setups)),
        "cliffs": list(_cliffs(tables, mine, setups, order)),
        "windows": _windows(mine),
    }


def paragraphs(tables: Tables, names: Mapping[str, str]) -> list[Paragraph]:
    """Up to which working set each setup's hits hold."""
    order = shown_order(tables)
    rows = {row["setup"]: row for row in tables.cliffs.iter_rows(named=True) if row["order"] == order}
    if order is None or not rows:
        return []
    mine = tables.ladder.filter(pl.col("order") == order)
    fell = [
        f"{names[name]} at {_tokens(row, mine)} tokens"
        for name, row in sorted(rows.items(), key=lambda item: (item[1]["tokens"] or 0.0, item[0]))
        if row["halved"] == row["blocks"]
    ]
    fell += [
        f"{names[name]} {_tokens(rows[name], mine)}"
        for name in names
        if name in rows and 0 < rows[name]["halved"] < rows[name]["blocks"]
    ]
    held = [names[name] for name in names if name in rows and not rows[name]["halved"]]
    lead = f"Hits fall to half of what tiers without limits give: {listing(fell, 8)}." if fell else ""
    if held:
        largest = max(row["largest"] for row in rows.values())
        lead = f"{lead} Up to the largest working set, {largest:,} tokens, this doesn't happen with {listing(held, 8)}."
    return [Paragraph("Conversations over the working set", lead.strip(), [_describe(mine, order) + "."])]


def _describe(mine: pl.DataFrame, order: str) -> str:
    sizes = mine["working_set_tokens"].unique().sort().to_list()
    tokens = mine["conversation_tokens"].unique().sort().to_list()
    each = f"{tokens[0]:,} tokens" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,} tokens"
    pools = listing([f"{size:,}" for size in mine["pool"].unique().sort().to_list()], 12)
    return f"{pools} conversations of {each} open at a time, order {order}, working sets up to {sizes[-1]:,} tokens"


def _metric(tables: Tables, mine: pl.DataFrame, shown: Sequence[Setup], metric: str) -> Row:
    is_time = metric.endswith("_s") and not metric.endswith("_per_s")
    factor, unit, decimals = scale(mine[metric].to_list()) if is_time else (1.0, "tokens/s", 0)
    rows = []
    for size in mine["working_set_tokens"].unique().sort().to_list():
        at = mine.filter(pl.col("working_set_tokens") == size)
        values: dict[str, dict[int, float | None]] = {}
        for setup, repeat, value in at.select("setup", "repeat", metric).iter_rows():
            values.setdefault(setup, {})[repeat] = value
        cells = [_value(values, setup.name, tables.baseline, factor, decimals) for setup in shown]
        rows.append({"size": f"{size:,}", "pool": f"{at['pool'][0]:,}", "cells": cells})
    return {"title": f"{_METRICS[metric]}, {unit}", "rows": rows}


def _value(
    values: Mapping[str, Mapping[int, float | None]], setup: str, baseline: str, factor: float, decimals: int
) -> Value:
    middle = median(clean(values.get(setup, {}).values()).values)
    if middle is None:
        return Value(UNKNOWN)
    text = number(middle * factor, decimals)
    if setup == baseline:
        return Value(text)
    interval = paired_ratio(values[setup], values.get(baseline, {})).interval
    bracket = "" if interval.low is None or interval.high is None else span(interval.low, interval.high)
    return Value(text, f"{ratio(interval.median)}×", bracket)


def _hits(tables: Tables, setups: Mapping[str, Setup]) -> Iterable[Row]:
    columns = [f"{kind}_{tier}" for kind in ("measured", "predicted") for tier in CACHES]
    rows = by_working_set(tables, [*columns, "prompt_tokens"])
    for name, setup in setups.items():
        for row in rows.filter((pl.col("setup") == name) & pl.col("predicted_share").is_not_null()).iter_rows(
            named=True
        ):
            yield {
                "setup": setup,
                "size": f"{row['working_set_tokens']:,}",
                "measured": _by_tier(row, "measured"),
                "predicted": _by_tier(row, "predicted"),
                "shares": [percent(row[each]) for each in ("hit_share", "predicted_share", "ceiling_share")],
                "n": row["n"],
            }


def _by_tier(row: Row, kind: str) -> str:
    """``gpu 12,000, cpu 3,000``."""
    parts = [f"{tier} {row[f'{kind}_{tier}']:,.0f}" for tier in CACHES if row[f"{kind}_{tier}"]]
    return ", ".join(parts) or ("0" if row[f"{kind}_gpu"] is not None else UNKNOWN)


def _cliffs(tables: Tables, mine: pl.DataFrame, setups: Mapping[str, Setup], order: str) -> Iterable[Row]:
    found = {row["setup"]: row for row in tables.cliffs.filter(pl.col("order") == order).iter_rows(named=True)}
    for name, setup in setups.items():
        if name not in found:
            continue
        row = found[name]
        largest = mine.filter((pl.col("setup") == name) & (pl.col("working_set_tokens") == row["largest"]))
        yield {
            "setup": setup,
            "tokens": _tokens(row, mine),
            "capacities": _capacities(row),
            "economics": [
                significant(_middle(largest, column))
                for column in (
                    "stored_per_loaded",
                    "stored_gb_per_1000",
                    "disk_written_per_read",
                    "disk_written_gb_per_1000",
                )
            ],
        }


def _tokens(row: Row, mine: pl.DataFrame) -> str:
    """``12,300 (11,000–13,500)``, or that it lies beyond, or before, what was measured."""
    if not row["halved"]:
        return f"beyond {row['largest']:,}"
    if row["tokens"] is None:
        return f"in {row['halved']} of {plural(row['blocks'], 'block')}"
    low, high = row["tokens_low"], row["tokens_high"]
    # The smallest stands for whatever lies below it, too.
    smallest = mine.filter(pl.col("setup") == row["setup"])["working_set_tokens"].min()
    least = "≤ " if row["tokens"] == smallest else ""
    return least + f"{row['tokens']:,.0f}" + ("" if low == high else f" ({low:,.0f}–{high:,.0f})")


def _capacities(row: Row) -> str:
    held = {tier: row[f"capacity_{tier}_tokens"] for tier in CACHES}
    return ", ".join(f"{tier} {size:,}" for tier, size in held.items() if size is not None) or UNKNOWN


def _middle(rows: pl.DataFrame, column: str) -> float | None:
    value: Any = rows[column].median()
    return None if value is None else float(value)


def _windows(mine: pl.DataFrame) -> str:
    """Which part of the passes counts, in words."""
    loose = mine.filter(~pl.col("steady"))["working_set_tokens"].unique().sort().to_list()
    text = (
        "Times and rates are those of the steady state: it begins once as many requests are sent as the pool's places "
        "have turns, and ends when the first conversation ends that nothing replaces."
    )
    if loose:
        sizes = listing([f"{size:,}" for size in loose], 12)
        text += f" Working sets without one, of which the whole pass is shown: {sizes} tokens."
    return text
