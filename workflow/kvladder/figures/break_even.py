"""From which prompt length loading beats computing."""

from __future__ import annotations

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvladder.figures.parts.lines import Line, doubling, logarithmic, panels
from kvladder.figures.parts.style import COLOURS, PASS_LABELS, SMALL, WIDE, blank, style, text_width
from kvladder.tables.break_even import HITS, hit_row
from kvladder.tables.model import Tables
from kvladder.tables.sweeps import Sweep, sweeps

NAME = "break_even"
TITLE = "Break-even: loading against computing"
CAPTION = (
    "Time to first token of a hit ÷ that of the baseline, which computes the same prompt, over the prompt's length, "
    "one request at a time. Below the line at 1 loading is faster. A ring marks the length from which it is, "
    "interpolated between measured lengths; a curve without a ring is on one side at every measured length. Medians of "
    "ratios paired in blocks; both axes are logarithmic. Valid trials only."
)
CATEGORY = "Latency"


def applies(tables: Tables) -> bool:
    """Whether there is a curve: a tier's hits at several lengths."""
    return tables.break_even.height > 0


def _sweep(tables: Tables) -> Sweep | None:
    """The first sweep that the table ``break_even`` speaks of."""
    known = set(tables.break_even.select("suite", "workload").iter_rows())
    return next((each for each in sweeps(tables.summary) if (each.suite, each.workload) in known), None)


def draw(tables: Tables, width: float = WIDE) -> Figure:
    """Median paired ratio of ``ttft_s`` from ``summary`` over ``prompt_length``, rings from ``break_even``."""
    sweep = _sweep(tables)
    if sweep is None:
        return blank(width, "No valid trial has hits of one request at a time at several prompt lengths.")
    found = tables.break_even.filter((pl.col("suite") == sweep.suite) & (pl.col("workload") == sweep.workload))
    rows = sweep.rows(tables.summary).filter(
        (pl.col("metric") == "ttft_s")
        & (pl.col("concurrency") == 1)
        & pl.col("setup").is_in(found["setup"].to_list())
        & pl.col("ratio").is_not_null()
    )
    passes = [name for name in HITS if name in set(found["pass"])]
    with style():
        titles = [f"TTFT ÷ computing, {PASS_LABELS[name]}" for name in passes]
        frame = panels(tables, width, rows["setup"].unique(), titles, expected=tables.tiers())
        for name, axis in zip(passes, frame.axes, strict=True):
            axis.axhline(1.0, color=COLOURS["ink"], lw=1.0, zorder=1)
            for line in frame.lines:
                cells = hit_row(sweep, tables.passes, line.name, name)
                curve = rows.filter(
                    (pl.col("pass") == name)
                    & (pl.col("setup") == line.name)
                    & pl.col("workload").is_in(list(cells.values()))
                ).sort("prompt_length")
                axis.plot(curve["prompt_length"].to_list(), curve["ratio"].to_list(), zorder=2, **line.look)
            doubling(axis, sweep.lengths, "prompt tokens")
        logarithmic(frame.axes)
        for name, axis in zip(passes, frame.axes, strict=True):
            marks = found.filter((pl.col("pass") == name) & pl.col("tokens").is_not_null()).sort("tokens")
            _rings(axis, frame.lines, dict(marks.select("setup", "tokens").iter_rows()))
        return frame.figure


def _rings(axis: Axes, lines: list[Line], tokens: dict[str, float]) -> None:
    """A ring on the line at 1 for each setup, its length written above or, where that is taken, below."""
    looks = {line.name: line.look for line in lines}
    inches = axis.get_position().width * axis.figure.get_figwidth()  # type: ignore[union-attr]
    ends = {1: float("-inf"), -1: float("-inf")}
    for setup, length in tokens.items():
        if setup not in looks:
            continue
        axis.plot([length], [1.0], ls="", marker="o", ms=9, mfc="none", mec=looks[setup]["color"], mew=1.5, zorder=3)
        text = f"{length:,.0f}"
        middle = float(axis.transAxes.inverted().transform(axis.transData.transform((length, 1.0)))[0]) * inches
        half = text_width(text, SMALL) / 2 + 0.03
        side = next((each for each in ends if middle - half > ends[each]), None)
        if side is None or middle + half > inches + 0.1:
            continue  # no room: the number is in the report's table
        ends[side] = middle + half
        axis.annotate(
            text,
            (length, 1.0),
            (0, 8 * side),
            textcoords="offset points",
            ha="center",
            va="bottom" if side > 0 else "top",
            fontsize=SMALL,
            color=COLOURS["ink"],
        )
