"""Where the TTFT of each pass went, part by part, for all setups."""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvladder.figures.parts.style import COLOURS, PASS_LABELS, SMALL, WIDE, blank, style
from kvladder.timeline.decompose import PARTS
from kvladder.timeline.tables import Tables
from kvladder.timeline.words import LABELS

NAME = "decomposition"
TITLE = "Where the time to the first token goes"
CAPTION = (
    "Mean over the requests of a pass, under the profiler. Parts and the unexplained remainder add up to the TTFT; "
    "where several things go on at once the time counts once. A part that isn't known is not drawn: its time is in "
    "the wait for the load."
)
CATEGORY = "Timelines"

FILLS = {
    "client_http": ("muted", ""),
    "queue": ("computed", ""),
    "scheduler": ("rule", "----"),
    "lookup": ("line-4", ""),
    "load_wait": ("line-5", ""),
    "transfer": ("line-3", ""),
    "staging": ("line-3", "////"),
    "recompute": ("line-1", ""),
    "sampling": ("line-6", ""),
    "next_step": ("line-2", "////"),
    "remainder": ("paper", "xxxx"),
}
"""Colour's role and hatch of each part."""


def draw(tables: Tables, width: float = WIDE) -> Figure:
    """One panel a workload, one stacked bar a setup and pass."""
    parts = [*PARTS, "remainder"]
    data = tables.decomposition.filter(pl.col("setup").is_in(tables.setups), pl.col("problem").is_null())
    if not data.height:
        return blank(width, "No capture could be taken apart.")
    columns = [pl.col(f"{part}_ns").mean() / 1e6 for part in parts]
    means = data.group_by("workload", "pass", "round", "setup", maintain_order=True).agg(
        *columns, pl.col("ttft_ns").mean() / 1e6
    )
    workloads = means["workload"].unique(maintain_order=True).to_list()
    lanes = {name: means.filter(pl.col("workload") == name).sort("round") for name in workloads}
    rows = sum(frame.height for frame in lanes.values())
    with style():
        legend_rows = -(-len(parts) // (3 if width >= WIDE else 1))
        height = 0.26 * rows + 0.55 * len(workloads) + 0.2 * legend_rows + 0.2
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(
            len(workloads), 1, squeeze=False, height_ratios=[frame.height + 1 for frame in lanes.values()]
        )
        for axis, (name, frame) in zip(axes[:, 0], lanes.items(), strict=True):
            left = [0.0] * frame.height
            for part in parts:
                values = [value or 0.0 for value in frame[f"{part}_ns"].to_list()]
                role, hatch = FILLS[part]
                shown = [place for place, value in enumerate(values) if value]
                axis.barh(
                    shown,
                    [values[place] for place in shown],
                    left=[left[place] for place in shown],
                    height=0.7,
                    color=COLOURS[role],
                    hatch=hatch,
                    edgecolor=COLOURS["ink"],
                    linewidth=0.3,
                )
                left = [one + value for one, value in zip(left, values, strict=True)]
            axis.set_yticks(
                range(frame.height),
                [f"{row['setup']}, {PASS_LABELS[row['pass']]}" for row in frame.iter_rows(named=True)],
                fontsize=SMALL,
            )
            axis.invert_yaxis()
            axis.set_title(name, loc="left", fontsize=SMALL)
            axis.grid(axis="x", color=COLOURS["rule"], lw=0.5)
            axis.set_axisbelow(True)
        axes[-1, 0].set_xlabel("TTFT, ms")
        figure.legend(
            handles=[
                Patch(fc=COLOURS[role], hatch=hatch, ec=COLOURS["ink"], lw=0.3, label=LABELS.get(part, "unexplained"))
                for part, (role, hatch) in FILLS.items()
            ],
            loc="outside lower center",
            ncols=3 if width >= WIDE else 1,
            frameon=False,
            fontsize=SMALL,
        )
        return figure
