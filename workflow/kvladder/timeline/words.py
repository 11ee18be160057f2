"""In words, from the tables, why the fastest setup's hits are faster than the next one's.

A capture has one pass of each kind, and a pass alone is no measurement. So a difference counts as one only where the
same passes without the profiler show it as well; where they don't, the words say so and name the parts that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import polars as pl

from kvladder.config.references import Explanation
from kvladder.timeline.decompose import PARTS
from kvladder.timeline.tables import Tables

SHOWN = 0.1
"""Share of the difference below which a part is no reason."""
NAMED = 0.01
"""Share of the TTFT below which a part isn't named where the whole doesn't differ."""
HELD = 0.5
"""A difference holds where the passes without the profiler show at least this share of it."""

LABELS = {
    "client_http": "client and HTTP",
    "queue": "queueing",
    "scheduler": "the scheduler's own steps",
    "lookup": "looking up what is stored",
    "load_wait": "waiting for the load beside its copies",
    "transfer": "copying",
    "staging": "staging on the device",
    "recompute": "computing the rest of the prompt",
    "sampling": "sampling",
    "next_step": "launching the next step first",
}


def reasons(tables: Tables) -> list[str]:
    """One paragraph a workload: the fastest setup's latest hit against the next one's, part by part.

    Empty where fewer than two setups have hits that can be compared.
    """
    shared = ["setup", "workload", "pass", "round"]
    ceilings = tables.captures.select("setup", "ceiling")
    untraced = tables.cost.select(*shared, "untraced_ttft_ns")
    hits = hit_means(tables).join(untraced, on=shared, how="left").join(ceilings, on="setup", how="left")
    found = []
    for workload in hits["workload"].unique(maintain_order=True):
        rows = hits.filter(pl.col("workload") == workload).sort("ttft_ns").to_dicts()
        if len(rows) >= 2:
            found.append(_compare(str(workload), rows[0], rows[1]))
    return found


def beside(tables: Tables, explained: Explanation | None) -> list[str]:
    """What others found on another machine, one paragraph a setup, beside its latest hit of the first workload; empty
    where they say nothing of it, or no copy was seen."""
    hits = hit_means(tables)
    if explained is None or not hits.height:
        return []
    kinds = dict(tables.captures.select("setup", "kind").iter_rows())
    found = []
    for row in hits.filter(pl.col("workload") == hits["workload"].item(0)).iter_rows(named=True):
        theirs = explained.kinds.get(kinds[row["setup"]])
        if theirs is None or row["transfer_bytes"] is None:
            continue
        found.append(
            f"{row['setup']} in {explained.title} ({explained.hardware}; {explained.source}): {theirs}. Here: "
            f"{_ms(row['transfer_busy_ns'])} for {row['transfer_bytes'] / 1e9:.2f} GB in "
            f"{_calls(row['transfer_calls'])}, {_ms(row['lookup_ns'])} of lookup and {_ms(row['until_copies_ns'])} "
            f"before the first copy, {_ms(row['after_copies_ns'])} after the last."
        )
    return found


def hit_means(tables: Tables) -> pl.DataFrame:
    """Means over the requests of each setup's latest hit pass, as far as it loaded anything: columns of
    ``decomposition``, with the mean of each number."""
    numbers = [name for name, kind in tables.decomposition.schema.items() if kind.is_integer() and name != "index"]
    rows = tables.decomposition.filter(
        pl.col("setup").is_in(tables.setups), pl.col("pass") != "cold", pl.col("problem").is_null()
    ).filter(pl.col("loaded_tokens") > 0)
    means = rows.group_by("setup", "workload", "pass", "round", maintain_order=True).agg(
        # A mean of what is known for some requests only would be that of others.
        [
            pl.when(pl.col(name).null_count() == 0).then(pl.col(name).mean()).alias(name)
            for name in numbers
            if name != "round"
        ]
    )
    return means.sort("round").group_by("setup", "workload", maintain_order=True).last()


def _compare(workload: str, fast: Mapping[str, Any], slow: Mapping[str, Any]) -> str:
    gap = slow["ttft_ns"] - fast["ttft_ns"]
    text = (
        f"{workload}: in these captures a hit takes {_ms(fast['ttft_ns'])} in {fast['setup']} and "
        f"{_ms(slow['ttft_ns'])} in {slow['setup']}, {_ms(gap)} more."
    )
    unexplained = max(fast["remainder_ns"], slow["remainder_ns"])
    if gap <= unexplained:
        return f"{text} That is within what the timelines leave unexplained ({_ms(unexplained)}): no reason is given."
    least = SHOWN * gap
    if not _holds(gap, fast, slow):
        text += (
            f" Equal passes without the profiler took {_ms(fast['untraced_ttft_ns'])} and "
            f"{_ms(slow['untraced_ttft_ns'])}: the difference doesn't hold, and neither is called the faster. Their "
            f"parts differ all the same, here {slow['setup']} against {fast['setup']}."
        )
        least = NAMED * fast["ttft_ns"]
    differences = {}
    for part in PARTS:
        one, other = fast[f"{part}_ns"], slow[f"{part}_ns"]
        if one is not None and other is not None:
            differences[part] = other - one
    more = sorted((part for part in differences if differences[part] > least), key=lambda part: -differences[part])
    less = sorted((part for part in differences if differences[part] < -least), key=lambda part: differences[part])
    if more:
        text += " It spends more on " + "; ".join(_reason(part, fast, slow, differences[part]) for part in more) + "."
    if less:
        text += " It spends less on " + "; ".join(_reason(part, fast, slow, differences[part]) for part in less) + "."
    hidden = [LABELS[part] for part in PARTS if part not in differences]
    if hidden:
        text += f" Not known apart for both: {', '.join(hidden)}."
    return text


def _holds(gap: float, fast: Mapping[str, Any], slow: Mapping[str, Any]) -> bool:
    """Whether the same passes without the profiler differ by as much, or nearly; also where there are none."""
    before, after = fast["untraced_ttft_ns"], slow["untraced_ttft_ns"]
    return before is None or after is None or after - before >= HELD * gap


def _reason(part: str, fast: Mapping[str, Any], slow: Mapping[str, Any], difference: float) -> str:
    say = _DETAILS.get(part)
    detail = say(fast, slow) if say is not None else ""
    return f"{LABELS[part]} ({_ms(abs(difference))}{': ' + detail if detail else ''})"


def _rates(fast: Mapping[str, Any], slow: Mapping[str, Any]) -> str:
    said = [_rate(row) for row in (fast, slow)]
    return f"{said[1]} against {said[0]}" if all(said) else ""


def _rate(row: Mapping[str, Any]) -> str:
    moved, busy, count = row["transfer_bytes"], row["transfer_busy_ns"], row["transfer_count"]
    if not moved or not busy:
        return ""
    calls = row["transfer_calls"]
    link = f" ({100 * moved / busy * 1e9 / row['ceiling']:.0f} % of its link)" if row["ceiling"] else ""
    made = f"{calls:,.0f} calls" if calls == count else f"{_calls(calls)} of {count:,.0f} copies"
    return f"{moved / 1e9:.2f} GB at {moved / busy:.1f} GB/s{link} in {made}"


def _calls(number: float) -> str:
    return "one call" if number == 1 else f"{number:,.0f} calls"


def _tail(fast: Mapping[str, Any], slow: Mapping[str, Any]) -> str:
    if fast["computed_tokens"] is None or slow["computed_tokens"] is None:
        return ""
    if fast["computed_tokens"] == slow["computed_tokens"]:
        return f"of the same {fast['computed_tokens']:,.0f} tokens"
    return f"{slow['computed_tokens']:,.0f} tokens against {fast['computed_tokens']:,.0f}"


def _waits(fast: Mapping[str, Any], slow: Mapping[str, Any]) -> str:
    known = [row[name] for row in (slow, fast) for name in ("until_copies_ns", "after_copies_ns")]
    if None in known:
        return ""
    before, after, other_before, other_after = map(_ms, known)
    return f"{before} before the first copy and {after} after the last against {other_before} and {other_after}"


def _lookups(fast: Mapping[str, Any], slow: Mapping[str, Any]) -> str:
    if slow["lookups"] == fast["lookups"]:
        return ""
    return f"asked {slow['lookups']:.1f} times against {fast['lookups']:.1f}"


_DETAILS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], str]] = {
    "transfer": _rates,
    "recompute": _tail,
    "lookup": _lookups,
    "load_wait": _waits,
}


def _ms(nanoseconds: float) -> str:
    value = nanoseconds / 1e6
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"
