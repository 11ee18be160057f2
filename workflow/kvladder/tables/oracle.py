"""Hits of every pass, predicted by the hit oracle and measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import polars as pl

from kvladder.gates.base import Evidence, Unreadable
from kvladder.gates.hits_as_predicted import deviation, measured, thrash
from kvladder.tables.model import CACHES, CELL
from kvladder.tables.raw import RawTrial


def oracle_rows(raw: Iterable[RawTrial], passes: pl.DataFrame) -> Iterable[dict[str, Any]]:
    """One row a timed pass of a judged trial whose setup has a tier; none for a trial that can't be replayed.

    Counters are the verdict's, requests the trial's own; ``passes`` gives workloads the names that tables know them by.
    """
    key = ("setup", "suite", "repeat", "workload", "round")
    names: dict[tuple[Any, ...], str] = {}
    for *trial, name, number in passes.select(key).iter_rows():
        names[*trial, str(name).partition(CELL)[0], number] = name
    for each in raw:
        if each.verdict is None or not each.verdict.windows:
            continue
        try:
            for row in _rows(Evidence.load(each.folder), each):
                named = names.get((each.setup, each.suite, each.repeat, row["workload"], row["round"]))
                yield {**each.key, "status": each.status, **row, "workload": named or row["workload"]}
        except Unreadable:
            continue


def _rows(evidence: Evidence, trial: RawTrial) -> Iterable[dict[str, Any]]:
    assert trial.verdict is not None  # noqa: S101 (its caller's condition)
    prediction = evidence.prediction
    if evidence.setup.tier is None or prediction is None:
        return
    windows = {(window.workload, window.round): window for window in trial.verdict.windows}
    capacity = prediction.capacity_tokens()
    for item in evidence.trial.timed:
        window, each = windows.get((item.workload, item.round)), evidence.predicted(item)
        if window is None or each is None:
            continue
        wrong = deviation(each, window)
        notes = [f"predicted {wrong}" if wrong else None, thrash(prediction, each)]
        if not each.known:
            notes.append("what the engine evicts can't be known from outside")
        yield {
            "workload": item.workload,
            "pass": item.name,
            "round": item.round,
            "prompt_tokens": each.prompt_tokens,
            "working_set_tokens": each.working_set,
            **{f"capacity_{tier}_tokens": capacity.get(tier) for tier in CACHES},
            **{f"predicted_{tier}": each.hits.get(tier, 0) for tier in CACHES},
            **{f"measured_{tier}": window.by_source.get(tier) for tier in (*CACHES, "unknown")},
            "predicted_hits": each.total,
            "measured_hits": measured(window),
            "ceiling": each.ceiling_total / each.prompt_tokens if each.prompt_tokens else None,
            "evicts": each.total < each.ceiling_total,
            "exact": each.exact,
            "agrees": None if measured(window) is None else wrong is None,
            "note": "; ".join(filter(None, notes)) or None,
        }
