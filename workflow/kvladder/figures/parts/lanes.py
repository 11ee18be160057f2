"""Rows of setups with one lane a pass, in one panel a workload: the frame that several figures share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log10
from statistics import median
from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from kvladder.figures.parts.style import (
    COLOURS,
    MARKERS,
    PASS_LABELS,
    SMALL,
    TEXT,
    WIDE,
    blank,
    label_width,
    style,
    text_width,
)
from kvladder.tables.labels import setup_labels, short_labels, single_workloads
from kvladder.tables.model import CELL, PASSES, Tables

MOST_SETUPS = 12
MOST_PANELS = 4
LANE = 0.175
"""Inches."""
_GAP = 0.13
_BOLD = 1.15
"""How much wider a bold title is than what is measured."""
_LOG_FROM = 8.0
_DECADE = 0.75
"""Inches that a decade of a logarithmic axis needs for labels at 1, 2 and 5."""


@dataclass(frozen=True)
class Row:
    """A setup's place in a figure."""

    setup: str
    label: str
    top: float

    def lane(self, place: int) -> float:
        """Height of its n-th lane's middle, in inches below the panel's top edge."""
        return self.top + LANE * (place + 0.5)


@dataclass(frozen=True)
class Grid:
    """Panels of one figure, and what didn't fit."""

    figure: Figure
    panels: list[tuple[tuple[str, str], Axes]]
    rows: list[Row]
    panel_width: float


def not_only_sweeps(tables: Tables) -> bool:
    """Whether something was sent besides the cells of sweeps; True without a valid trial, as a figure then says so."""
    return bool(single_workloads(tables, tables.passes)) or not tables.passes.height


def panels(
    tables: Tables,
    width: float,
    data: pl.DataFrame,
    legend: Sequence[Any],
    *,
    side: float = 0.0,
    lanes: bool = False,
    workloads: Sequence[tuple[str, str]] | None = None,
) -> Grid | None:
    """Lay out one panel for each (suite, workload) in `data` and one row for each of its setups; None without data.

    Unless `workloads` says which to show, cells of sweeps are left out: they have figures of their own; and workloads
    of two engines, which have a table.

    At most 12 setups and 4 workloads are shown, the rest is counted below. `side` inches are kept free right of each
    panel; `lanes` writes the passes' names beside their lanes. Must be called inside `style()`.
    """
    workloads = single_workloads(tables, data) if workloads is None else workloads
    have = set(data.filter(~pl.col("workload").str.contains(CELL, literal=True))["setup"])
    labels = setup_labels(tables, label_width(width))
    names = [setup for setup in labels if setup in have]
    if not names or not workloads:
        return None
    hidden = (max(0, len(names) - MOST_SETUPS), max(0, len(workloads) - MOST_PANELS))
    names, workloads = names[:MOST_SETUPS], workloads[:MOST_PANELS]
    titles = tables.titles()
    across = min(3 if len(workloads) == 3 else 2, len(workloads)) if width >= WIDE else 1
    down = -(-len(workloads) // across)

    step = LANE * len(PASSES) + _GAP
    height = step * len(names) + _GAP
    left = max(text_width(labels[name]) for name in names) + 0.16
    beside = max(text_width(PASS_LABELS[name], SMALL) for name in PASSES) + 0.08 if lanes else 0.0
    left += beside
    top, foot, between = 0.5, 0.42, 0.8
    note = left_out(*hidden, [titles[setup] for setup in labels if setup not in have])
    total = top + down * height + (down - 1) * between + foot + (0.22 if note else 0)
    panel = (width - left - 0.06 - (across - 1) * 0.22) / across - side
    figure = Figure(figsize=(width, total))
    rows = [Row(name, labels[name], _GAP + place * step) for place, name in enumerate(names)]
    axes: list[tuple[tuple[str, str], Axes]] = []
    suites = {suite for suite, _ in workloads}
    for place, workload in enumerate(workloads):
        column, line = place % across, place // across
        x = left + column * (panel + side + 0.22)
        y = total - top - line * (height + between) - height
        axis = figure.add_axes((x / width, y / total, panel / width, height / total))
        axis.set_ylim(height, 0)
        axis.set_yticks([])
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="x", length=0, pad=3)
        title = workload[1] if len(suites) == 1 else f"{workload[0]} / {workload[1]}"
        # The title stands over the panel's left edge, in ink: it is what tells panels apart.
        figure.text(x / width, (y + height + 0.06) / total, fit(title, panel / _BOLD), fontsize=TEXT, weight="bold")
        for row in rows:
            if column == 0:
                middle = (total - top - line * (height + between) - row.lane(1)) / total
                figure.text((left - beside - 0.12) / width, middle, row.label, ha="right", va="center", fontsize=TEXT)
                if lanes:
                    _name_lanes(axis, row)
        for row in rows[1:]:
            axis.axhline(row.top - _GAP / 2, color=COLOURS["rule"], lw=0.5, zorder=0)
        axes.append((workload, axis))
    figure.legend(
        handles=list(legend),
        loc="upper left",
        bbox_to_anchor=(0.0 if width < WIDE else left / width, 1.0),
        borderaxespad=0.15,
        ncols=len(legend) if width >= WIDE else 3,
        frameon=False,
        fontsize=SMALL,
        handletextpad=0.4,
        columnspacing=1.2,
        labelcolor=COLOURS["ink"],
    )
    if note:
        figure.text(
            1 - 0.06 / width, 0.06 / total, note, ha="right", va="bottom", fontsize=SMALL, color=COLOURS["muted"]
        )
    return Grid(figure, axes, rows, panel)


def _name_lanes(axis: Axes, row: Row) -> None:
    for place, name in enumerate(PASSES):
        axis.annotate(
            PASS_LABELS[name],
            (0, row.lane(place)),
            (-5, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=SMALL,
            color=COLOURS["muted"],
            annotation_clip=False,
        )


def left_out(setups: int, workloads: int, without: Sequence[str]) -> str:
    """What isn't shown, so that nothing is left out in silence."""
    more = [f"{setups} more setups"] if setups else []
    more += [f"{workloads} more workloads"] if workloads else []
    parts = [f"and {' and '.join(more)}: in the tables"] if more else []
    if without:
        named = list(short_labels(without[:2], 20).values())
        named += [f"{len(without) - 2} more"] if len(without) > 2 else []
        parts.append(f"no value: {', '.join(named)}")
    return "; ".join(parts)


def fit(text: str, width: float, size: float = TEXT) -> str:
    """Shorten a text in the middle until it is no wider than that many inches; one letter is left at least."""
    for length in range(len(text), 3, -1):
        label = short_labels([text], length)[text]
        if text_width(label, size) <= width:
            return label
    return text[:1]


def shares(grid: Grid, data: pl.DataFrame, label: str, draw: Callable[[Axes, float, dict[str, Any]], None]) -> None:
    """Lanes of 0 to 100 %: `draw` gets the panel, the lane's height and its row of `data`, one a suite, workload, setup
    and pass; a lane without a row stays empty."""
    lanes = {(row["suite"], row["workload"], row["setup"], row["pass"]): row for row in data.iter_rows(named=True)}
    for (suite, workload), axis in grid.panels:
        axis.set_xlim(0, 100)
        axis.set_xticks([0, 50, 100])
        axis.set_xlabel(label, loc="left")
        for row in grid.rows:
            for place, name in enumerate(PASSES):
                found = lanes.get((suite, workload, row.setup, name))
                if found is not None:
                    draw(axis, row.lane(place), found)


def beside_share(axis: Axes, y: float, text: str) -> None:
    """Write a lane's number right of its panel."""
    axis.annotate(
        text, (100, y), (5, 0), textcoords="offset points", va="center", fontsize=SMALL, annotation_clip=False
    )


def pass_legend() -> list[Line2D]:
    """Marker and colour of each pass."""
    return [
        Line2D([], [], ls="", marker=MARKERS[name], ms=4.5, color=COLOURS[name], label=PASS_LABELS[name])
        for name in PASSES
    ]


def dots(tables: Tables, width: float, metric: str, keep: Callable[[str, str], bool], nothing: str) -> Figure:
    """One dot a trial, a bar at the median with its value, a line from smallest to largest; seconds.

    `keep` says for (suite, workload) whether it is shown; `nothing` is written where no value is left. The axis is
    logarithmic where the values span a factor of 8 or more, and starts at 0 elsewhere.
    """
    data = tables.metrics.filter((pl.col("metric") == metric) & pl.col("value").is_not_null())
    wanted = [keep(suite, workload) for suite, workload in data.select("suite", "workload").iter_rows()]
    data = data.filter(pl.Series(wanted, dtype=pl.Boolean))
    with style():
        grid = panels(tables, width, data, pass_legend())
        if grid is None:
            return blank(width, nothing)
        for (suite, workload), axis in grid.panels:
            part = data.filter((pl.col("suite") == suite) & (pl.col("workload") == workload))
            part = part.filter(pl.col("setup").is_in([row.setup for row in grid.rows]))
            _scale(axis, part["value"].to_list(), grid.panel_width)
            by_lane = part.partition_by("setup", "pass", as_dict=True)
            for row in grid.rows:
                for lane, name in enumerate(PASSES):
                    trials = by_lane.get((row.setup, name))
                    if trials is not None:
                        _lane(axis, name, row.lane(lane), trials.sort("repeat")["value"].to_list())
        return grid.figure


def _lane(axis: Axes, name: str, y: float, values: list[float]) -> None:
    colour, low, high, middle = COLOURS[name], min(values), max(values), median(values)
    axis.plot([low, high], [y, y], color=colour, lw=1.0, zorder=2, solid_capstyle="butt")
    axis.plot(
        values,
        [y] * len(values),
        ls="",
        marker=MARKERS[name],
        ms=4.0,
        mfc=colour,
        mec=COLOURS["paper"],
        mew=0.5,
        zorder=3,
    )
    axis.plot([middle] * 2, [y - LANE * 0.36, y + LANE * 0.36], color=COLOURS["ink"], lw=1.1, zorder=2.5)
    axis.annotate(
        seconds(middle),
        (high, y),
        (6, 0),
        textcoords="offset points",
        va="center",
        fontsize=SMALL,
        color=COLOURS["ink"],
    )


def _scale(axis: Axes, values: list[float], width: float) -> None:
    """Limits that leave the labels right of the largest value inside the panel."""
    low, high = min(values), max(values)
    room = text_width("0.000 s", SMALL) + 0.16
    share = room / (width - room)
    axis.grid(axis="x", color=COLOURS["rule"], lw=0.5)
    axis.set_axisbelow(True)
    if low > 0 and high / low >= _LOG_FROM:
        start = low / (high / low) ** 0.04
        axis.set_xscale("log")
        axis.set_xlim(start, high * (high / start) ** share)
        decades = log10(high * (high / start) ** share / start)
        subs = (1, 2, 5) if width / decades >= _DECADE else (1, 3) if width / decades >= _DECADE / 2 else (1,)
        axis.xaxis.set_major_locator(LogLocator(10, subs=subs))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.minorticks_off()
        axis.set_xlabel("seconds, logarithmic", loc="left")
    else:
        top = high if high > 0 else 1.0
        axis.set_xlim(0, top * (1 + share))
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.set_xlabel("seconds", loc="left")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def seconds(value: float) -> str:
    """Three significant digits; seconds like the axis, smaller units only where seconds would be all zeros."""
    factor, unit = (1.0, "s") if abs(value) >= 0.01 else (1e3, "ms") if abs(value) >= 1e-5 else (1e6, "µs")
    scaled = value * factor
    return f"{scaled:,.0f} {unit}" if abs(scaled) >= 100 else f"{scaled:#.3g} {unit}"
