"""Time to first token of a conversation's turns: does it grow with the conversation, or stay that of what is new?"""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvladder.figures.parts.lines import logarithmic, panels
from kvladder.figures.parts.style import WIDE, blank, style
from kvladder.tables.ladder import shown
from kvladder.tables.model import Tables

NAME = "turns"
TITLE = "Turns of a conversation"
CAPTION = (
    "Median time to first token by turn, a panel a working set (four of them at most), over requests that ended in the "
    "steady state (of the whole pass where there is none). A turn's prompt is the conversation so far; where its "
    "beginning is hit only the new part is computed. Lines are medians over trials, upright bars go from the smallest "
    "to the largest; the axis of time is logarithmic. Valid trials only."
)
CATEGORY = "Latency"

_MOST = 4
"""Working sets that are shown, the smallest and the largest among them."""


def applies(tables: Tables) -> bool:
    """Whether conversations took turns in a valid trial."""
    return tables.turns.height > 0


def draw(tables: Tables, width: float = WIDE) -> Figure:
    """Medians over trials of ``ttft_median_s`` from ``turns``, of the order policy that was run first."""
    passes = shown(tables).select("suite", "workload").unique()
    data = tables.turns.join(passes, on=["suite", "workload"])
    if not data.height:
        return blank(width, "No valid trial has conversations that take turns.")
    sizes = data["working_set_tokens"].unique().sort().to_list()
    if len(sizes) > _MOST:
        sizes = [sizes[place * (len(sizes) - 1) // (_MOST - 1)] for place in range(_MOST)]
    value = pl.col("ttft_median_s")
    rows = data.group_by("setup", "working_set_tokens", "turn").agg(
        middle=value.median(), least=value.min(), most=value.max()
    )
    with style():
        titles = [f"TTFT in seconds, {size:,} tokens" for size in sizes]
        frame = panels(tables, width, rows["setup"].unique(), titles, expected=tables.titles())
        for size, axis in zip(sizes, frame.axes, strict=True):
            for line in frame.lines:
                here = (pl.col("setup") == line.name) & (pl.col("working_set_tokens") == size)
                mine = rows.filter(here).drop_nulls("middle").sort("turn")
                turns = (mine["turn"] + 1).to_list()
                axis.plot(turns, mine["middle"].to_list(), **line.look)
                axis.vlines(turns, mine["least"], mine["most"], color=line.look["color"], lw=0.8)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.set_xlabel("turn", loc="left")
        logarithmic(frame.axes)
        return frame.figure
