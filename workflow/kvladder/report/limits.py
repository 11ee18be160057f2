"""The report's section on limits: rates against rooflines, and the rooflines themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import polars as pl

from kvladder.report.formats import UNKNOWN, plural, significant, size
from kvladder.report.values import Row, Setup
from kvladder.tables.labels import workload_order
from kvladder.tables.limits import shown
from kvladder.tables.model import CELL, Tables

LINKS = {
    "pinned_h2d": "pinned host memory to GPU",
    "pinned_d2h": "GPU to pinned host memory",
    "pageable_h2d": "pageable host memory to GPU",
    "pageable_d2h": "GPU to pageable host memory",
    "host_memcpy": "memory copy",
    "tcp_loopback": "TCP over loopback",
    "transfer_engine_read": "Mooncake's transfer engine, reads",
    "transfer_engine_write": "Mooncake's transfer engine, writes",
    "disk_read_direct": "disk, reads (O_DIRECT)",
    "disk_write_direct": "disk, writes (O_DIRECT)",
    "disk_read_cached": "page cache, reads",
    "disk_write_cached": "page cache, writes",
}


COLUMNS = {"cold": "Store, cold", "first-hit": "Load, first hit", "warm": "Load, warm", "mixed": "Load, mixed"}
"""What of each pass stands in the table of rates."""


def limits(tables: Tables, setups: Mapping[str, Setup]) -> Row:
    """Rates by workload and setup, with their notes; the best measurement of each link by host; bytes over PCIe."""
    best = shown(tables.limits)
    columns = {name: title for name, title in COLUMNS.items() if name in set(best["pass"])}
    rows: list[Row] = []
    notes: dict[str, list[str]] = {}
    for title, here in _together(tables, tables.limits, setups):
        setup = setups[here["setup"][0]]
        mine = best.filter(
            (pl.col("setup") == setup.name)
            & (pl.col("suite") == here["suite"][0])
            & pl.col("workload").is_in(here["workload"].implode())
        )
        loads = mine.filter(pl.col("pass") != "cold")
        links = set((loads if loads.height else mine)["link"])
        trials = mine.group_by("workload").agg(pl.col("n").max())["n"].to_list()
        rows.append(
            {
                "workload": title,
                "setup": setup,
                "links": [words for link, words in LINKS.items() if link in links] or [UNKNOWN],
                "cells": [_cell(mine.filter(pl.col("pass") == name)) for name in columns],
                "n": min(trials, default=0),
            }
        )
        for note in here["note"].drop_nulls().unique(maintain_order=True):
            notes.setdefault(note, [])
            if setup.label not in notes[note]:
                notes[note].append(setup.label)
    return {
        "columns": list(columns.values()),
        "rows": rows,
        "notes": list(notes.items()),
        "beside": bool(best["link"].drop_nulls().str.starts_with("transfer_engine").any()),
        "swept": bool(tables.limits["workload"].str.contains(CELL, literal=True).any()),
        "rooflines": _rooflines(tables.rooflines),
        "pcie": _pcie(tables, setups),
    }


def _together(tables: Tables, table: pl.DataFrame, setups: Mapping[str, Setup]) -> Iterator[tuple[str, pl.DataFrame]]:
    """Title and rows of each workload and setup. A sweep's cells, of which there are dozens, stand together."""
    order = list(setups)
    groups: dict[tuple[str, str], list[str]] = {}
    for suite, workload in workload_order(tables, table):
        groups.setdefault((suite, workload.partition(CELL)[0]), []).append(workload)
    for (suite, name), cells in groups.items():
        here = table.filter((pl.col("suite") == suite) & pl.col("workload").is_in(cells))
        title = cells[0] if len(cells) == 1 else f"{name}, {sum(CELL in each for each in cells)} cells"
        for setup in sorted(set(here["setup"]), key=order.index):
            yield title, here.filter(pl.col("setup") == setup)


def _cell(rows: pl.DataFrame) -> Row:
    """A rate, and its percent, or their ranges over cells; of lower bounds both are marked."""
    known = rows.filter(pl.col("gb_per_s").is_not_null())
    if not known.height:
        return {"rate": UNKNOWN, "percent": ""}
    least = "≥ " if "ttft" in set(known["basis"]) else ""
    rates = [significant(rate) for rate in known["gb_per_s"].sort()]
    percents = [f"{percent:.0f}" for percent in known["percent"].drop_nulls().sort()]
    percent = f"{least}{_ends(percents)} %" if percents else "no roofline"
    return {"rate": least + _ends(rates), "percent": percent}


def _ends(texts: Sequence[str]) -> str:
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]}–{texts[-1]}"


def _pcie(tables: Tables, setups: Mapping[str, Setup]) -> list[Row]:
    """Bytes over PCIe by workload, setup and direction: the device's count, the engine's, and what tokens come to."""
    rows = []
    for title, here in _together(tables, tables.pcie_bytes, setups):
        for direction in ("store", "load"):
            mine = here.filter(pl.col("direction") == direction)
            if not mine.height:
                continue
            counted, engine, expected = (_total(mine[f"{name}_bytes"]) for name in ("counted", "engine", "expected"))
            rows.append(
                {
                    "workload": title,
                    "setup": setups[mine["setup"][0]],
                    "direction": direction,
                    "sizes": [significant(_gb(total), 4) for total in (counted, engine, expected)],
                    "ratio": _ratio(counted, expected),
                    # One trial of one workload has none.
                    "range": ""
                    if mine["n"].to_list() == [1]
                    else f"{min(mine['min_ratio']):.3f}–{max(mine['max_ratio']):.3f}",
                    "engine_ratio": _ratio(engine, expected),
                    "turns": sum(mine["turns"]),
                    "n": min(mine["n"]),
                }
            )
    return rows


def _total(values: pl.Series) -> float | None:
    """None where one is unknown."""
    return None if values.has_nulls() else float(values.sum())


def _gb(total: float | None) -> float | None:
    return None if total is None else total / 1e9


def _ratio(total: float | None, expected: float | None) -> str:
    return UNKNOWN if total is None or not expected else f"{total / expected:.3f}"


def _rooflines(table: pl.DataFrame) -> list[Row]:
    """The fastest measurement of each link of each host."""
    fastest = table.sort("max_gb_per_s", descending=True).unique(["host_id", "link"], keep="first")
    order = list(LINKS)
    rows = sorted(
        fastest.iter_rows(named=True),
        key=lambda row: (row["host_id"] or "", order.index(row["link"]) if row["link"] in order else len(order)),
    )
    return [
        {
            "host": row["host_id"] or "not recorded",
            "link": LINKS.get(row["link"], row["link"]),
            "fastest": significant(row["max_gb_per_s"]),
            "median": significant(row["median_gb_per_s"]),
            "how": f"{_piece(row)}, {plural(row['threads'], 'thread')}, {plural(row['repeats'], 'repeat')}",
        }
        for row in rows
    ]


def _piece(row: Row) -> str:
    """How much was moved in one go: everything, or one file or object."""
    if not row["chunk"]:
        return size(row["bytes"])
    return f"{size(row['chunk'])} {'a file' if row['link'].startswith('disk_') else 'an object'}"
