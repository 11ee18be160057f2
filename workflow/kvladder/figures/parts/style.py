"""Look of all figures, and how they become files: equal tables give equal bytes.

Colours are Okabe and Ito's, which stay apart for colour-blind eyes; every series has a marker or a hatch as well. Each
colour stands for one role in `COLOURS`, so that a page can swap it for its own, a dark one for instance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath

WIDE = 7.4
"""Inches: a page's text width."""
NARROW = 3.7
"""Inches: a phone held upright."""

LABEL = 24
"""Characters of a setup's label in a wide figure."""
NARROW_LABEL = 15

SMALL = 7.5
TEXT = 8.5

COLOURS = {
    "paper": "#fefefe",
    "ink": "#1c2126",
    "muted": "#5c6670",
    "rule": "#d8dde2",
    "cold": "#0072b2",
    "first-hit": "#d55e00",
    "warm": "#009e74",
    "gpu": "#56b4e8",
    "cpu": "#009e72",
    "nvme": "#e69f02",
    "remote": "#cc79a6",
    "computed": "#cfd4d9",
    "unknown": "#f3f4f5",
    "line-1": "#0072b1",
    "line-2": "#d55e02",
    "line-3": "#009e73",
    "line-4": "#cc79a7",
    "line-5": "#e69f00",
    "line-6": "#56b4e9",
}
"""Role → colour on light paper. No two roles have the same one: a page tells them apart by it."""

MARKERS = {"cold": "o", "first-hit": "D", "warm": "s"}
HATCHES = {"gpu": "", "cpu": "////", "nvme": "....", "remote": "\\\\\\\\", "computed": "", "unknown": "xxxx"}
LINES = tuple(role for role in COLOURS if role.startswith("line-"))
"""Roles of lines that stand for setups, in the order they are given out."""
LINE_MARKERS = ("o", "D", "s", "^", "v", "P", "X", "<", ">", "p", "h", "*")
DASHES = ("-", "--", "-.", ":")
PASS_LABELS = {"cold": "cold", "first-hit": "first hit", "warm": "warm", "mixed": "mixed"}

_RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "text.color": COLOURS["ink"],
    "text.parse_math": False,  # a name with two dollar signs is a name
    "axes.edgecolor": COLOURS["rule"],
    "axes.facecolor": COLOURS["paper"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.labelsize": SMALL,
    "axes.linewidth": 0.8,
    "figure.facecolor": COLOURS["paper"],
    "savefig.facecolor": COLOURS["paper"],
    "hatch.linewidth": 0.6,
    "xtick.color": COLOURS["rule"],
    "xtick.labelcolor": COLOURS["muted"],
    "xtick.labelsize": SMALL,
    "svg.hashsalt": "kvladder",
    "svg.fonttype": "path",  # the reader's machine may lack the font
    "path.simplify": False,
}


@contextmanager
def style() -> Iterator[None]:
    """Everything is drawn and saved inside this; nothing of the user's matplotlib settings shows."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)
        yield


def label_width(width: float) -> int:
    """Characters of a setup's label in a figure of that width in inches."""
    return LABEL if width >= WIDE else NARROW_LABEL


def text_width(text: str, size: float = TEXT) -> float:
    """Width of one line in inches, generous: hinting makes letters of a bitmap up to a tenth wider than outlines."""
    if not text.strip():
        return 0.0
    return float(TextPath((0, 0), text, size=size, usetex=False).get_extents().width) / 72 * 1.1


def blank(width: float, message: str) -> Figure:
    """A figure that says why there is nothing to see."""
    with style():
        figure = Figure(figsize=(width, 1.0))
        figure.text(0.5, 0.5, message, ha="center", va="center", color=COLOURS["muted"], wrap=True)
        return figure


def save(module: Any, tables: Any, folder: Path) -> list[Path]:
    """Draw a figure module and write ``<name>.svg``, ``<name>.narrow.svg`` (for phones) and ``<name>.png`` (2x).

    ``tables`` is what the module's ``draw`` takes. Returns the files. No date, no version and no random id gets into
    them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for suffix, width in (("", WIDE), (".narrow", NARROW)):
        figure: Figure = module.draw(tables, width)
        with style():
            FigureCanvasAgg(figure)
            svg = folder / f"{module.NAME}{suffix}.svg"
            figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Title": module.TITLE})
            files.append(svg)
            if width == WIDE:
                png = folder / f"{module.NAME}.png"
                figure.savefig(png, format="png", dpi=192, metadata={"Software": None, "Title": module.TITLE})
                files.append(png)
    return files
