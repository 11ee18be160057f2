"""Transfer rates as percent of what their link can do, and the rooflines that they are compared with.

No rate above its roofline gets into a table. A trial that claims one by more than the gate's tolerance is invalid; of
one that is left (the gate is off, or couldn't decide) the rate is refused, with the reason in its place. Inside the
tolerance (the noise of two clocks, or of a disk) a rate is shown as the roofline itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import polars as pl

from kvladder.config.experiment import GateConfig
from kvladder.config.records import RateClaim
from kvladder.config.rooflines import allowed, load
from kvladder.tables.raw import RawTrial
from kvladder.tables.sweeps import names_of_rounds

Row = dict[str, Any]

GATE = "below-the-limit"
REFUSED = "above its roofline: not shown"
BEYOND = "above what its link did when measured alone, which is no limit: not shown"

Cell = tuple[str, str, str, str, str, str, str | None]
"""What rows are one of, in the order of `_CELL`."""

_CELL = ("setup", "suite", "workload", "pass", "direction", "basis", "link")


def limits(raw: Sequence[RawTrial], passes: pl.DataFrame) -> Iterable[Row]:
    """Rows of the table ``limits``: valid trials, and what trials that the gate refused would have claimed."""
    named = names_of_rounds(passes)
    cells: defaultdict[Cell, list[list[RateClaim]]] = defaultdict(list)
    for trial in raw:
        if trial.status == "valid" and trial.verdict is not None:
            mine: defaultdict[Cell, list[RateClaim]] = defaultdict(list)
            for claim in trial.verdict.rates:
                workload = named.get((trial.setup, trial.suite, trial.repeat, claim.workload, claim.round))
                if workload is not None:
                    mine[_cell(trial, workload, claim)].append(claim)
            for cell, claims in mine.items():
                cells[cell].append(claims)
    rows = [_row(cell, trials) for cell, trials in cells.items()]
    # A rate that is above its own link's roofline isn't shown beside a further link either.
    above = {_claimed(row) for row in rows if (row["note"] or "").startswith(REFUSED)}
    rows = [row for row in rows if row.get("gb_per_s") is None or _claimed(row) not in above]
    yield from sorted([*rows, *_refused(raw)], key=lambda row: [str(row.get(name)) for name in _CELL])


def rooflines(raw: Sequence[RawTrial]) -> Iterable[Row]:
    """Rows of the table ``rooflines``: every measurement of every link, host by host."""
    for experiment in sorted({trial.folder.absolute().parents[3] for trial in raw}):
        for item in load(experiment):
            host = item.host
            for link in item.links:
                yield {
                    "host_id": None if host is None else host.host_id,
                    "measured_at": item.measured_at,
                    "link": link.link,
                    "bytes": link.bytes,
                    "threads": link.threads,
                    "chunk": link.chunk,
                    "repeats": link.repeats,
                    "median_gb_per_s": link.median / 1e9,
                    "min_gb_per_s": link.min / 1e9,
                    "max_gb_per_s": link.max / 1e9,
                }


def shown(table: pl.DataFrame) -> pl.DataFrame:
    """Of each setup, workload and pass the one row of ``limits`` to show: stores of cold passes and loads of hits.

    The engine's own rate before a lower bound, and of several links the one that is nearest to its roofline.
    """
    wanted = pl.when(pl.col("pass") == "cold").then(pl.lit("store")).otherwise(pl.lit("load"))
    rows = table.filter(pl.col("pass").is_not_null() & (pl.col("direction") == wanted))
    rows = rows.sort(["basis", "percent"], descending=[False, True], nulls_last=True, maintain_order=True)
    return rows.unique(["setup", "suite", "workload", "pass"], keep="first", maintain_order=True)


def _cell(trial: RawTrial, workload: str, claim: RateClaim) -> Cell:
    return trial.setup, trial.suite, workload, claim.name, claim.direction, claim.basis, claim.link


def _claimed(row: Row) -> tuple[str, ...]:
    """What a row is one of, whatever the link."""
    return tuple(row[name] for name in _CELL[:-1])


def _row(cell: Cell, trials: list[list[RateClaim]]) -> Row:
    row: Row = {**dict(zip(_CELL, cell, strict=True)), "n": len(trials)}
    claims = [claim for claims in trials for claim in claims]
    whys = dict.fromkeys(claim.why for claim in claims if claim.why is not None)
    notes = list(whys)
    # A link that is no limit has no noise to allow for: up to it the rate stays what it is.
    slack, above = (allowed(cell[-1], GateConfig().roofline_tolerance), REFUSED) if claims[0].bounds else (0.0, BEYOND)
    if any(claim.ceiling and claim.rate > claim.ceiling * (1 + slack) for claim in claims):
        return row | {"note": "; ".join([above, *notes])}
    rates = [median(min(claim.rate, claim.ceiling or claim.rate) for claim in claims) for claims in trials]
    if any(claim.time_ns == 0 for claim in claims):
        return row | {"note": "; ".join(["bytes in no time: not shown", *notes])}
    row |= {"gb_per_s": median(rates) / 1e9, "min_gb_per_s": min(rates) / 1e9, "max_gb_per_s": max(rates) / 1e9}
    ceilings = [[claim.ceiling for claim in claims if claim.ceiling is not None] for claims in trials]
    if all(ceilings):
        shares = [100 * rate / max(known) for rate, known in zip(rates, ceilings, strict=True)]
        row |= {"ceiling_gb_per_s": median(max(known) for known in ceilings) / 1e9, "percent": median(shares)}
        if any(claim.rate > claim.ceiling for claim in claims if claim.ceiling is not None):
            notes.append("at its roofline, above it by less than the gate allows")
    return row | {"note": "; ".join(notes) or None}


def _refused(raw: Sequence[RawTrial]) -> Iterable[Row]:
    """A row without numbers for each setup and workload of which trials were refused by the gate."""
    counts: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for trial in raw:
        if trial.status == "invalid" and trial.verdict is not None:
            failed = {gate.workload for gate in trial.verdict.gates if gate.gate == GATE and gate.decision == "fail"}
            for workload in failed:
                counts[trial.setup, trial.suite, str(workload)] += 1
    for (setup, suite, workload), count in counts.items():
        yield {"setup": setup, "suite": suite, "workload": workload, "n": count, "note": REFUSED}
