"""From which prompt length a setup's hits beat the baseline, from sweeps that have cells of one request at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import polars as pl

from kvladder.config.base import TIERS
from kvladder.stats.break_even import Times, break_even_over_blocks, hits_to_pay
from kvladder.tables.sweeps import Sweep, sweeps

Row = dict[str, Any]

HITS = ("first-hit", "warm")


def hit_row(sweep: Sweep, passes: pl.DataFrame, setup: str, hit: str) -> dict[int, str]:
    """Cells with one request in flight in which a setup did hit something, ascending by prompt length.

    A prompt that is shorter than what the tier stores together is computed every time: that says nothing of loading.
    Fewer than two lengths in the sweep make no curve: empty.
    """
    names = {length: name for (level, length), name in sweep.cells.items() if level == 1 and length is not None}
    tokens = pl.sum_horizontal(f"tokens_{tier}" for tier in TIERS if tier != "computed")
    here = sweep.rows(passes).filter((pl.col("setup") == setup) & (pl.col("pass") == hit) & (tokens > 0))
    loaded = set(here["workload"])
    return {length: name for length, name in sorted(names.items()) if name in loaded} if len(names) > 1 else {}


def break_even_rows(
    metrics: pl.DataFrame, summary: pl.DataFrame, passes: pl.DataFrame, tiers: Iterable[str], baseline: str
) -> Iterable[Row]:
    """Rows of the table ``break_even``, for the setups in `tiers`: those whose hits come from a tier.

    A block is a repeat on one host: a setup's TTFT of a hit against the TTFT of the same prompt, in the same pass, of
    the baseline, which computes it. A baseline that has a tier itself computes nothing to compare with: no rows.
    """
    setups = sorted(set(tiers))
    for sweep in sweeps(metrics) if baseline not in setups else ():
        ttft = sweep.rows(metrics).filter(pl.col("metric") == "ttft_s")
        for setup in setups:
            for hit in HITS:
                names = hit_row(sweep, passes, setup, hit)
                found = break_even_over_blocks(_blocks(ttft.filter(pl.col("pass") == hit), names, setup, baseline))
                if found is None:
                    continue
                paid = payback(summary, names, setup, hit)[found.longest]
                yield {
                    "setup": setup,
                    "suite": sweep.suite,
                    "workload": sweep.workload,
                    "pass": hit,
                    "answer": found.answer,
                    "tokens": found.tokens,
                    "tokens_low": found.low,
                    "tokens_high": found.high,
                    "shortest": found.shortest,
                    "longest": found.longest,
                    "crossings": len(found.crossings),
                    "blocks": found.blocks,
                    "hits_to_pay": paid,
                }


def _blocks(ttft: pl.DataFrame, names: Mapping[int, str], setup: str, baseline: str) -> dict[tuple[int, str], Times]:
    """By block and prompt length the two times; `ttft` are rows of ``metrics`` of one pass."""
    at = {
        (row["setup"], row["repeat"], row["host_id"], row["workload"]): row["value"]
        for row in ttft.filter(pl.col("setup").is_in([setup, baseline])).iter_rows(named=True)
    }
    blocks = sorted({(repeat, host) for _, repeat, host, _ in at})
    return {
        block: {
            length: (at.get((setup, *block, name)), at.get((baseline, *block, name))) for length, name in names.items()
        }
        for block in blocks
    }


def payback(summary: pl.DataFrame, names: Mapping[int, str], setup: str, hit: str) -> dict[int, float | None]:
    """By prompt length the hits that pay for a dearer first request, from the medians of the paired ratios.

    `names` are cells by length (see `hit_row`), `hit` is the pass that the hits are taken from. Infinite: no number of
    them is enough. None: a ratio is unknown.
    """
    rows = summary.filter((pl.col("setup") == setup) & (pl.col("metric") == "ttft_s"))
    ratios = {(row["workload"], row["pass"]): row["ratio"] for row in rows.iter_rows(named=True)}
    result: dict[int, float | None] = {}
    for length, name in names.items():
        first, later = ratios.get((name, "cold")), ratios.get((name, hit))
        result[length] = None if first is None or later is None else hits_to_pay(first, later, 1.0)
    return result
