"""Panels with one line a setup, over something that was swept: the frame that several figures share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from kvladder.figures.parts.lanes import left_out
from kvladder.figures.parts.style import (
    COLOURS,
    DASHES,
    LINE_MARKERS,
    LINES,
    SMALL,
    TEXT,
    WIDE,
    label_width,
    text_width,
)
from kvladder.tables.labels import setup_labels
from kvladder.tables.model import Tables

MOST_LINES = len(LINE_MARKERS)
_HEIGHT = 2.1
_LEFT = 0.58
_RIGHT = 0.16
_FOOT = 0.5
_TITLE = 0.28
_ROW = 0.19
_BETWEEN = 0.3


@dataclass(frozen=True)
class Line:
    """How a setup (or what else is compared) is drawn: colour, marker and dashes, no two the same."""

    name: str
    label: str
    look: dict[str, Any]


@dataclass(frozen=True)
class Panels:
    """A figure's axes, in the order of their titles, and its lines."""

    figure: Figure
    axes: list[Axes]
    lines: list[Line]


def panels(
    tables: Tables, width: float, setups: Iterable[str], titles: Sequence[str], *, expected: Iterable[str]
) -> Panels:
    """One panel a title, two side by side where `width` allows, under a legend of at most `MOST_LINES` setups.

    Setups beyond that are counted below, and those of `expected` that have no value are named. Must be called inside
    `style()`.
    """
    have, wanted, titles_of = set(setups), set(expected), tables.titles()
    labels = setup_labels(tables, label_width(width))
    order = [setup for setup in labels if setup in have]
    hidden, order = len(order) - MOST_LINES, order[:MOST_LINES]
    # Looks go by place among all setups, so that one looks the same in every figure. The baseline is ink: what the
    # others are held against.
    places = {setup: place for place, setup in enumerate(each for each in labels if each != tables.baseline)}
    lines = [Line(setup, labels[setup], look_of(places.get(setup))) for setup in order]
    missing = [titles_of[setup] for setup in labels if setup in wanted - have]
    note = left_out(max(0, hidden), 0, missing)
    return frame(width, lines, titles, note)


def frame(width: float, lines: list[Line], titles: Sequence[str], note: str = "") -> Panels:
    """One panel a title, two side by side where `width` allows, a legend of the lines above and a note below. Must be
    called inside `style()`."""
    across = 2 if width >= WIDE and len(titles) > 1 else 1
    down = -(-len(titles) // across)
    columns, rows = _legend_shape(lines, width)
    legend, below = rows * _ROW + 0.08, 0.22 if note else 0.0
    total = legend + down * (_TITLE + _HEIGHT + _FOOT) + below
    panel = (width - across * (_LEFT + _RIGHT) - (across - 1) * _BETWEEN) / across
    figure = Figure(figsize=(width, total))
    axes = []
    for place, title in enumerate(titles):
        x = _LEFT + place % across * (panel + _LEFT + _RIGHT + _BETWEEN)
        y = total - legend - place // across * (_TITLE + _HEIGHT + _FOOT) - _TITLE - _HEIGHT
        axis = figure.add_axes((x / width, y / total, panel / width, _HEIGHT / total))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color=COLOURS["rule"], lw=0.5)
        axis.set_axisbelow(True)
        axis.tick_params(length=0, pad=3, labelsize=SMALL, labelcolor=COLOURS["muted"])
        figure.text((x - _LEFT + 0.06) / width, (y + _HEIGHT + 0.09) / total, title, fontsize=TEXT, weight="bold")
        axes.append(axis)
    figure.legend(
        handles=[Line2D([], [], label=line.label, **line.look) for line in lines],
        loc="upper left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.15,
        ncols=columns,
        frameon=False,
        fontsize=SMALL,
        handlelength=2.6,
        handletextpad=0.5,
        columnspacing=1.2,
        labelspacing=0.35,
        labelcolor=COLOURS["ink"],
    )
    if note:
        figure.text(1 - 0.06 / width, 0.06 / total, note, ha="right", fontsize=SMALL, color=COLOURS["muted"])
    return Panels(figure, axes, lines)


def look_of(place: int | None) -> dict[str, Any]:
    """Line style of the n-th thing that is compared, or, for None, of what the others are held against: ink."""
    return {
        "color": COLOURS["ink"] if place is None else COLOURS[LINES[place % len(LINES)]],
        "marker": "." if place is None else LINE_MARKERS[place % len(LINE_MARKERS)],
        "ls": DASHES[(place or 0) // len(LINES) % len(DASHES)],
        "ms": 4.5,
        "lw": 1.2,
        "mec": COLOURS["paper"],
        "mew": 0.5,
    }


def _legend_shape(lines: Sequence[Line], width: float) -> tuple[int, int]:
    """Columns and rows that a legend of these lines takes."""
    entry = max((text_width(line.label, SMALL) for line in lines), default=0.0) + 0.52
    columns = max(1, min(len(lines), int((width - 0.1) / entry)))
    return columns, -(-len(lines) // columns)


def doubling(axis: Axes, values: Sequence[int], label: str) -> None:
    """A logarithmic x axis with a tick at each value that was measured, thinned where labels would touch."""
    axis.set_xscale("log")
    low, high = min(values), max(values)
    room = (high / low) ** 0.04 if high > low else 1.3
    axis.set_xlim(low / room, high * room)
    axis.xaxis.set_major_locator(FixedLocator(_apart(axis, values)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.minorticks_off()
    axis.set_xlabel(label, loc="left")


def _apart(axis: Axes, values: Sequence[int]) -> list[int]:
    """Values whose labels don't touch, the smallest and the largest first."""
    figure = axis.figure
    inches = axis.get_position().width * figure.get_figwidth()  # type: ignore[union-attr]
    low, high = (log(end) for end in axis.get_xlim())

    def reach(value: int) -> tuple[float, float]:
        middle, half = (log(value) - low) / (high - low) * inches, text_width(f"{value:,}", SMALL) / 2 + 0.04
        return middle - half, middle + half

    kept: list[int] = []
    for value in sorted(set(values), key=lambda each: (each not in (min(values), max(values)), each)):
        start, end = reach(value)
        if all(end < reach(other)[0] or start > reach(other)[1] for other in kept):
            kept.append(value)
    return sorted(kept)


def logarithmic(axes: Sequence[Axes]) -> None:
    """One logarithmic y scale for these axes, with plain numbers: what lies side by side is compared."""
    for axis in axes:
        axis.set_yscale("log")
    low, high = min(axis.get_ylim()[0] for axis in axes), max(axis.get_ylim()[1] for axis in axes)
    decades = log(high / low, 10)
    for axis in axes:
        axis.set_ylim(low, high)
        axis.yaxis.set_major_locator(
            LogLocator(10, subs=(1, 2, 5) if decades < 2.5 else (1, 3) if decades < 4 else (1,))
        )
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.minorticks_off()
