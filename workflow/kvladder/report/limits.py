"""The report's section on limits: rates against rooflines, and the rooflines themselves."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from kvladder.report.formats import UNKNOWN, plural, significant, size
from kvladder.report.values import Row, Setup
from kvladder.tables.labels import workload_order
from kvladder.tables.limits import shown
from kvladder.tables.model import PASSES, Tables

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


def limits(tables: Tables, setups: Mapping[str, Setup]) -> Row:
    """Rows by workload and setup, their notes, and the best measurement of each link by host."""
    order = list(setups)
    rows, notes = [], dict[str, list[str]]()
    best = shown(tables.limits)
    for suite, workload in workload_order(tables, tables.limits):
        here = tables.limits.filter((pl.col("suite") == suite) & (pl.col("workload") == workload))
        for name in sorted(set(here["setup"]), key=order.index):
            mine = best.filter(
                (pl.col("suite") == suite) & (pl.col("workload") == workload) & (pl.col("setup") == name)
            )
            cells = {row["pass"]: row for row in mine.iter_rows(named=True)}
            loads = [cells[each] for each in PASSES[1:] if each in cells]
            links = dict.fromkeys(row["link"] for row in loads or cells.values() if row["link"] is not None)
            rows.append(
                {
                    "workload": workload,
                    "setup": setups[name],
                    "links": [LINKS.get(link, link) for link in links] or [UNKNOWN],
                    "cells": [_cell(cells.get(each)) for each in PASSES],
                    "n": max((row["n"] for row in cells.values()), default=0),
                }
            )
            for note in here.filter(pl.col("setup") == name)["note"].drop_nulls().unique(maintain_order=True):
                notes.setdefault(note, [])
                if setups[name].label not in notes[note]:
                    notes[note].append(setups[name].label)
    return {
        "rows": rows,
        "notes": list(notes.items()),
        "rooflines": _rooflines(tables.rooflines),
        "pcie": _pcie(tables, setups),
    }


def _cell(row: Row | None) -> Row:
    """A rate, and its percent; of a lower bound both are marked."""
    if row is None or row["gb_per_s"] is None:
        return {"rate": UNKNOWN, "percent": ""}
    least = "≥ " if row["basis"] == "ttft" else ""
    percent = "no roofline" if row["percent"] is None else f"{least}{row['percent']:.0f} %"
    return {"rate": least + significant(row["gb_per_s"]), "percent": percent}


def _pcie(tables: Tables, setups: Mapping[str, Setup]) -> list[Row]:
    """Bytes over PCIe by workload, setup and direction: the device's count, the engine's, and what tokens come to."""
    order, table = list(setups), tables.pcie_bytes
    places = {place: number for number, place in enumerate(workload_order(tables, table))}
    rows = sorted(
        table.iter_rows(named=True),
        key=lambda row: (places[row["suite"], row["workload"]], order.index(row["setup"]), row["direction"] == "load"),
    )
    return [
        {
            "workload": row["workload"],
            "setup": setups[row["setup"]],
            "direction": row["direction"],
            "sizes": [
                UNKNOWN if row[name] is None else significant(row[name] / 1e9, 4)
                for name in ("counted_bytes", "engine_bytes", "expected_bytes")
            ],
            "ratio": f"{row['counted_ratio']:.3f}",
            "range": f"{row['min_ratio']:.3f}–{row['max_ratio']:.3f}",
            "engine_ratio": UNKNOWN
            if row["engine_bytes"] is None
            else f"{row['engine_bytes'] / row['expected_bytes']:.3f}",
            "turns": row["turns"],
            "n": row["n"],
        }
        for row in rows
    ]


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
