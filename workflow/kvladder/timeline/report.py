"""What captures showed, as a page (HTML, PDF) and in short (Markdown), from tables and figures only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from kvladder.config.references import EXPLANATIONS
from kvladder.report import page
from kvladder.report.formats import UNKNOWN
from kvladder.timeline.counters import COUNTED
from kvladder.timeline.decompose import PARTS
from kvladder.timeline.figures import copy_rate, decomposition, request
from kvladder.timeline.tables import Tables, load
from kvladder.timeline.words import beside, reasons

_COPIED = (
    *("loaded_tokens", "computed_tokens", "transfer_bytes", "transfer_busy_ns", "transfer_calls", "transfer_count"),
    *("until_copies_ns", "after_copies_ns"),
)
_NAMED = ("Setup", "Workload", "Pass")

FIGURES = (request, copy_rate, decomposition)

INTRODUCTION = "Taken under a profiler on servers of its own: these times explain, they are no results."

HEADS = {
    "client_http": "Client, HTTP",
    "queue": "Queue",
    "scheduler": "Scheduler",
    "lookup": "Lookup",
    "load_wait": "Load wait",
    "transfer": "Copy",
    "staging": "Staging",
    "recompute": "Compute",
    "sampling": "Sampling",
    "next_step": "Next step",
    "remainder": "Unexplained",
}
"""Heads of columns."""

_MEANING = {
    "client_http": "Until the engine's front end has the request and hands it on, and from the first token back.",
    "queue": "Other requests' steps and copies, and the wait before anything is done for this one; also where a step's "
    "inputs wait behind another request's KV on the way to the device.",
    "scheduler": "Scheduling, taking results, and steps of the engine that compute nothing.",
    "lookup": "From the first to the last time that the connector is asked how much of the prompt is stored.",
    "load_wait": "From when the connector is told to load until it says that it has, less the copies: calls of other "
    "processes, and polling. Where no copy is visible they are in here.",
    "transfer": "Copies that bring this prompt's KV to the device, where the worker isn't computing for it already.",
    "staging": "Copies inside the device, and another process's kernels, while it loads.",
    "recompute": "The worker's steps with this request up to the one that gives its first token, host and device.",
    "sampling": "From the end of that step's computing until the scheduler has the token, but for the next step.",
    "next_step": "The worker launches the step after it before the scheduler takes the token: so does an engine that "
    "schedules asynchronously, and a first token is that much later.",
    "remainder": "What none of these covers. Every instant counts once, so all of them add up to the TTFT.",
}
GLOSSARY = [(HEADS[part], text) for part, text in _MEANING.items()]


@dataclass(frozen=True, slots=True)
class Section:
    """One table: the first three columns of ``heads`` may be names, all others are numbers."""

    title: str
    under: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def build(
    tables_dir: Path,
    figures_dir: Path,
    out: tuple[Path, Path, Path],
    title: str,
    perfetto: Mapping[str, str],
    *,
    missing: Sequence[str] = (),
    compare_with: str | None = None,
) -> None:
    """Write HTML, PDF and Markdown (``out``). ``perfetto`` has the path of each setup's trace, relative to the page's
    folder; ``missing`` are setups of the experiment that no capture was asked of, ``compare_with`` one of
    `config.references`. Equal inputs give equal files."""
    tables = load(tables_dir)
    texts = [*reasons(tables), *beside(tables, EXPLANATIONS.get(compare_with or ""))]
    parts = sections(tables)
    seen = {
        "title": f"{title}: where the time to the first token goes",
        "experiment": title,
        "facts": _facts(tables, missing),
        "introduction": INTRODUCTION,
        "reasons": texts,
        "figures": [page.drawing(figures_dir, module) for module in FIGURES],
        "perfetto": [(setup, path) for setup, path in perfetto.items() if setup in tables.setups],
        "sections": parts,
        "glossary": GLOSSARY,
    }
    for path in out:
        path.parent.mkdir(parents=True, exist_ok=True)
    html, pdf, short = out
    html.write_text(page.render("timelines.html.j2", seen, paged=False), encoding="utf-8")
    pdf.write_bytes(page.pdf(page.render("timelines.html.j2", seen, paged=True)))
    short.write_text(markdown(title, texts, parts), encoding="utf-8")


def _facts(tables: Tables, missing: Sequence[str]) -> list[tuple[str, str]]:
    facts = [("Setups", ", ".join(tables.captures["setup"]))]
    facts += [("Not captured", ", ".join(missing))] if missing else []
    facts += [("Machine", name) for name in tables.captures["host"].unique(maintain_order=True) if name]
    return [*facts, ("Profiler", ", ".join(sorted(set(tables.captures["profiler"]))))]


def markdown(title: str, texts: Sequence[str], parts: Sequence[Section]) -> str:
    """The page in short: words and tables."""
    lines = [f"# {title}: where the time to the first token goes", "", INTRODUCTION]
    lines += [f"\n{text}" for text in texts]
    for section in parts:
        lines += ["", f"## {section.title}", "", *_table(section), "", section.under]
    return "\n".join(lines) + "\n"


def _table(section: Section) -> Iterator[str]:
    for number, row in enumerate([section.heads, *section.rows]):
        # A bar or a line's end would end the cell, in a name as in a reason.
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            yield f"|{' --- |' * len(row)}"


def sections(tables: Tables) -> list[Section]:
    """Every table of the page."""
    parts = [*PARTS, "remainder"]
    columns = ["ttft_ns", *(f"{part}_ns" for part in parts)]
    split = _means(tables.decomposition.filter(pl.col("problem").is_null()), columns)
    return [
        Section(
            "Decomposition",
            "Mean over the requests of a pass, in ms. A dash: not known for all of them; its time is in another "
            "part. Last: the unexplained share.",
            [*_NAMED, "TTFT", *(HEADS[part] for part in parts), "%"],
            [
                [
                    *_names(row),
                    *(_ms(row[f"{part}_ns"]) for part in ("ttft", *parts)),
                    f"{100 * row['remainder_ns'] / row['ttft_ns']:.1f}",
                ]
                for row in split.iter_rows(named=True)
            ],
        ),
        *_loads(tables),
        Section(
            "From the engine's counters alone",
            "What every trial can have without a profiler: means of the engine's histograms over the same passes, in "
            "ms. What it doesn't count is a dash, and in what is unexplained.",
            [*_NAMED, "TTFT", *(HEADS[part] for part in (*COUNTED, "remainder"))],
            [
                [*_names(row), *(_ms(row[f"{part}_ns"]) for part in ("ttft", *COUNTED, "remainder"))]
                for row in tables.counted.iter_rows(named=True)
            ],
        ),
        Section(
            "What capturing costs",
            "Mean TTFT of equal passes on the same server, in ms: before the profiler recorded, and while it did. One "
            "pass each, so a ratio holds what passes differ by of themselves.",
            [*_NAMED, "Without", "With", "Ratio"],
            [
                [*_names(row), _ms(row["untraced_ttft_ns"]), _ms(row["traced_ttft_ns"]), f"{row['ratio']:.2f}"]
                for row in tables.cost.iter_rows(named=True)
            ],
        ),
        Section(
            "Captures",
            "A profiler's records that can't be (no time, an end before the start, work that reaches into its "
            "successor on a serial stream) are left out and counted; beyond 1 % nothing is concluded. The clock: how "
            "late half of the marks are by which the profiler's time is brought onto the client's.",
            ["Setup", "Profiler", "Records", "Clock, µs"],
            [_capture(row) for row in tables.captures.iter_rows(named=True)],
        ),
    ]


def _loads(tables: Tables) -> list[Section]:
    """How the KV of hits came to the device; empty where no copy of one was seen."""
    ceilings = tables.captures.select("setup", "ceiling")
    hits = tables.decomposition.filter(pl.col("loaded_tokens") > 0)
    means = _means(hits, _COPIED).filter(pl.col("transfer_bytes") > 0).join(ceilings, on="setup", how="left")
    if not means.height:
        return []
    return [
        Section(
            "How the KV of a hit came",
            "Mean over the requests of a pass; loaded and computed are tokens. Calls: of the driver's copy functions; "
            "one may be a batch of thousands of copies. GB/s and the share of the link's roofline are over the time in "
            "which it copied. Before and after, in ms: from the start of the load to its first copy, and from its last "
            "one until the connector says that it is done. A roofline is timed by events around a copy, a profiler's "
            "record is the copy alone: it may be faster by a fraction of a percent.",
            [
                *_NAMED,
                "Loaded",
                "Computed",
                "GB",
                "Calls",
                "Copies",
                "Copy, ms",
                "GB/s",
                "% of link",
                "Before",
                "After",
            ],
            [_load(row) for row in means.iter_rows(named=True)],
        )
    ]


def _load(row: Mapping[str, Any]) -> list[str]:
    rate = row["transfer_bytes"] * 1e9 / row["transfer_busy_ns"]
    return [
        *_names(row),
        *(UNKNOWN if row[name] is None else f"{row[name]:,.0f}" for name in ("loaded_tokens", "computed_tokens")),
        f"{row['transfer_bytes'] / 1e9:.2f}",
        *(f"{row[name]:,.0f}" for name in ("transfer_calls", "transfer_count")),
        _ms(row["transfer_busy_ns"]),
        f"{rate / 1e9:.1f}",
        f"{100 * rate / row['ceiling']:.0f}" if row["ceiling"] else UNKNOWN,
        *(_ms(row[name]) for name in ("until_copies_ns", "after_copies_ns")),
    ]


def _names(row: Mapping[str, Any]) -> list[str]:
    return [row["setup"], row["workload"], row["pass"]]


def _capture(row: Mapping[str, Any]) -> list[str]:
    spread = row["clock_spread_ns"]
    state = row["quality"] or row["reason"] or UNKNOWN
    if row["quality"] and not row["valid"]:
        state = f"not valid: {state}"
    return [row["setup"], row["profiler"], state, UNKNOWN if spread is None else f"{spread / 1e3:.0f}"]


def _means(frame: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """A mean is unknown where one of its values is: that of the others would be another pass's."""
    means = [pl.when(pl.col(name).null_count() == 0).then(pl.col(name).mean()).alias(name) for name in names]
    return frame.group_by("setup", "workload", "pass", "round", maintain_order=True).agg(means)


def _ms(nanoseconds: float | None) -> str:
    return UNKNOWN if nanoseconds is None else f"{nanoseconds / 1e6:.1f}"
