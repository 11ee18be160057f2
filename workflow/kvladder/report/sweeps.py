"""Sweeps in the report: tables over batch and length, break-even lengths, and what is said of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import polars as pl

from kvladder.report.formats import UNKNOWN, listing, plural, ratio, scale, significant, span
from kvladder.report.values import Row, Setup, Value, cell
from kvladder.report.words import Paragraph, interval_words, lower_tiers, workload_title
from kvladder.tables.break_even import HITS, hit_row, payback
from kvladder.tables.model import Tables
from kvladder.tables.sweeps import Place, Sweep, hit_shown, sweeps

COLUMNS = 7
"""Setups side by side in one table."""

_HIT_WORDS = {"first-hit": "first hit", "warm": "later hits"}
_METRICS = {
    "wall_s": "Time from the first request of a batch sent until its last one is answered",
    "ttft_s": "Time to first token",
    "prompt_tokens_per_s": "Prompt tokens per second, computed or loaded",
}


def known_sweeps(tables: Tables) -> list[Sweep]:
    """Sweeps in the order in which trials ran them."""
    order = [tuple(pair) for pair in tables.context.get("workloads", [])]
    return sorted(
        sweeps(tables.summary),
        key=lambda each: (
            order.index((each.suite, each.workload)) if (each.suite, each.workload) in order else len(order)
        ),
    )


def sections(tables: Tables, setups: Mapping[str, Setup]) -> list[Row]:
    """For each sweep its tables: a row a cell, a column a setup, a hit's value and its ratio to the baseline."""
    return [
        {
            "title": workload_title(tables, sweep.suite, sweep.workload),
            "what": describe(sweep),
            "tables": [part for metric in _shown(sweep) for part in _tables(tables, setups, sweep, metric)],
            "break_even": _break_even(tables, setups, sweep),
        }
        for sweep in known_sweeps(tables)
    ]


def describe(sweep: Sweep) -> str:
    """``1, 2 and 4 requests at once × prompts of 520 and 1,030 tokens``."""
    levels = listing([f"{level:,}" for level in sweep.levels], 12)
    parts = [f"{levels} requests in flight" if sweep.levels != [1] else "one request at a time"]
    if sweep.lengths:
        parts.append(f"prompts of {listing([f'{length:,}' for length in sweep.lengths], 12)} tokens")
    return " × ".join(parts)


def _shown(sweep: Sweep) -> list[str]:
    return ["wall_s"] if len(sweep.lengths) > 1 else ["ttft_s", "prompt_tokens_per_s"]


def _tables(tables: Tables, setups: Mapping[str, Setup], sweep: Sweep, metric: str) -> Iterable[Row]:
    rows = sweep.rows(tables.summary).filter(pl.col("metric") == metric)
    if not rows.height:
        return
    hit = hit_shown(rows)
    at = {(row["setup"], row["workload"], row["pass"]): row for row in rows.iter_rows(named=True)}
    is_time = metric.endswith("_s") and not metric.endswith("_per_s")
    factor, unit, decimals = (
        scale(rows.filter(pl.col("pass") == hit)["median"].to_list()) if is_time else (1.0, "tokens/s", 0)
    )
    shown = [setup for name, setup in setups.items() if any(key[0] == name for key in at)]
    places = sorted(sweep.cells, key=lambda place: (place[1] or 0, place[0]))
    for start in range(0, len(shown), COLUMNS):
        columns = shown[start : start + COLUMNS]
        yield {
            "title": f"{_METRICS[metric]}, {_HIT_WORDS[hit]}, {unit}",
            "first": "batch × tokens" if len(sweep.lengths) > 1 else "in flight",
            "columns": columns,
            "rows": [
                (
                    _label(sweep, place),
                    [
                        _value(at, setup, sweep.cells[place], hit, tables.baseline, factor, decimals)
                        for setup in columns
                    ],
                )
                for place in places
            ],
        }


def _label(sweep: Sweep, place: Place) -> str:
    level, length = place
    return f"{level:,} × {length:,}" if len(sweep.lengths) > 1 and length is not None else f"{level:,}"


def _value(  # noqa: PLR0917
    at: Mapping[tuple[str, str, str], Row],
    setup: Setup,
    workload: str,
    hit: str,
    baseline: str,
    factor: float,
    decimals: int,
) -> Value:
    row, cold = at.get((setup.name, workload, hit)), at.get((setup.name, workload, "cold"))
    value = cell(row, setup.name == baseline, "A/A control" in setup.badges, factor, decimals)
    # That one block gives no range is said once, above.
    notes = [note for note in value.notes if note != "one block, no range"]
    if cold is not None and cold["ratio"] is not None:
        notes.append(f"cold {ratio(cold['ratio'])}×")
    return Value(value.value, value.ratio, value.bracket, notes)


def _of(tables: Tables, sweep: Sweep) -> pl.DataFrame:
    return tables.break_even.filter((pl.col("suite") == sweep.suite) & (pl.col("workload") == sweep.workload))


def _break_even(tables: Tables, setups: Mapping[str, Setup], sweep: Sweep) -> Row | None:
    """Break-even lengths of every setup with a tier, and by length the hits that pay for its first request."""
    rows = {(row["setup"], row["pass"]): row for row in _of(tables, sweep).iter_rows(named=True)}
    if not rows:
        return None
    passes = [name for name in HITS if any(key[1] == name for key in rows)]
    # Those that a reader will get most of: later ones, where they were measured.
    paid_by = passes[-1]
    lines = []
    for name, setup in setups.items():
        if not any(key[0] == name for key in rows):
            continue
        cells = hit_row(sweep, tables.passes, name, paid_by)
        hits = payback(tables.summary, cells, name, paid_by)
        lines.append(
            {
                "setup": setup,
                "answers": [_answer(rows.get((name, each))) for each in passes],
                "hits": [_hits_text(hits.get(length)) for length in sweep.lengths],
            }
        )
    return {
        "passes": [_HIT_WORDS[name] for name in passes],
        "lengths": [f"{length:,}" for length in sweep.lengths],
        "paid_by": _HIT_WORDS[paid_by],
        "rows": lines,
    }


def _answer(row: Row | None) -> str:
    """A cell of the break-even table."""
    if row is None:
        return UNKNOWN
    tokens = "" if row["tokens"] is None else f"{row['tokens']:,.0f}"
    text = {
        "already": f"already at {row['shortest']:,}",
        "from": f"from {tokens}",
        "up to": f"only up to {tokens}",
        "never": f"never (up to {row['longest']:,})",
    }[row["answer"]]
    if row["tokens_low"] is not None and row["tokens_high"] is not None:
        text += f" ({row['tokens_low']:,.0f}–{row['tokens_high']:,.0f})"
    return f"{text}, {row['crossings']} crossings" if row["crossings"] > 1 else text


def _hits_text(hits: float | None) -> str:
    return UNKNOWN if hits is None else "never" if math.isinf(hits) else f"{hits:,.0f}"


def paragraphs(tables: Tables, names: Mapping[str, str]) -> list[Paragraph]:
    """What is found in each sweep: who is faster where, from which length, and at the highest level."""
    rivals = sorted(lower_tiers(tables))
    found = []
    for sweep in known_sweeps(tables):
        rows = sweep.rows(tables.summary).filter(pl.col("setup").is_in(rivals))
        details = _cells(tables, names, sweep, rows) if len(sweep.lengths) > 1 else _highest(tables, names, sweep, rows)
        lengths = _lengths(tables, names, sweep, rivals)
        said = [*lengths, *details] or ["No tier has a valid value to compare with the baseline."]
        found.append(Paragraph(f"{sweep.workload}: {describe(sweep)}", said[0], said[1:]))
    return found


def _lengths(tables: Tables, names: Mapping[str, str], sweep: Sweep, rivals: Sequence[str]) -> list[str]:
    """Break-even in words, first hits and later ones, and the pay-back of the first request."""
    result, paid = [], {}
    for hit in HITS:
        rows = _of(tables, sweep).filter((pl.col("pass") == hit) & pl.col("setup").is_in(rivals))
        rows = rows.sort(pl.col("tokens").fill_null(0.0), "setup")
        by_setup = {row["setup"]: row for row in rows.iter_rows(named=True)}
        if not by_setup:
            continue
        blocks = sorted({row["blocks"] for row in by_setup.values()})
        counted = plural(blocks[0], "block") if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]} blocks"
        what = "a first hit beats" if hit == "first-hit" else "later hits beat"
        parts = [f"{names[setup]} {_says(row)}" for setup, row in by_setup.items()]
        result.append(f"One request at a time, {what} computing it: {'; '.join(parts)} ({counted}).")
        paid = {setup: (row["longest"], row["hits_to_pay"]) for setup, row in by_setup.items()}
    # The later hits are what a first request is paid back by: they were looked at last.
    texts = [f"{names[setup]} {_pays(hits)}" for setup, (_, hits) in paid.items() if hits is not None]
    if texts:
        longest = max(length for length, _ in paid.values())
        result.append(f"What a dearer first request costs is paid back, at {longest:,} tokens: {'; '.join(texts)}.")
    return result


def _says(row: Row) -> str:
    tokens = "" if row["tokens"] is None else significant(row["tokens"])
    text = {
        "already": f"already at the shortest ({row['shortest']:,} tokens)",
        "from": f"from {tokens} tokens on",
        "up to": f"only up to {tokens} tokens",
        "never": f"never (up to {row['longest']:,} tokens)",
    }[row["answer"]]
    return f"{text}, the last of {row['crossings']} crossings" if row["crossings"] > 1 else text


def _pays(hits: float) -> str:
    if math.isinf(hits):
        return "never"
    return f"after {plural(int(hits), 'hit')}" if hits else "at once, for it isn't dearer"


def _cells(tables: Tables, names: Mapping[str, str], sweep: Sweep, rows: pl.DataFrame) -> list[str]:
    """In how many cells of a grid each setup is faster than the baseline, and by how much."""
    here = rows.filter((pl.col("metric") == "wall_s") & pl.col("ratio").is_not_null())
    hit = hit_shown(here)
    here = here.filter(pl.col("pass") == hit)
    parts = []
    for setup in names:
        ratios = here.filter(pl.col("setup") == setup)["ratio"].to_list()
        if ratios:
            faster = sum(each < 1 for each in ratios)
            between = span(min(ratios), max(ratios))
            parts.append(f"{names[setup]} in {faster} of {plural(len(ratios), 'cell')} ({between}×)")
    if not parts:
        return []
    baseline = names.get(tables.baseline, tables.baseline)
    missing = len(sweep.cells) - min(here.group_by("setup").len()["len"].to_list())
    gap = " Cells without a valid value on both sides aren't counted." if missing else ""
    when = _HIT_WORDS[hit]
    return [f"A batch is answered in less time than {baseline} takes for it, {when}: {'; '.join(parts)}.{gap}"]


def _highest(tables: Tables, names: Mapping[str, str], sweep: Sweep, rows: pl.DataFrame) -> list[str]:
    """At the lowest and the highest level: prompt tokens per second against the baseline."""
    here = rows.filter((pl.col("metric") == "prompt_tokens_per_s") & pl.col("ratio").is_not_null())
    hit = hit_shown(here)
    result = []
    for level in dict.fromkeys((max(sweep.levels), min(sweep.levels))):
        at = here.filter((pl.col("pass") == hit) & (pl.col("concurrency") == level)).sort("ratio", descending=True)
        parts = []
        for row in at.iter_rows(named=True):
            spread = "" if row["ratio_low"] is None else f" ({span(row['ratio_low'], row['ratio_high'])})"
            parts.append(f"{names[row['setup']]} {ratio(row['ratio'])}×{spread}")
        if parts:
            kinds = {interval_words(kind, blocks) for kind, blocks in at.select("interval", "blocks").iter_rows()}
            baseline = names.get(tables.baseline, tables.baseline)
            flying = f"{level:,} requests in flight" if level > 1 else "one request in flight"
            result.append(
                f"With {flying}, prompt tokens per second on {'a first hit' if hit == 'first-hit' else 'later hits'} "
                f"against {baseline}'s: {listing(parts, 8)} ({' or '.join(sorted(kinds))})."
            )
    return result
