"""Figures: what they show, that nothing is clipped, and that equal tables give equal bytes."""

from __future__ import annotations

import hashlib
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from table_factory import DEMO, write_judged
from trial_factory import Load

from kvladder import tables
from kvladder.config import registry
from kvladder.figures import burst_wall, tokens_by_source, ttft
from kvladder.figures.parts import style
from kvladder.figures.parts.lanes import MOST_SETUPS, seconds
from kvladder.tables import Tables

MODULES = [ttft, burst_wall, tokens_by_source]
SHORT = {"demo": {"repeat": Load(warm_rounds=1), "burst": Load(requests=4, concurrency=4, warm_rounds=1)}}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    root = tmp_path_factory.mktemp("demo")
    folders = write_judged(root, invalid=[("mooncake-store", repeat) for repeat in range(3)])
    return tables.build(folders, root / "tables", baseline="plain")


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return tables.build([], tmp_path_factory.mktemp("nothing"), baseline="plain")


def texts(figure: Figure) -> list[str]:
    return [item.get_text() for item in figure.findobj(Text) if item.get_text().strip()]


def clipped(figure: Figure) -> list[str]:
    """Texts that reach over the figure's edge by more than half a point."""
    with style.style():
        canvas = FigureCanvasAgg(figure)
        renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]
        canvas.draw()
        width, height = figure.bbox.width, figure.bbox.height
        # An axis keeps labels for ticks beyond its limits, which are never drawn.
        unseen = {
            tick.label1
            for axes in figure.axes
            for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim()))
            for tick in axis.get_major_ticks()
            if not min(limits) <= tick.get_loc() <= max(limits)  # type: ignore[no-untyped-call]
        }
        over = []
        for item in figure.findobj(Text):
            if item.get_visible() and item.get_text().strip() and item not in unseen:
                box = item.get_window_extent(renderer)
                if box.x0 < -0.7 or box.y0 < -0.7 or box.x1 > width + 0.7 or box.y1 > height + 0.7:
                    over.append(item.get_text())
        return over


def test_the_registry_lists_figures_and_no_shared_parts() -> None:
    assert {"ttft", "burst-wall", "tokens-by-source"} <= set(registry.kinds("figures"))
    for kind in registry.kinds("figures"):
        module = registry.load("figures", kind)
        assert re.fullmatch("[a-z0-9_]+", module.NAME)
        assert module.TITLE and module.CAPTION.endswith(".") and module.CATEGORY


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("width", [style.WIDE, style.NARROW])
def test_a_figure_shows_each_setup_and_clips_nothing(demo: Tables, module: Any, width: float) -> None:
    figure = module.draw(demo, width)
    shown = texts(figure)
    for setup in set(DEMO) - {"mooncake-store"}:
        assert setup in shown
    assert "no value: mooncake-store" in shown
    assert clipped(figure) == []


def test_the_median_over_trials_is_written(demo: Tables) -> None:
    row = demo.summary.filter(
        (demo.summary["setup"] == "native-host")
        & (demo.summary["workload"] == "repeat")
        & (demo.summary["metric"] == "ttft_s")
        & (demo.summary["pass"] == "first-hit")
    ).row(0, named=True)
    assert seconds(row["median"]) in texts(ttft.draw(demo))


def test_the_axis_is_logarithmic_only_where_it_has_to_be(demo: Tables, tmp_path: Path) -> None:
    assert {axis.get_xscale() for axis in ttft.draw(demo).axes} == {"log"}
    folders = write_judged(tmp_path, {"plain": DEMO["plain"], "plain-2": DEMO["plain-2"]}, repeats=2)
    level = ttft.draw(tables.build(folders, tmp_path / "tables", baseline="plain"))
    assert {axis.get_xscale() for axis in level.axes} == {"linear"}
    assert {axis.get_xlim()[0] for axis in level.axes} == {0.0}


def test_a_single_request_has_no_burst(tmp_path: Path) -> None:
    folders = write_judged(tmp_path, {"plain": DEMO["plain"]}, repeats=1, suites={"demo": {"repeat": Load()}})
    built = tables.build(folders, tmp_path / "tables", baseline="plain")
    assert "several requests" in texts(burst_wall.draw(built))[0]


@pytest.mark.parametrize("module", MODULES)
def test_without_valid_trials_a_figure_says_so(nothing: Tables, module: Any) -> None:
    assert texts(module.draw(nothing))[0].startswith("No valid trial")


def files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_equal_tables_give_equal_bytes(demo: Tables, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        for module in MODULES:
            style.save(module, demo, tmp_path / folder)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert len(files(tmp_path / "a")) == 3 * len(MODULES)
    for path in (tmp_path / "a").glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        ET.fromstring(text)
        assert "dc:date" not in text


def test_colour_is_never_the_only_code() -> None:
    assert len(set(style.COLOURS.values())) == len(style.COLOURS)
    assert len(set(style.MARKERS.values())) == len(style.MARKERS)
    # Two sources share an empty hatch; their lightness differs by far.
    plain = [tier for tier, hatch in style.HATCHES.items() if not hatch]
    assert plain == ["gpu", "computed"]
    assert len({hatch for hatch in style.HATCHES.values() if hatch}) == 4


def test_a_name_with_dollars_is_no_formula(tmp_path: Path) -> None:
    folders = write_judged(tmp_path, {"plain": DEMO["plain"]}, repeats=1)
    built = tables.build(folders, tmp_path / "tables", baseline="plain")
    trials = built.trials.with_columns(title=built.trials["setup"].replace("plain", "$\\bad$<b>"))
    odd = Tables(**{**vars(built), "trials": trials})
    style.save(ttft, odd, tmp_path)
    assert "$\\bad$<b>" in texts(ttft.draw(odd))
    ET.fromstring((tmp_path / "ttft.svg").read_text(encoding="utf-8"))


def test_many_setups_with_long_names_are_reduced_and_counted(tmp_path: Path) -> None:
    family = DEMO["native-host"]
    setups = {"plain": DEMO["plain"], **{f"{'n' * 88}{number:02d}": family for number in range(40)}}
    built = tables.build(write_judged(tmp_path, setups, repeats=1, suites=SHORT), tmp_path / "out", baseline="plain")
    for module in MODULES:
        for width in (style.WIDE, style.NARROW):
            figure = module.draw(built, width)
            assert clipped(figure) == []
            assert any(text.startswith(f"and {41 - MOST_SETUPS} more setups") for text in texts(figure))


@pytest.mark.parametrize(
    ("value", "text"),
    [(123.4, "123 s"), (12.34, "12.3 s"), (8.6, "8.60 s"), (0.194, "0.194 s"), (0.0012, "1.20 ms"), (2e-6, "2.00 µs")],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text
