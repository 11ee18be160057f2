"""Decoding in the report: what storing and loading do to the tokens after the first one."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from kvladder.figures.parts.style import PASS_LABELS
from kvladder.report.formats import UNKNOWN, listing, plural, ratio, scale, span
from kvladder.report.values import Row, Setup, cell
from kvladder.report.words import Paragraph, lower_tiers, workload_title
from kvladder.tables.labels import workload_order
from kvladder.tables.model import PASSES, Tables

FEWEST_TOKENS = 16
"""Output tokens from which decoding is looked at: below, a request's time per token is a gap or two."""

_METRICS = {"tpot_s": "TPOT", "itl_s": "ITL (median)", "output_tokens_per_s": "Output tokens per second"}


def decoding_workloads(tables: Tables) -> list[tuple[str, str]]:
    """(suite, workload) whose requests all generate enough tokens."""
    enough = tables.requests.group_by("suite", "workload").agg(fewest=pl.col("asked_tokens").min()).collect()
    return workload_order(tables, enough.filter(pl.col("fewest") >= FEWEST_TOKENS))


def sections(tables: Tables, setups: Mapping[str, Setup]) -> list[Row]:
    """For each such workload a table: a row a setup, TPOT, ITL and throughput by pass."""
    result = []
    for suite, workload in decoding_workloads(tables):
        rows = tables.summary.filter((pl.col("suite") == suite) & (pl.col("workload") == workload))
        at = {(row["setup"], row["metric"], row["pass"]): row for row in rows.iter_rows(named=True)}
        passes = [name for name in PASSES if name in set(rows["pass"])]
        titles, columns = [], list[tuple[str, str, float, int]]()
        for metric, title in _METRICS.items():
            medians = rows.filter(pl.col("metric") == metric)["median"].to_list()
            factor, unit, decimals = (1.0, "", 0) if metric == "output_tokens_per_s" else scale(medians)
            titles.append(f"{title}, {unit}" if unit else title)
            columns += [(metric, each, factor, decimals) for each in passes]
        lines = []
        for name, setup in setups.items():
            if any(key[0] == name for key in at):
                about = name == tables.baseline, "A/A control" in setup.badges
                values = [
                    cell(at.get((name, metric, each)), *about, factor, decimals)
                    for metric, each, factor, decimals in columns
                ]
                lines.append((setup, values))
        result.append(
            {
                "title": workload_title(tables, suite, workload),
                "passes": [PASS_LABELS[name] for name in passes],
                "groups": titles,
                "rows": lines,
            }
        )
    return result


def paragraphs(tables: Tables, names: Mapping[str, str]) -> list[Paragraph]:
    """The decode penalty while storing: time per output token in the cold pass against the baseline's."""
    rivals = lower_tiers(tables)
    found = []
    for suite, workload in decoding_workloads(tables):
        rows = tables.summary.filter(
            (pl.col("suite") == suite) & (pl.col("workload") == workload) & (pl.col("metric") == "tpot_s")
        )
        said = []
        for name, what in (("cold", "while storing"), ("first-hit", "while loading")):
            here = rows.filter((pl.col("pass") == name) & pl.col("ratio").is_not_null()).sort("ratio", "setup")
            parts = [
                f"{names[row['setup']]} {ratio(row['ratio'])}× ({_spread(row)})"
                for row in here.iter_rows(named=True)
                if row["setup"] in rivals
            ]
            if parts:
                baseline = names.get(tables.baseline, tables.baseline)
                said.append(
                    f"Time per output token {what}, against {baseline}'s in the same pass: {listing(parts, 8)}."
                )
        if said:
            found.append(Paragraph(f"{workload}: decoding", said[0], said[1:]))
    return found


def _spread(row: Row) -> str:
    if row["ratio_low"] is None:
        return plural(row["blocks"] or 0, "block") if row["blocks"] else UNKNOWN
    noise = ", within noise" if row["within_noise"] else ""
    return f"{span(row['ratio_low'], row['ratio_high'])}, {plural(row['blocks'], 'block')}{noise}"
