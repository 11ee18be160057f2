"""How close each setup's transfers come to what its link can do."""

from __future__ import annotations

from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvladder.figures.parts.lanes import LANE, beside_share, panels, shares
from kvladder.figures.parts.style import COLOURS, PASS_LABELS, SMALL, WIDE, blank, style, text_width
from kvladder.tables.labels import workload_order
from kvladder.tables.limits import shown
from kvladder.tables.model import CELL, PASSES, Tables

NAME = "percent_of_roofline"
TITLE = "Percent of roofline"
CAPTION = (
    "Transfer rate as percent of what the setup's own link was measured to do on that host: stores in the cold pass, "
    "loads in the others. Filled: the engine's bytes over the engine's own transfer time. Hatched, and marked ≥: bytes "
    "over the time to the first tokens, all that is known where the engine doesn't time its copies; the rate itself is "
    "higher. A lane without a bar: no rate, or no roofline. Medians over valid trials."
)
CATEGORY = "Limits"

_HATCH = "////"


def applies(tables: Tables) -> bool:
    """Whether a rate is known of a workload that has a panel; True without any rate, as the figure then says so."""
    known = _known(tables)
    return bool(_workloads(tables, known)) or not known.height


def _known(tables: Tables) -> pl.DataFrame:
    return shown(tables.limits).filter(pl.col("percent").is_not_null())


def _workloads(tables: Tables, known: pl.DataFrame) -> list[tuple[str, str]]:
    """Not the cells of sweeps, of which there are dozens, nor pools, whose pass has no lane; the table has both."""
    data = known.filter(pl.col("pass").is_in(PASSES))
    return [pair for pair in workload_order(tables, data) if CELL not in pair[1]]


def draw(tables: Tables, width: float = WIDE) -> Figure:
    """One bar a setup, workload and pass, 0–100 %, of ``limits``; the engine's own rate where there is one."""
    data = _known(tables)
    workloads = _workloads(tables, data)
    with style():
        legend = [Patch(**_fill(name, "engine"), label=f"{PASS_LABELS[name]}: {_way(name)}") for name in PASSES]
        legend.append(Patch(**_fill("warm", "ttft"), label="lower bound"))
        room = text_width(_text(100.0, "ttft"), SMALL) + 0.1
        grid = panels(tables, width, data, legend if data.height else [], side=room, lanes=True, workloads=workloads)
        if grid is None:
            return blank(width, "No valid trial has a transfer rate and a roofline to compare it with.")
        for _, axis in grid.panels:
            axis.grid(axis="x", color=COLOURS["rule"], lw=0.5)
            axis.set_axisbelow(True)
        shares(grid, data, "% of the link's roofline", _lane)
        return grid.figure


def _way(name: str) -> str:
    return "store" if name == "cold" else "load"


def _fill(name: str, basis: str) -> dict[str, Any]:
    """A pass's colour; of a lower bound only the outline and a hatch."""
    if basis == "engine":
        return {"fc": COLOURS[name], "ec": COLOURS["paper"], "lw": 0.6}
    return {"fc": COLOURS["paper"], "ec": COLOURS[name], "hatch": _HATCH, "lw": 0.8}


def _text(percent: float, basis: str) -> str:
    return f"{'≥ ' if basis == 'ttft' else ''}{percent:.0f} %"


def _lane(axis: Axes, y: float, row: dict[str, Any]) -> None:
    axis.barh(y, row["percent"], LANE * 0.78, zorder=2, **_fill(row["pass"], row["basis"]))
    beside_share(axis, y, _text(row["percent"], row["basis"]))
