"""Hits of every pass, predicted by the hit oracle and measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import polars as pl

from kvladder.gates.base import measured
from kvladder.tables.model import CACHES
from kvladder.tables.raw import RawTrial
from kvladder.tables.sweeps import names_of_rounds


def oracle_rows(raw: Iterable[RawTrial], passes: pl.DataFrame) -> Iterable[dict[str, Any]]:
    """One row a timed pass of a judged trial whose setup has a tier; none for a trial that can't be replayed.

    All is the verdict's; ``passes`` gives workloads the names that tables know them by.
    """
    names = names_of_rounds(passes)
    for each in raw:
        if each.verdict is None or each.status == "failed":
            continue
        for row in _rows(each):
            named = names.get((each.setup, each.suite, each.repeat, row["workload"], row["round"]))
            yield {**each.key, "status": each.status, **row, "workload": named or row["workload"]}


def _rows(trial: RawTrial) -> Iterable[dict[str, Any]]:
    assert trial.verdict is not None  # noqa: S101 (its caller's condition)
    windows = {(window.workload, window.round): window for window in trial.verdict.windows}
    for each in trial.verdict.predictions:
        window = windows[each.workload, each.round]
        predicted = sum(each.hits.values())
        notes = [f"predicted {each.wrong}" if each.wrong else None, each.thrash]
        if not each.known:
            notes.append("what the engine evicts can't be known from outside")
        yield {
            "workload": each.workload,
            "pass": each.name,
            "round": each.round,
            "prompt_tokens": each.prompt_tokens,
            "working_set_tokens": each.working_set,
            **{f"capacity_{tier}_tokens": each.capacity.get(tier) for tier in CACHES},
            **{f"predicted_{tier}": each.hits.get(tier, 0) for tier in CACHES},
            **{f"measured_{tier}": window.by_source.get(tier) for tier in (*CACHES, "unknown")},
            "predicted_hits": predicted,
            "measured_hits": measured(window),
            "ceiling": each.ceiling / each.prompt_tokens if each.prompt_tokens else None,
            "evicts": predicted < each.ceiling,
            "exact": each.exact,
            "agrees": None if measured(window) is None else each.wrong is None,
            "note": "; ".join(filter(None, notes)) or None,
        }
