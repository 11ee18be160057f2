"""Names on a small surface: short labels that stay unique, and the order in which setups are shown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import polars as pl

from kvladder.tables.model import CELL, Tables


def short_labels(names: Sequence[str], width: int = 22) -> dict[str, str]:
    """A label of at most `width` characters for each name; equal labels only for equal names.

    Names that fit are kept. Longer ones keep their start and their end around an ellipsis, because systematic names
    differ there; those that still collide get a number.
    """
    unique = list(dict.fromkeys(names))
    labels: dict[str, str] = {}
    taken = {name for name in unique if len(name) <= width}
    for name in unique:
        if len(name) <= width:
            labels[name] = name
            continue
        tail = (width - 1) // 2
        label = f"{name[: width - 1 - tail]}…{name[-tail:]}"
        number = 1
        while label in taken:
            number += 1
            suffix = f"…#{number}"
            label = name[: width - len(suffix)] + suffix
        taken.add(label)
        labels[name] = label
    return labels


def setup_order(tables: Tables) -> list[str]:
    """Every setup: baseline, its controls, the engine's own device cache, then tiers by time to first token on a hit.

    Setups without a valid trial come last, by name.
    """
    hits = tables.summary.filter((pl.col("metric") == "ttft_s") & (pl.col("pass") != "cold"))
    speed: dict[str, float] = {}
    for setup, ratio, value in hits.select("setup", "ratio", "median").iter_rows():
        place = ratio if ratio is not None else value
        speed[setup] = min(speed.get(setup, place), place)
    tiers = tables.tiers()
    about = {row["setup"]: row for row in tables.trials.sort("setup").iter_rows(named=True)}

    def rank(setup: str) -> tuple[int, float, str]:
        row = about[setup]
        if setup == tables.baseline:
            group = 0
        elif row["control"]:
            group = 1
        elif setup not in speed:
            group = 4
        else:
            group = 2 if tiers.get(setup) == "gpu" else 3
        return group, speed.get(setup, 0.0), setup

    return sorted(about, key=rank)


def setup_labels(tables: Tables, width: int, more: Iterable[str] = ()) -> dict[str, str]:
    """Short, unique label of every setup, and of `more` setups that have no trial, by `setup_order`.

    Made over all setups, so that one has the same label in every figure and in the report's key.
    """
    titles = tables.titles()
    names = list(dict.fromkeys([*setup_order(tables), *more]))
    short = short_labels([titles.get(name, name) for name in names], width)
    return {name: short[titles.get(name, name)] for name in names}


def single_workloads(tables: Tables, data: pl.DataFrame) -> list[tuple[str, str]]:
    """`workload_order` without the cells of sweeps and pools of conversations, which are shown together and not one by
    one, and without workloads of two engines, whose first hit is another engine's."""
    apart = {
        *tables.sharing.select("suite", "workload").iter_rows(),
        *tables.ladder.select("suite", "workload").iter_rows(),
    }
    return [pair for pair in workload_order(tables, data) if CELL not in pair[1] and pair not in apart]


def workload_order(tables: Tables, data: pl.DataFrame) -> list[tuple[str, str]]:
    """(suite, workload) of the rows of `data`, in the order in which trials run them; cells of one by their numbers."""
    here = set(data.select("suite", "workload").unique().iter_rows())
    known = {(suite, workload): place for place, (suite, workload) in enumerate(tables.context.get("workloads", []))}

    def place(pair: tuple[str, str]) -> tuple[int, str, str, list[int]]:
        suite, workload = pair
        name, _, cell = workload.partition(CELL)
        numbers = [int(number) for number in re.findall(r"\d+", cell)]
        return known.get((suite, name), len(known)), suite, name, numbers

    return sorted(here, key=place)
