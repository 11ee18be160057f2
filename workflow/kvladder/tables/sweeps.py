"""Sweeps: workloads that were sent in several cells, and where each cell's rows are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from kvladder.tables.model import CELL

Place = tuple[int, int | None]
"""Requests in flight and tokens of each prompt; None: prompts of several lengths."""


@dataclass(frozen=True)
class Sweep:
    """One workload's cells: by place the name under which a cell's rows stand in the tables."""

    suite: str
    workload: str
    cells: Mapping[Place, str]

    @property
    def levels(self) -> list[int]:
        """Requests in flight, ascending."""
        return sorted({level for level, _ in self.cells})

    @property
    def lengths(self) -> list[int]:
        """Prompt lengths in tokens, ascending; empty where prompts of a cell have several."""
        return sorted({length for _, length in self.cells if length is not None})

    def rows(self, data: pl.DataFrame) -> pl.DataFrame:
        """Rows of all its cells."""
        return data.filter((pl.col("suite") == self.suite) & pl.col("workload").is_in(list(self.cells.values())))


def names_of_rounds(passes: pl.DataFrame) -> dict[tuple[str, str, int, str, int], str]:
    """Workload as tables call it (one a cell) by setup, suite, repeat, workload as sent, and round."""
    columns = passes.select("setup", "suite", "repeat", "workload", "round")
    return {
        (setup, suite, repeat, workload.partition(CELL)[0], number): workload
        for setup, suite, repeat, workload, number in columns.iter_rows()
    }


def hit_shown(rows: pl.DataFrame) -> str:
    """The one pass whose hits are shown: the first ones, or the later ones where a workload has no first."""
    return "first-hit" if "first-hit" in set(rows["pass"]) else "warm"


def sweeps(data: pl.DataFrame) -> list[Sweep]:
    """Sweeps of a table that has the columns suite, workload, concurrency and prompt_length; by suite and workload."""
    found: dict[tuple[str, str], dict[Place, str]] = {}
    columns = data.select("suite", "workload", "concurrency", "prompt_length").unique().sort(pl.all())
    for suite, name, level, length in columns.iter_rows():
        if CELL in name:
            found.setdefault((suite, name.partition(CELL)[0]), {})[level, length] = name
    return [Sweep(suite, workload, cells) for (suite, workload), cells in sorted(found.items())]
