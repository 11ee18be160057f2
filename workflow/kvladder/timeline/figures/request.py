"""One hit in every setup, on one time axis: what the network, the host, the device and its copy engines did."""

from __future__ import annotations

from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvladder.counters.reading import ENGINE
from kvladder.figures.parts.style import COLOURS, PASS_LABELS, SMALL, WIDE, blank, style
from kvladder.timeline.model import union
from kvladder.timeline.tables import Tables
from kvladder.timeline.words import hit_means

NAME = "request"
TITLE = "One hit, from request to first token"
CAPTION = (
    "The same request in every setup, on one axis from the moment its bytes went to the socket to its first token "
    "(line). Network: HTTP on either side, and calls that another process works on. CPU: scheduler, lookup, worker, "
    "copies by the host. Compute: kernels; the worker's steps where no device was recorded. Copy: copies to and from "
    "the device."
)
CATEGORY = "Timelines"

FINEST = 2000
"""Parts of the axis: what is closer than one of them is drawn as one, or thousands of kernels would be as many bars."""

LANES = ("network", "CPU", "compute", "copy")


def draw(tables: Tables, width: float = WIDE) -> Figure:
    """One panel a setup: four lanes."""
    chosen = requests(tables)
    if not chosen:
        return blank(width, "No capture has a hit to show.")
    longest = max(row["ttft_ns"] for row in chosen) / 1e6
    with style():
        figure = Figure(figsize=(width, 0.95 * len(chosen) + 0.9), layout="constrained")
        axes = figure.subplots(len(chosen), 1, squeeze=False, sharex=True)
        for axis, row in zip(axes[:, 0], chosen, strict=True):
            events = tables.events.filter(
                pl.col("setup") == row["setup"],
                pl.col("end_ns") >= row["send_ns"],
                pl.col("start_ns") <= row["send_ns"] + row["ttft_ns"],
            )
            device = bool(tables.captures.filter(pl.col("setup") == row["setup"])["device"].item())
            _panel(axis, row, events, longest / FINEST, device=device)
            axis.set_xlim(0, longest * 1.02)
        axes[-1, 0].set_xlabel("ms since the request was sent")
        legend = {"HTTP, RPC": "muted", "scheduler, worker": "line-5", "lookup": "line-4"}
        legend |= {"compute": "line-1", "copy": "line-3"}
        figure.legend(
            handles=[Patch(fc=COLOURS[role], label=text) for text, role in legend.items()],
            loc="outside lower center",
            ncols=len(legend) if width >= WIDE else 3,
            frameon=False,
            fontsize=SMALL,
        )
        return figure


def requests(tables: Tables) -> list[dict[str, Any]]:
    """The request of each setup that is shown: the latest hit of the first workload that has hits, first sent; rows of
    ``decomposition``, the fastest setup first."""
    hits = hit_means(tables)
    if not hits.height:
        return []
    workload = hits["workload"].item(0)
    found = []
    for setup, name, number in hits.filter(pl.col("workload") == workload).select("setup", "pass", "round").iter_rows():
        rows = tables.decomposition.filter(
            pl.col("setup") == setup,
            pl.col("workload") == workload,
            pl.col("pass") == name,
            pl.col("round") == number,
        )
        found.append(rows.sort("send_ns").row(0, named=True))
    return sorted(found, key=lambda row: row["ttft_ns"])


def _panel(axis: Axes, row: dict[str, Any], events: pl.DataFrame, finest: float, *, device: bool) -> None:
    """Draw one request; ``finest`` is the shortest gap that is drawn, in ms."""

    def bars(lane: str, chosen: pl.DataFrame, role: str) -> None:
        last = row["send_ns"] + row["ttft_ns"]
        gap = round(finest * 1e6)
        times = chosen.select("start_ns", "end_ns").iter_rows()
        joined = union((start, max(min(end, last), start) + gap) for start, end in times)
        spans = [((start - row["send_ns"]) / 1e6, (end - gap - start) / 1e6) for start, end in joined]
        colour = COLOURS[role]
        axis.broken_barh(spans, (LANES.index(lane) - 0.36, 0.72), fc=colour, ec=colour, lw=0.4)

    kind, name = pl.col("kind"), pl.col("name")
    bars("network", events.filter(kind == "rpc", pl.col("process") != ENGINE), "muted")
    first = events.filter(name == "arrived")["start_ns"].to_list()
    outputs = events.filter(name == "outputs")["start_ns"].to_list()
    ends = [row["send_ns"], first[0]] if first else []
    ends += [outputs[0], row["send_ns"] + row["ttft_ns"]] if outputs else []
    pairs = pl.DataFrame(
        {"start_ns": ends[::2], "end_ns": ends[1::2]}, schema={"start_ns": pl.Int64, "end_ns": pl.Int64}
    )
    bars("network", pairs, "muted")
    bars("CPU", events.filter(name.is_in(["schedule", "update", "execute", "sample"])), "line-5")
    bars("CPU", events.filter(kind == "lookup"), "line-4")
    bars("CPU", events.filter(kind == "cpu_copy"), "line-3")
    computing = kind == "kernel" if device else (kind == "step") & (pl.col("requests") != "")
    bars("compute", events.filter(computing), "line-1")
    bars("copy", events.filter(kind.is_in(["h2d", "d2h", "d2d"])), "line-3")
    axis.axvline(row["ttft_ns"] / 1e6, color=COLOURS["ink"], lw=1)
    axis.set_yticks(range(len(LANES)), LANES, fontsize=SMALL)
    axis.set_ylim(len(LANES) - 0.5, -0.5)
    axis.grid(axis="x", color=COLOURS["rule"], lw=0.5)
    axis.set_axisbelow(True)
    title = f"{row['setup']}: {row['workload']}, {PASS_LABELS[row['pass']]}, {row['ttft_ns'] / 1e6:.1f} ms"
    axis.set_title(title, loc="left", fontsize=SMALL)
