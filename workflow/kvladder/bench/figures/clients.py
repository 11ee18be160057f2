"""Panels with a line a client over the requests in flight: the frame that the bench's figures share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvladder.bench.tables import OWN, TITLES, BenchTables
from kvladder.figures.parts.lines import Line, doubling, frame, logarithmic, look_of
from kvladder.figures.parts.style import COLOURS, blank, style

MARKS = (
    "Dotted: what this project's client is held to. A point is one run of a client on one core, the line goes through "
    "the medians of runs. Where there is no point, the client has no value: no result, or too few requests for the "
    "percentile."
)
"""The end of each caption: what points, lines and dots are."""


def over_concurrency(
    tables: BenchTables,
    width: float,
    columns: Mapping[str, str],
    *,
    scale: Callable[[list[Axes]], None] = logarithmic,
    factor: float = 1.0,
) -> Figure:
    """A row of panels for each column of ``cells`` (column → title), a panel for each prompt length, each client's
    values × ``factor`` on a y axis that ``scale`` sets for a row; dotted lines are goals. Sizes of values: a bias below
    zero is drawn at its size."""
    rows = tables.cells.filter((pl.col("kind") == "schedule") & (pl.col("cores") == 1))
    lengths = rows["prompt_tokens"].unique().sort().to_list()
    spots = [(column, length) for column in columns for length in lengths]
    if not spots:
        return blank(width, "No client was measured on one core at a server that answers on schedule.")
    have = set(rows["client"])
    lines = [
        Line(name, title, look_of(place - 1) if name != OWN else look_of(None) | {"marker": "o"})
        for place, (name, title) in enumerate(TITLES.items())
        if name in have
    ]
    with style():
        panels = frame(width, lines, [f"{columns[column]}, {length:,} ids" for column, length in spots])
        for (column, length), axis in zip(spots, panels.axes, strict=True):
            here = rows.filter(pl.col("prompt_tokens") == length)
            levels = here["concurrency"].unique().sort().to_list()
            doubling(axis, levels, "requests in flight")
            # First, so that points lie on top of it.
            _goals(axis, tables.goals.filter(pl.col("column") == column), levels, factor)
            for line in lines:
                _draw(axis, line, here.filter(pl.col("client") == line.name), column, factor)
        for start in range(0, len(spots), len(lengths)):
            scale(panels.axes[start : start + len(lengths)])
        return panels.figure


def _draw(axis: Axes, line: Line, rows: pl.DataFrame, column: str, factor: float) -> None:
    """Every run's point, and the line through medians; a level without a value breaks nothing."""
    runs: dict[int, list[float]] = {}
    for level, value in rows.sort("concurrency").select("concurrency", column).drop_nulls().iter_rows():
        runs.setdefault(level, []).append(abs(value) * factor)
    axis.plot(list(runs), [median(values) for values in runs.values()], **line.look | {"marker": ""})
    points = [(level, value) for level, values in runs.items() for value in values]
    axis.plot([level for level, _ in points], [value for _, value in points], **line.look | {"ls": ""})


def _goals(axis: Axes, goals: pl.DataFrame, levels: list[int], factor: float) -> None:
    """Dotted lines over the levels that each goal is about."""
    for goal in goals.iter_rows(named=True):
        within = [level for level in levels if (goal["above"] or 0) < level <= (goal["up_to"] or level)]
        if not within:
            continue
        # From edge to edge, or half way to the next level, where another goal begins.
        left, right = axis.get_xlim()
        start = left if min(within) == min(levels) else min(within) / 2**0.5
        end = right if max(within) == max(levels) else max(within) * 2**0.5
        height = goal["limit"] * factor
        axis.plot([start, end], [height, height], ls=":", lw=1.1, color=COLOURS["muted"])


def percent(axes: list[Axes]) -> None:
    """A linear scale from 0 to a little above 100."""
    for axis in axes:
        axis.set_ylim(0, 106)
        axis.set_yticks(range(0, 101, 20))
