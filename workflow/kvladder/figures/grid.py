"""Heat maps over batch size and prompt length: where loading pays, setup by setup."""

from __future__ import annotations

from math import log2

import polars as pl
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kvladder.figures.parts.lanes import MOST_SETUPS, left_out
from kvladder.figures.parts.style import COLOURS, SMALL, TEXT, WIDE, blank, label_width, style
from kvladder.tables.labels import setup_labels
from kvladder.tables.model import Tables
from kvladder.tables.sweeps import Sweep, hit_shown, sweeps

NAME = "grid"
TITLE = "Batch size × prompt length"
CAPTION = (
    "Time from the first request of a batch sent until its last one is answered, on a first hit, ÷ that of the "
    "baseline, which computes the same prompts. Below 1 (blue) loading is faster, above 1 (orange) computing is. The "
    "number is the median of ratios paired in blocks; hatched cells were not measured, or have no valid trial on both "
    "sides."
)
CATEGORY = "Throughput"

_CELL = 0.3
_TITLE = 0.26
_FOOT = 0.5
_LEFT = 0.5
_LIMIT = 3.0
"""Powers of two at which the colour is full."""
# Cells keep their colours on a dark page, and so does the ink on them.
_HEAT = LinearSegmentedColormap.from_list("ratio", ["#3b8fc4", "#eef0f0", "#e08a45"])
_ON_CELL = "#14181c"


def applies(tables: Tables) -> bool:
    """Whether a workload was sent with several batch sizes and several lengths."""
    return _sweep(tables) is not None


def _sweep(tables: Tables) -> Sweep | None:
    return next((each for each in sweeps(tables.summary) if len(each.levels) > 1 and len(each.lengths) > 1), None)


def draw(tables: Tables, width: float = WIDE) -> Figure:
    """Median paired ratio of ``wall_s`` from ``summary`` by ``concurrency`` and ``prompt_length``, a map a setup."""
    sweep = _sweep(tables)
    nothing = "No valid trial has a workload with several batch sizes and prompt lengths."
    if sweep is None:
        return blank(width, nothing)
    rows = sweep.rows(tables.summary).filter((pl.col("metric") == "wall_s") & pl.col("ratio").is_not_null())
    rows = rows.filter(pl.col("pass") == hit_shown(rows))
    have = set(rows["setup"])
    labels = setup_labels(tables, label_width(width))
    names = [setup for setup in labels if setup in have]
    if not names:
        return blank(width, "No block has both the baseline and another setup in this grid.")
    hidden, names = len(names) - MOST_SETUPS, names[:MOST_SETUPS]
    titles = tables.titles()
    across = min(len(names), 2 if width >= WIDE else 1)
    down = -(-len(names) // across)
    height = _CELL * len(sweep.levels)
    missing = [titles[name] for name in labels if name not in have and name != tables.baseline]
    note = left_out(max(0, hidden), 0, missing)
    below = 0.22 if note else 0.0
    total = down * (_TITLE + height + _FOOT) + below
    panel = (width - across * (_LEFT + 0.1)) / across
    with style():
        figure = Figure(figsize=(width, total))
        for place, setup in enumerate(names):
            x = _LEFT + place % across * (panel + _LEFT + 0.1)
            y = total - place // across * (_TITLE + height + _FOOT) - _TITLE - height
            axis = figure.add_axes((x / width, y / total, panel / width, height / total))
            figure.text(
                (x - _LEFT + 0.06) / width,
                (y + height + 0.07) / total,
                labels[setup],
                fontsize=TEXT,
                weight="bold",
            )
            mine = rows.filter(pl.col("setup") == setup).select("concurrency", "prompt_length", "ratio").iter_rows()
            _map(axis, sweep, {(level, length): ratio for level, length, ratio in mine})
        if note:
            figure.text(1 - 0.06 / width, 0.06 / total, note, ha="right", fontsize=SMALL, color=COLOURS["muted"])
        return figure


def _map(axis: Axes, sweep: Sweep, ratios: dict[tuple[int, int], float]) -> None:
    """One setup's cells: batches upwards, lengths to the right."""
    axis.set_xlim(0, len(sweep.lengths))
    axis.set_ylim(0, len(sweep.levels))
    for line, level in enumerate(sweep.levels):
        for column, length in enumerate(sweep.lengths):
            ratio = ratios.get((level, length))
            if ratio is None:
                blank_cell = Rectangle(
                    (column, line), 1, 1, fc=COLOURS["paper"], ec=COLOURS["rule"], lw=0.6, hatch="////"
                )
                axis.add_patch(blank_cell)
                continue
            shade = 0.5 + max(-_LIMIT, min(_LIMIT, log2(ratio))) / (2 * _LIMIT) if ratio > 0 else 0.0
            axis.add_patch(Rectangle((column, line), 1, 1, fc=_HEAT(shade), ec=COLOURS["paper"], lw=1.0))
            axis.text(column + 0.5, line + 0.5, _short(ratio), ha="center", va="center", fontsize=SMALL, color=_ON_CELL)
    axis.set_xticks([column + 0.5 for column in range(len(sweep.lengths))], [f"{each:,}" for each in sweep.lengths])
    axis.set_yticks([line + 0.5 for line in range(len(sweep.levels))], [str(each) for each in sweep.levels])
    axis.tick_params(length=0, pad=3, labelsize=SMALL, labelcolor=COLOURS["muted"])
    axis.spines[:].set_visible(False)
    axis.set_xlabel("prompt tokens", loc="left")
    axis.set_ylabel("batch", loc="bottom")


def _short(ratio: float) -> str:
    """Two decimals below 10, one below 100: what a cell has room for."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:,.0f}"
