"""What crossed PCIe over a trial's time, by the device's own counters."""

from __future__ import annotations

from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kvladder.figures.parts.lanes import fit, left_out
from kvladder.figures.parts.style import COLOURS, PASS_LABELS, SMALL, TEXT, WIDE, blank, label_width, style
from kvladder.tables.labels import setup_labels, workload_order
from kvladder.tables.model import Tables

NAME = "pcie_trace"
TITLE = "PCIe over time"
CAPTION = (
    "Bytes that the device received (loads, upwards) and sent (stores, downwards), by its own PCIe counters, packet "
    "headers included. A bar is the mean between two samples: where a copy is shorter than that, the bar's area is "
    "what it moved and its height is less than its speed. Colour: the pass that the step falls into. Hatched: the "
    "32-bit counter started over at least once more than it can show; how often is taken from the engine's bytes. "
    "Dashed: the fastest copies between pinned memory and the device that were measured. One valid trial a setup, "
    "the first; a time axis each."
)
CATEGORY = "Limits"

MOST = 8
_HATCH = "////"
_HEIGHT = 0.95
_LEFT = 0.5
_RIGHT = 0.12
_TITLE = 0.26
_FOOT = 0.4
_LEGEND = 0.24
_LABEL = 0.4
"""Inches below which a workload's name isn't written."""
_ROOFLINES = {"load": "pinned_h2d", "store": "pinned_d2h"}


def applies(tables: Tables) -> bool:
    """Whether a device counted what crossed its link in a trial of a setup that stores."""
    return tables.pcie_trace.height > 0


def draw(tables: Tables, width: float = WIDE) -> Figure:
    """A panel a setup: ``gb_per_s`` of ``pcie_trace`` over seconds, of its first suite; loads above 0, stores below."""
    data = tables.pcie_trace
    labels = setup_labels(tables, label_width(width))
    have = [name for name in labels if name in set(data["setup"])]
    if not have:
        return blank(width, "No valid trial has counters of what crossed PCIe.")
    suites = [suite for suite, _ in workload_order(tables, data.drop_nulls("workload"))]
    shown = have[:MOST]
    with style():
        ceilings = _ceilings(tables)
        rows = 1 if width >= WIDE else 3
        total = _LEGEND * rows + len(shown) * (_TITLE + _HEIGHT + _FOOT) + (0.22 if len(have) > MOST else 0)
        figure = Figure(figsize=(width, total))
        top = max([*ceilings.values(), *data["gb_per_s"].to_list()]) * 1.08
        for place, name in enumerate(shown):
            mine = data.filter(pl.col("setup") == name)
            suite = next(each for each in suites if each in set(mine["suite"]))
            y = total - _LEGEND * rows - place * (_TITLE + _HEIGHT + _FOOT) - _TITLE - _HEIGHT
            axis = figure.add_axes((_LEFT / width, y / total, (width - _LEFT - _RIGHT) / width, _HEIGHT / total))
            figure.text(0.06 / width, (y + _HEIGHT + 0.09) / total, labels[name], fontsize=TEXT, weight="bold")
            _panel(axis, mine.filter(pl.col("suite") == suite), ceilings, top, width - _LEFT - _RIGHT)
        axis.set_xlabel("seconds since the first timed pass began; GB/s, loads upwards, stores downwards", loc="left")
        if width < WIDE:
            axis.set_xlabel("seconds; GB/s, loads up, stores down", loc="left")
        _legend(figure, data, bool(ceilings), rows)
        if len(have) > MOST:
            note = left_out(len(have) - MOST, 0, [])
            figure.text(1 - 0.06 / width, 0.06 / total, note, ha="right", fontsize=SMALL, color=COLOURS["muted"])
        return figure


def _colour(name: str | None) -> str:
    """A pass's colour; of one that is all of them at once, and between passes, a neutral one."""
    return COLOURS.get(name or "", COLOURS["muted"])


def _ceilings(tables: Tables) -> dict[str, float]:
    """Fastest measurement by direction, in GB/s, of those links that were measured."""
    found = {}
    for direction, link in _ROOFLINES.items():
        best = tables.rooflines.filter(pl.col("link") == link)["max_gb_per_s"].max()
        if isinstance(best, float):
            found[direction] = best
    return found


def _panel(axis: Axes, data: pl.DataFrame, ceilings: dict[str, float], top: float, inches: float) -> None:
    """One setup's bars, on an axis that many inches wide."""
    for row in data.iter_rows(named=True):
        sign = 1 if row["direction"] == "load" else -1
        colour = _colour(row["pass"])
        look: dict[str, Any] = {"fc": colour, "ec": colour}
        if row["turns"]:
            look |= {"fc": COLOURS["paper"], "hatch": _HATCH}
        axis.bar(
            row["start_s"],
            sign * row["gb_per_s"],
            row["end_s"] - row["start_s"],
            align="edge",
            zorder=2,
            lw=0.5,
            **look,
        )
    for direction, ceiling in ceilings.items():
        y = ceiling if direction == "load" else -ceiling
        axis.axhline(y, color=COLOURS["ink"], lw=0.8, ls="--", zorder=1)
    axis.axhline(0, color=COLOURS["ink"], lw=0.6, zorder=3)
    first, last = min(data["start_s"].to_list()), max(data["end_s"].to_list())
    axis.set_xlim(min(0.0, first), last)
    axis.set_ylim(-top, top)
    begins = data.drop_nulls("workload").group_by("workload", maintain_order=True).agg(pl.col("start_s").min())
    for (workload, start), until in zip(begins.iter_rows(), [*begins["start_s"][1:], last], strict=True):
        axis.axvline(start, color=COLOURS["rule"], lw=0.8, zorder=0)
        room = (until - start) / (last - min(0.0, first)) * inches - 0.08
        if room >= _LABEL:
            axis.annotate(
                fit(workload, room, SMALL),
                (start, -0.62 * top),
                (3, 0),
                textcoords="offset points",
                fontsize=SMALL,
                color=COLOURS["muted"],
            )
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(length=0, pad=3, labelsize=SMALL, labelcolor=COLOURS["muted"])
    axis.yaxis.set_major_locator(MaxNLocator(6, symmetric=True))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{abs(value):g}"))


def _legend(figure: Figure, data: pl.DataFrame, measured: bool, rows: int) -> None:
    here = set(data["pass"])
    handles: list[Patch | Line2D] = [
        Patch(fc=_colour(name), label=label) for name, label in PASS_LABELS.items() if name in here
    ]
    if (data["turns"] > 0).any():
        handles.append(
            Patch(fc=COLOURS["paper"], ec=COLOURS["muted"], hatch=_HATCH, label="counter started over: completed")
        )
    if measured:
        handles.append(Line2D([], [], color=COLOURS["ink"], lw=0.8, ls="--", label="pinned copies, fastest"))
    figure.legend(
        handles=handles,
        loc="upper left",
        borderaxespad=0.15,
        ncols=len(handles) if rows == 1 else 2,
        frameon=False,
        fontsize=SMALL,
        handletextpad=0.4,
        columnspacing=1.2,
        labelcolor=COLOURS["ink"],
    )
