"""Wall time of passes that have several requests."""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure

from kvladder.figures.parts.lanes import dots, not_only_sweeps
from kvladder.figures.parts.style import WIDE
from kvladder.tables.model import Tables

NAME = "burst_wall"
TITLE = "Wall time of a burst"
CAPTION = (
    "From the first request sent to the last one answered, for workloads that keep several requests in flight. One dot "
    "is one trial; the upright bar and the number are the median over trials, the line goes from the smallest to the "
    "largest. Valid trials only."
)
CATEGORY = "Throughput"


def applies(tables: Tables) -> bool:
    """Whether some workload is no sweep."""
    return not_only_sweeps(tables)


def draw(tables: Tables, width: float = WIDE) -> Figure:
    """Dots for each trial's wall time in seconds, from ``metrics``; a workload with one request at a time has none."""
    busy = tables.passes.filter((pl.col("concurrency") > 1) & (pl.col("requests") > 1))
    several = set(busy.select("suite", "workload").unique().iter_rows())
    nothing = "No valid trial has a pass with several requests in flight."
    return dots(tables, width, "wall_s", lambda suite, workload: (suite, workload) in several, nothing)
