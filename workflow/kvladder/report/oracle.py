"""The report's section on hits: what the hit oracle predicts, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import polars as pl

from kvladder.report.formats import UNKNOWN, listing, number, plural
from kvladder.report.values import Row, Setup
from kvladder.tables.labels import workload_order
from kvladder.tables.model import CACHES, PASSES, Tables


def hits(tables: Tables, setups: Mapping[str, Setup]) -> Row:
    """A sentence, and rows where a tier is smaller than the working set or the counters say something else.

    Nothing at all (``sentence`` is None) where no judged trial has a tier.
    """
    data = tables.oracle
    if not data.height:
        return {"sentence": None, "rows": []}
    shown = data.filter(pl.col("evicts") | pl.col("agrees").eq_missing(False))
    rows = [
        _row(setups[name], workload, each, part)
        for suite, workload in workload_order(tables, shown)
        for name in setups
        for each in PASSES
        if (part := _part(shown, suite, workload, name, each)).height
    ]
    agreeing = data.filter(pl.col("agrees").fill_null(False))
    parts = [f"Of {plural(data.height, 'pass', 'passes')}, {agreeing.height} hit what the oracle predicts"]
    if not rows:
        parts.append("which is all that tiers without limits would give")
    if unknown := data["agrees"].null_count():
        parts.append(f"{unknown} can't be compared, because the engine's token counters are missing")
    wrong = data.filter(pl.col("agrees").eq_missing(False))
    if wrong.height:
        names = [setups[name].label for name in setups if name in set(wrong["setup"])]
        parts.append(f"{wrong.height} hit something else ({listing(names)})")
    return {"sentence": "; ".join(parts) + ".", "rows": rows}


def _part(data: pl.DataFrame, suite: str, workload: str, setup: str, name: str) -> pl.DataFrame:
    return data.filter(
        (pl.col("suite") == suite)
        & (pl.col("workload") == workload)
        & (pl.col("setup") == setup)
        & (pl.col("pass") == name)
    )


def _row(setup: Setup, workload: str, name: str, part: pl.DataFrame) -> Row:
    """Rounds and trials together: shares of all their prompt tokens, the largest working set."""
    rows = part.rows(named=True)
    total = sum(row["prompt_tokens"] for row in rows)

    def share(values: Iterable[float | None]) -> str:
        known = [value for value in values if value is not None]
        if not total or len(known) < len(rows):
            return UNKNOWN
        return f"{number(100 * sum(known) / total, 1)} %"

    capacity = {tier: [row[f"capacity_{tier}_tokens"] for row in rows] for tier in CACHES}
    return {
        "setup": setup,
        "workload": workload,
        "pass": name,
        "working_set": number(max(row["working_set_tokens"] for row in rows)),
        "capacity": ", ".join(f"{tier} {number(max(sizes))}" for tier, sizes in capacity.items() if None not in sizes),
        "ceiling": share(row["ceiling"] * row["prompt_tokens"] if row["ceiling"] is not None else None for row in rows),
        "predicted": share(row["predicted_hits"] for row in rows),
        "measured": share(row["measured_hits"] for row in rows),
        "agrees": all(row["agrees"] is not False for row in rows),
        "notes": list(dict.fromkeys(row["note"] for row in rows if row["note"]))[:1],
    }
