"""The report's section on what the measuring itself took: time on the GPU or the machine, and the harness's own CPU."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from kvladder.report.formats import number, percent, plural, significant
from kvladder.report.values import Row, Setup
from kvladder.stats.samples import median
from kvladder.tables.held import PARTS
from kvladder.tables.model import Tables

PART_TITLES = dict(zip(PARTS, ("start-up", "warm-up", "timed passes", "between them", "right-kv", "stop"), strict=True))


def held(tables: Tables, setups: Mapping[str, Setup]) -> Row:
    """A sentence, the parts' titles, a row a setup (medians over its trials) and one of sums; ``sentence`` is None
    where no trial started anything."""
    data = tables.held
    if not data.height:
        return {"sentence": None}
    what = "GPU" if data["gpus"].sum() else "machine"
    rows = []
    for setup in setups.values():
        mine = data.filter(pl.col("setup") == setup.name)
        if mine.height:
            rows.append(
                {
                    "setup": setup,
                    "n": mine.height,
                    "held": number(median(mine["held_s"].to_list()), 1),
                    "parts": [number(median(mine[name].to_list()), 1) for name in PARTS],
                    "share": percent(_share(mine), 0),
                    "per_valid": number(_per_valid(mine), 1),
                }
            )
    sums = {
        "n": data.height,
        "held": number(_sum(data, "held_s"), 0),
        "parts": [number(_sum(data, name), 0) for name in PARTS],
        "share": percent(_share(data), 0),
        "per_valid": number(_per_valid(data), 1),
    }
    return {
        "what": what,
        "titles": [PART_TITLES[name] for name in PARTS],
        "rows": rows,
        "sums": sums,
        "rest": number(rest, 0) if (rest := _sum(data, "rest_s")) >= 1 else "",
        "sentence": _sentence(data, what),
        "harness": _harness(data),
    }


def _share(data: pl.DataFrame) -> float | None:
    """Held time that was spent in timed passes of valid trials, 0–1."""
    total = _sum(data, "held_s")
    return _sum(data.filter(pl.col("status") == "valid"), "timed_s") / total if total else None


def _per_valid(data: pl.DataFrame) -> float | None:
    """Seconds held (of each GPU) by all trials, for each that is valid."""
    valid = data.filter(pl.col("status") == "valid").height
    seconds = sum(held * max(1, gpus) for held, gpus in data.select("held_s", "gpus").iter_rows())
    return seconds / valid if valid else None


def _sum(data: pl.DataFrame, column: str) -> float:
    return float(sum(data[column].drop_nulls().to_list()))


def _sentence(data: pl.DataFrame, what: str) -> str:
    valid = data.filter(pl.col("status") == "valid").height
    per_valid = _per_valid(data)
    cost = (
        "none is valid" if per_valid is None else f"{per_valid:.0f} {what} seconds for each of the {valid} valid ones"
    )
    return (
        f"{plural(data.height, 'trial')} held the {what} for {_sum(data, 'held_s'):,.0f} s, {cost}; "
        f"{percent(_share(data), 0)} of it went into timed passes of valid trials."
    )


def _harness(data: pl.DataFrame) -> str:
    """What the client and the sampler took of the host's cores; empty where it wasn't recorded."""
    cores = sorted(set(data["cores"].to_list()))
    words = []
    for column, name, when in (
        ("client_share", "the load client", "while timed passes ran"),
        ("sampler_share", "the sampler", "all along"),
    ):
        known = data[column].drop_nulls().to_list()
        if known:
            words.append(
                f"{name} took {significant(100 * (median(known) or 0.0), 2)} % of the host's cores {when} "
                f"(at most {significant(100 * max(known), 2)} %)"
            )
    host = "/".join(map(str, cores))
    return f"On {host} cores, {' and '.join(words)}; medians over trials." if words else ""
