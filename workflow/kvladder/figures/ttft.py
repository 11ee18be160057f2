"""Time to first token by setup and pass."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvladder.figures.parts.lanes import dots, not_only_sweeps
from kvladder.figures.parts.style import WIDE
from kvladder.tables.model import Tables

NAME = "ttft"
TITLE = "Time to first token"
CAPTION = (
    "Time to first token by setup: the cold pass computes and stores, the first hit is the first load of what was "
    "stored, warm are later loads. One dot is one trial (the median over its requests); the upright bar and the number "
    "are the median over trials, the line goes from the smallest to the largest. Valid trials only."
)
CATEGORY = "Latency"


def applies(tables: Tables) -> bool:
    """Whether some workload is no sweep."""
    return not_only_sweeps(tables)


def draw(tables: Tables, width: float = WIDE) -> Figure:
    """Dots for each trial's median TTFT in seconds, from ``metrics``."""
    return dots(tables, width, "ttft_s", lambda suite, workload: True, "No valid trial has a time to first token.")
