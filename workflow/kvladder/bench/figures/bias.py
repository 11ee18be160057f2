"""How far each client's TTFT and gaps are off."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvladder.bench.figures.clients import MARKS, over_concurrency
from kvladder.bench.tables import BenchTables
from kvladder.figures.parts.style import WIDE

NAME = "bias"
TITLE = "What clients add to the truth"
CAPTION = (
    "Size of the TTFT's bias (what the client reports, less what the server's log proves) and of the error of gaps "
    "between tokens, in milliseconds, by requests in flight; both axes are logarithmic. "
    f"First waves are left out. {MARKS}"
)


def draw(tables: BenchTables, width: float = WIDE) -> Figure:
    """Median and 99th percentile of bias, and the 99th of gap errors, from ``cells``, in milliseconds."""
    columns = {
        "ttft_bias_p50_ms": "TTFT bias, p50, ms",
        "ttft_bias_p99_ms": "TTFT bias, p99, ms",
        "gap_error_p99_ms": "Gap error, p99, ms",
    }
    return over_concurrency(tables, width, columns)
