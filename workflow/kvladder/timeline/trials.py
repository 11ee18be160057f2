"""The decomposition from counters alone of timed trials: no profiler was near them.

One row a valid trial and pass. It says what the engine's own counters make of a TTFT that is a result, where a
capture's decomposition explains one that isn't.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl

from kvladder.config import registry
from kvladder.tables.raw import RawTrial, read_trial
from kvladder.timeline import assemble
from kvladder.timeline.tables import COUNTED_TABLE, counted_passes, counted_row, snapshots

SCHEMA: dict[str, Any] = {"suite": pl.String, "repeat": pl.Int64, **COUNTED_TABLE}


def table(folders: Iterable[Path]) -> pl.DataFrame:
    """Rows of all valid trials among the folders, in their order; times in ns, null where a counter isn't there."""
    rows = [row for folder in folders for row in _rows(read_trial(folder))]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _rows(trial: RawTrial) -> list[dict[str, Any]]:
    record = trial.record
    if trial.status != "valid" or record is None:
        return []
    setup = registry.load("setups", record.kind).CONFIG.model_validate(record.config["setup"])
    # Passes of another engine have counters of their own.
    timed = {(item.workload, item.name, item.round) for item in record.timed if not item.engine}
    names = dict.fromkeys(item.workload for item in record.timed if not item.engine)
    sent = [request for name in names for request in assemble.requests(trial.folder / f"{name}.requests.jsonl")]
    mine = [request for request in sent if (request.workload, request.name, request.round) in timed]
    passes = counted_passes(snapshots(trial.folder), mine, setup.read, record.expected.get("tier"))
    place = {"suite": trial.suite, "repeat": trial.repeat, "setup": trial.setup}
    return [
        {
            **place,
            "workload": first.workload,
            "pass": first.name,
            "round": first.round,
            **counted_row(parts),
        }
        for first, parts in passes
    ]
