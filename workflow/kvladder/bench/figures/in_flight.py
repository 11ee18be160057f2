"""How many requests each client really keeps in flight."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvladder.bench.figures.clients import MARKS, over_concurrency, percent
from kvladder.bench.tables import BenchTables
from kvladder.figures.parts.style import WIDE

NAME = "in_flight"
TITLE = "Concurrency held"
CAPTION = (
    "Mean number of requests in flight, as the server saw them, in percent of what was asked: from the arrival that "
    f"fills the last slot to the last arrival. {MARKS}"
)


def draw(tables: BenchTables, width: float = WIDE) -> Figure:
    """``held_share`` of ``cells`` in percent."""
    return over_concurrency(tables, width, {"held_share": "Held, % of asked"}, scale=percent, factor=100)
