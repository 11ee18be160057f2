"""Pool sharing in the report: whether a second engine finds what the first one stored, and how fast it loads it."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from kvladder.report.formats import UNKNOWN, listing, number, percent, plural, scale, seconds, significant, times
from kvladder.report.values import Row, Setup
from kvladder.report.words import Paragraph, workload_title
from kvladder.tables.labels import workload_order
from kvladder.tables.model import Tables

_TIMES = ("ttft_stored_s", "ttft_second_s", "ttft_own_s")


def sections(tables: Tables, setups: Mapping[str, Setup]) -> list[Row]:
    """For each workload of two engines its table, a row a setup."""
    found, tiers = [], tables.tiers()
    for suite, workload in workload_order(tables, tables.sharing):
        rows = _of(tables, suite, workload)
        factor, unit, decimals = scale(row[name] for row in rows.values() for name in _TIMES)
        found.append(
            {
                "title": workload_title(tables, suite, workload),
                "what": _describe(rows),
                "unit": unit,
                "rows": [
                    {
                        "setup": setup,
                        "answer": _answer(rows[name], tiers.get(name)),
                        "hits": [percent(rows[name][column]) for column in ("second_hit", "own_hit")],
                        "ttft": [number(_scaled(rows[name][column], factor), decimals) for column in _TIMES],
                        "ratios": [times(rows[name][column]) for column in ("second_to_stored", "second_to_own")],
                        "rate": rate(rows[name]),
                        "n": rows[name]["n"],
                    }
                    for name, setup in setups.items()
                    if name in rows
                ],
            }
        )
    return found


def paragraphs(tables: Tables, names: Mapping[str, str]) -> list[Paragraph]:
    """Who shares its pool between engines and who doesn't, and what the second engine gains by it."""
    found, tiers = [], tables.tiers()
    for suite, workload in workload_order(tables, tables.sharing):
        rows = {name: row for name, row in _of(tables, suite, workload).items() if name in tiers}
        groups = {
            answer: [names[name] for name in names if name in rows and rows[name]["answer"] == answer]
            for answer in ("found", "in part", "not found", None)
        }
        words = {
            "found": "all of it with {}",
            "in part": "a part of it with {}",
            "not found": "nothing with {}",
            None: "nobody knows what with {}, whose counters don't say",
        }
        said = [words[answer].format(listing(those, 8)) for answer, those in groups.items() if those]
        lead = f"Of what one engine stored, a second one of the same setup finds {'; '.join(said)}."
        if not said:
            lead = "No setup with a tier has a valid trial."
        gains = [_gain(names[name], rows[name]) for name in names if name in rows and rows[name]["second_hit"]]
        title = f"{workload_title(tables, suite, workload)}: {_describe(rows)}" if rows else workload
        found.append(Paragraph(title, lead, [f"Through the second engine: {'; '.join(gains)}."] if gains else []))
    return found


def _of(tables: Tables, suite: str, workload: str) -> dict[str, Row]:
    """Rows of one workload by setup."""
    keep = (pl.col("suite") == suite) & (pl.col("workload") == workload)
    return {row["setup"]: row for row in tables.sharing.filter(keep).iter_rows(named=True)}


def _describe(rows: Mapping[str, Row]) -> str:
    """``4 prompts of 8,200 tokens, one at a time``."""
    row: Row = next(iter(rows.values()))
    tokens = "several lengths" if row["prompt_length"] is None else f"{row['prompt_length']:,} tokens"
    at_once = "one" if row["concurrency"] == 1 else f"{row['concurrency']:,}"
    return f"{plural(row['prompts'], 'prompt')} of {tokens}, {at_once} at a time"


def _answer(row: Row, tier: str | None) -> str:
    return "no tier" if tier is None else row["answer"] or UNKNOWN


def _gain(name: str, row: Row) -> str:
    """``X 0.210 s, 0.190× the cold pass and 1.05× the first one's own hit, 12.3 GB/s (1 trial)``."""
    parts = [
        f"{name} {seconds(row['ttft_second_s'])}",
        f"{times(row['second_to_stored'])} the cold pass and {times(row['second_to_own'])} the first one's own hit",
    ]
    if row["load_gb_per_s"] is not None:
        parts.append(f"{rate(row)} GB/s")
    return f"{', '.join(parts)} ({plural(row['n'], 'trial')})"


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def rate(row: Row) -> str:
    """How fast the second engine loaded, in GB/s; a lower bound is marked as one."""
    least = "≥\u00a0" if row["load_basis"] == "ttft" and row["load_gb_per_s"] is not None else ""
    return least + significant(row["load_gb_per_s"])
