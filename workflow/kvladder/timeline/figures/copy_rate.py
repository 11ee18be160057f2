"""How fast KV was copied to the device while one request was loaded, against what the link can do."""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure

from kvladder.counters.reading import ENGINE
from kvladder.figures.parts.style import COLOURS, DASHES, LINES, SMALL, WIDE, blank, style
from kvladder.timeline.figures.request import requests
from kvladder.timeline.tables import Tables

NAME = "copy_rate"
TITLE = "Copy rate while a hit is loaded"
CAPTION = (
    "Bytes per second of the copies that bring KV to the device while they run, over the time since the request was "
    "sent; each step is a run of copies of at most 2 ms, or a batch that the driver counts as one copy. Thin: the "
    "roofline of the setup's link, where it was measured on the same host."
)
CATEGORY = "Timelines"

PAUSE_MS = 0.5
"""A shorter gap between copies isn't drawn down to nothing."""
LEAST_BYTES = 1 << 20
"""Smaller transfers bring no KV but what goes with it, at a rate that says nothing."""


def draw(tables: Tables, width: float = WIDE) -> Figure:
    """One line a setup that has copies."""
    chosen = [(row, _copies(tables, row)) for row in requests(tables)]
    shown = [(row, copies) for row, copies in chosen if copies]
    if not shown:
        return blank(width, "No capture has copies of a hit.")
    with style():
        figure = Figure(figsize=(width, 2.6), layout="constrained")
        axis = figure.subplots()
        ceilings: set[float] = set()
        for place, (row, copies) in enumerate(shown):
            colour = COLOURS[LINES[place % len(LINES)]]
            edges, rates = [0.0], [0.0]
            for start, end, rate in copies:
                if start - edges[-1] > PAUSE_MS:
                    edges += [edges[-1], start]
                    rates += [0.0, 0.0]
                edges += [start, end]
                rates += [rate, rate]
            axis.plot(
                [*edges, edges[-1]],
                [*rates, 0.0],
                color=colour,
                lw=1.2,
                ls=DASHES[place % len(DASHES)],
                label=row["setup"],
            )
            ceiling = tables.captures.filter(pl.col("setup") == row["setup"])["ceiling"].item()
            if ceiling is not None:
                ceilings.add(ceiling / 1e9)
        for ceiling in sorted(ceilings):
            axis.axhline(ceiling, color=COLOURS["ink"], lw=0.6, label=f"roofline, {ceiling:.1f} GB/s")
        axis.set_xlabel("ms since the request was sent")
        axis.set_ylabel("GB/s")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(color=COLOURS["rule"], lw=0.5)
        axis.legend(frameon=False, fontsize=SMALL)
        return figure


def _copies(tables: Tables, row: dict[str, int | str]) -> list[tuple[float, float, float]]:
    """(start ms, end ms, GB/s) of the copies of a request's load."""
    inside = tables.events.filter(
        pl.col("setup") == row["setup"],
        (pl.col("kind") == "h2d") | (pl.col("name") == "copy-load"),
        pl.col("start_ns") >= row["send_ns"],
        pl.col("end_ns") <= pl.lit(row["send_ns"]) + pl.lit(row["ttft_ns"]),
        pl.col("busy_ns") > 0,
        pl.col("bytes") >= LEAST_BYTES,
        (pl.col("requests") != "") | (pl.col("process") != ENGINE),
    ).sort("start_ns")
    return [
        ((start - int(row["send_ns"])) / 1e6, (end - int(row["send_ns"])) / 1e6, moved / busy)
        for start, end, moved, busy in inside.select("start_ns", "end_ns", "bytes", "busy_ns").iter_rows()
        if moved
    ]
