"""What each client costs."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvladder.bench.figures.clients import MARKS, over_concurrency
from kvladder.bench.tables import BenchTables
from kvladder.figures.parts.style import WIDE

NAME = "cost"
TITLE = "CPU and memory"
CAPTION = (
    "CPU seconds per 1,000 requests, first arrival to last write (this project's client: of its pass), and "
    "peak memory of all of a client's processes; pages that processes share count in each of them. Both axes are "
    f"logarithmic. {MARKS}"
)


def draw(tables: BenchTables, width: float = WIDE) -> Figure:
    """``cpu_s_per_1000`` and ``peak_rss_mb`` of ``cells``."""
    columns = {"cpu_s_per_1000": "CPU s per 1,000 requests", "peak_rss_mb": "Peak memory, MB"}
    return over_concurrency(tables, width, columns)
