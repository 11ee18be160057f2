"""Where the KV of the prompts came from."""

from __future__ import annotations

from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvladder.config.base import TIERS
from kvladder.figures.parts.lanes import LANE, beside_share, not_only_sweeps, panels, shares
from kvladder.figures.parts.style import COLOURS, HATCHES, SMALL, WIDE, blank, style, text_width
from kvladder.tables.model import Tables

NAME = "tokens_by_source"
TITLE = "Prompt tokens by source"
CAPTION = (
    "Share of prompt tokens by where their KV came from, as the engine's own counters say. The number is the "
    "share that was not computed; a lane without a bar: the engine does not say. Valid trials only."
)
CATEGORY = "Validity"


def applies(tables: Tables) -> bool:
    """Whether some workload is no sweep."""
    return not_only_sweeps(tables)


def draw(tables: Tables, width: float = WIDE) -> Figure:
    """Stacked shares, 0–100 %, of the tokens of all valid trials of a setup, workload and pass; from ``passes``."""
    columns = [f"tokens_{tier}" for tier in TIERS]
    data = tables.passes.filter(pl.any_horizontal(pl.col(columns).is_not_null()))
    sums = data.group_by("suite", "workload", "setup", "pass").agg(pl.col(columns).sum())
    with style():
        legend = [
            Patch(**_fill(tier), label=tier)
            for tier in TIERS
            if data.height and (data[f"tokens_{tier}"].sum() or 0) > 0
        ]
        room = text_width("100.0 %", SMALL) + 0.1
        grid = panels(tables, width, data, legend, side=room, lanes=True)
        if grid is None:
            return blank(width, "No valid trial knows the source of its tokens.")
        shares(grid, sums, "% of prompt tokens", _lane)
        return grid.figure


def _fill(tier: str) -> dict[str, Any]:
    """Colour and hatch of a source; the hatch is cut out of the colour."""
    edge = COLOURS["muted" if tier == "unknown" else "paper"]
    return {"fc": COLOURS[tier], "ec": edge, "hatch": HATCHES[tier], "lw": 0.6}


def _lane(axis: Axes, y: float, row: dict[str, Any]) -> None:
    tokens = {tier: row[f"tokens_{tier}"] or 0 for tier in TIERS}
    total = sum(tokens.values())
    if not total:
        return
    start = 0.0
    for tier in TIERS:
        share = 100 * tokens[tier] / total
        if share:
            axis.barh(y, share, LANE * 0.78, start, zorder=2, **_fill(tier))
        start += share
    known = total - tokens["unknown"]
    beside_share(axis, y, f"{100 * (known - tokens['computed']) / total:.3g} %" if known else "–")
