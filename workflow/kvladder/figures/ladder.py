"""Throughput, time to first token and hits of conversations over their working set: where does each tier give out?"""

from __future__ import annotations

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvladder.figures.parts.lines import doubling, logarithmic, panels
from kvladder.figures.parts.style import COLOURS, SMALL, WIDE, blank, style
from kvladder.tables.ladder import by_working_set, shown
from kvladder.tables.model import Tables

NAME = "ladder"
TITLE = "Working set"
CAPTION = (
    "Conversations that take turns, over their working set (conversations open at a time × tokens of a whole one): "
    "prompt and output tokens per second and time to first token in the steady state, and the share of all prompt "
    "tokens that was hit, beside what the hit oracle predicts (crosses). Points are medians over trials, upright bars "
    "go from the smallest to the largest; a hollow point has no steady state and is the whole pass. Dashed: how much "
    "the device and host memory hold. Short bars in the last panel: the share that tiers without limits would give. "
    "Valid trials only."
)
CATEGORY = "Throughput"

_METRICS = {
    "tokens_per_s": "Tokens per second",
    "ttft_median_s": "TTFT in seconds",
    "hit_share": "Share of prompt tokens hit",
}


def applies(tables: Tables) -> bool:
    """Whether conversations took turns in a valid trial."""
    return tables.ladder.height > 0


def draw(tables: Tables, width: float = WIDE) -> Figure:
    """Medians over trials from ``ladder``, of the order policy that was run first, over ``working_set_tokens``."""
    rows = by_working_set(tables, list(_METRICS))
    if not rows.height:
        return blank(width, "No valid trial has conversations that take turns.")
    sizes = rows["working_set_tokens"].unique().sort().to_list()
    with style():
        frame = panels(tables, width, rows["setup"].unique(), list(_METRICS.values()), expected=tables.titles())
        for metric, axis in zip(_METRICS, frame.axes, strict=True):
            for line in frame.lines:
                mine = rows.filter(pl.col("setup") == line.name).sort("working_set_tokens")
                mine = mine.drop_nulls(metric)
                x = mine["working_set_tokens"].to_list()
                axis.plot(x, mine[metric].to_list(), **line.look)
                axis.vlines(x, mine[f"{metric}_min"], mine[f"{metric}_max"], color=line.look["color"], lw=0.8)
                loose = mine.filter(~pl.col("steady"))
                if metric != "hit_share":
                    hollow = {**line.look, "ls": "", "mfc": COLOURS["paper"], "mec": line.look["color"], "mew": 1.0}
                    axis.plot(loose["working_set_tokens"].to_list(), loose[metric].to_list(), **hollow)
                else:
                    told = mine.drop_nulls("predicted_share")
                    cross = {"color": line.look["color"], "marker": "x", "ls": "", "ms": 5}
                    axis.plot(told["working_set_tokens"].to_list(), told["predicted_share"].to_list(), **cross)
            doubling(axis, sizes, "working set in tokens")
            _capacities(axis, tables)
        logarithmic(frame.axes[:1])
        logarithmic(frame.axes[1:2])
        _share_axis(frame.axes[2], rows)
        return frame.figure


def _share_axis(axis: Axes, rows: pl.DataFrame) -> None:
    axis.set_ylim(-0.03, 1.0)
    ceilings = rows.drop_nulls("ceiling_share").group_by("working_set_tokens").agg(pl.col("ceiling_share").max())
    for size, share in ceilings.sort("working_set_tokens").iter_rows():
        axis.plot([size / 1.06, size * 1.06], [share, share], color=COLOURS["ink"], lw=1.0)


def _capacities(axis: Axes, tables: Tables) -> None:
    """How much each tier holds, where that lies inside the axis."""
    mine = shown(tables)
    low, high = axis.get_xlim()
    for tier, label in (("gpu", "device"), ("cpu", "host")):
        held = mine[f"capacity_{tier}_tokens"].max()
        if isinstance(held, int) and low < held < high:
            axis.axvline(held, color=COLOURS["muted"], ls="--", lw=0.8)
            axis.annotate(
                label,
                (held, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(2, -8),
                textcoords="offset points",
                fontsize=SMALL,
                color=COLOURS["muted"],
            )
