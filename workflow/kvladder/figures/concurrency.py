"""Time to first token and throughput over the number of requests in flight."""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure

from kvladder.figures.parts.lines import doubling, logarithmic, panels
from kvladder.figures.parts.style import PASS_LABELS, WIDE, blank, style
from kvladder.tables.model import PASSES, Tables
from kvladder.tables.sweeps import Sweep, hit_shown, sweeps

NAME = "concurrency"
TITLE = "Requests in flight"
CAPTION = (
    "Time to first token and prompt tokens per second (computed or loaded, over the pass's wall time) at each number "
    "of requests in flight, for prompts of one length. Points are medians over trials, upright bars go from the "
    "smallest to the largest; both axes are logarithmic. Valid trials only."
)
CATEGORY = "Throughput"

_METRICS = {"ttft_s": "TTFT in seconds", "prompt_tokens_per_s": "Prompt tokens per second"}


def applies(tables: Tables) -> bool:
    """Whether a workload was sent at several levels of one length."""
    return _sweep(tables) is not None


def _sweep(tables: Tables) -> Sweep | None:
    """The first sweep over levels alone: one over lengths too is a grid, and has a figure of its own."""
    return next(
        (each for each in sweeps(tables.summary) if len(each.levels) > 1 and len(each.cells) == len(each.levels)), None
    )


def draw(tables: Tables, width: float = WIDE) -> Figure:
    """Medians of ``ttft_s`` and ``prompt_tokens_per_s`` from ``summary`` over ``concurrency``, a panel a pass."""
    sweep = _sweep(tables)
    if sweep is None:
        return blank(width, "No valid trial has a workload with several numbers of requests in flight.")
    rows = sweep.rows(tables.summary).filter(pl.col("metric").is_in(list(_METRICS)))
    shown = [name for name in PASSES if name in ("cold", hit_shown(rows)) and name in set(rows["pass"])]
    spots = [(metric, name) for metric in _METRICS for name in shown]
    with style():
        titles = [f"{_METRICS[metric]}, {PASS_LABELS[name]}" for metric, name in spots]
        frame = panels(tables, width, rows["setup"].unique(), titles, expected=tables.titles())
        for (metric, name), axis in zip(spots, frame.axes, strict=True):
            here = rows.filter((pl.col("metric") == metric) & (pl.col("pass") == name))
            for line in frame.lines:
                mine = here.filter(pl.col("setup") == line.name).sort("concurrency")
                if not mine.height:
                    continue
                levels, middle = mine["concurrency"].to_list(), mine["median"].to_list()
                axis.plot(levels, middle, **line.look)
                axis.vlines(levels, mine["min"].to_list(), mine["max"].to_list(), color=line.look["color"], lw=0.8)
            doubling(axis, sweep.levels, "requests in flight")
        for start in range(0, len(spots), len(shown)):
            logarithmic(frame.axes[start : start + len(shown)])
        return frame.figure
