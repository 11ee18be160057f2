"""Setups and cells as the report's tables show them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvladder.report.formats import UNKNOWN, number, ratio, span, times

Row = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """One setup: its label (short, unique in the report), full title, label in figures, and what sets it apart."""

    name: str
    label: str
    title: str
    drawn: str
    badges: list[str]


@dataclass(frozen=True)
class Value:
    """A median and, beside it, the ratio to the baseline with its interval."""

    value: str
    ratio: str = ""
    bracket: str = ""
    notes: list[str] = field(default_factory=list)


def cell(row: Row | None, is_baseline: bool, is_control: bool, factor: float, decimals: int) -> Value:
    """A row of ``summary`` as a cell: the median times `factor` with that many decimals, its ratio, its interval."""
    if row is None:
        return Value(UNKNOWN)
    notes = []
    text = number(row["median"] * factor, decimals)
    if row["mode_low"] is not None:
        text = " / ".join(number(row[name] * factor, decimals) for name in ("mode_low", "mode_high"))
        notes.append(f"two modes: {row['n_mode_low']} and {row['n_mode_high']} trials")
    if is_baseline:
        return Value(text, notes=notes)
    if row["within_noise"] and not is_control:
        notes.append("within noise")
    if row["undefined"]:
        notes.append("ratio to 0 undefined")
    if row["ratio"] is None:
        return Value(text, UNKNOWN, notes=notes if row["undefined"] else [*notes, "no block in common"])
    if row["ratio_low"] is None:
        notes.append("one block, no range")
    bracket = "" if row["ratio_low"] is None else span(row["ratio_low"], row["ratio_high"])
    return Value(text, f"{ratio(row['ratio'])}×", bracket, notes)


def cost(row: Row, is_baseline: bool, notes: Iterable[str] = ()) -> Value:
    """What a first request costs, from the cold pass's row of ``summary``: its ratio to the baseline's."""
    if is_baseline:
        return Value("1×")
    bracket = "" if row["ratio_low"] is None else span(row["ratio_low"], row["ratio_high"])
    return Value(times(row["ratio"]), bracket=bracket, notes=list(notes))
