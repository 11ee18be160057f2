"""Where the KV of the prompts came from."""

from __future__ import annotations

from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvladder.config.base import TIERS
from kvladder.figures.parts.lanes import LANE, not_only_sweeps, panels
from kvladder.figures.parts.style import COLOURS, HATCHES, SMALL, WIDE, blank, style, text_width
from kvladder.tables.model import PASSES, Tables

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
        lanes = {(row["suite"], row["workload"], row["setup"], row["pass"]): row for row in sums.iter_rows(named=True)}
        for (suite, workload), axis in grid.panels:
            axis.set_xlim(0, 100)
            axis.set_xticks([0, 50, 100])
            axis.set_xlabel("% of prompt tokens", loc="left")
            for row in grid.rows:
                for place, name in enumerate(PASSES):
                    tokens = lanes.get((suite, workload, row.setup, name))
                    if tokens is not None:
                        _lane(axis, row.lane(place), {tier: tokens[f"tokens_{tier}"] or 0 for tier in TIERS})
        return grid.figure


def _fill(tier: str) -> dict[str, Any]:
    """Colour and hatch of a source; the hatch is cut out of the colour."""
    edge = COLOURS["muted" if tier == "unknown" else "paper"]
    return {"fc": COLOURS[tier], "ec": edge, "hatch": HATCHES[tier], "lw": 0.6}


def _lane(axis: Axes, y: float, tokens: dict[str, int]) -> None:
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
    text = f"{100 * (known - tokens['computed']) / total:.3g} %" if known else "–"
    axis.annotate(
        text, (100, y), (5, 0), textcoords="offset points", va="center", fontsize=SMALL, annotation_clip=False
    )
