"""What a second engine found of what the first one had stored, and how fast: the workloads whose trials have two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from kvladder.stats.samples import median, ratio
from kvladder.tables.limits import shown
from kvladder.tables.model import CACHES
from kvladder.tables.raw import RawTrial

Row = dict[str, Any]

STORED, SECOND, OWN = "cold", "first-hit", "warm"
"""The passes: through the engine that stores, through the other one, and through the first again."""

_SETUP = ("setup", "suite", "workload")


def sharing_rows(
    raw: Iterable[RawTrial], passes: pl.DataFrame, metrics: pl.DataFrame, limits: pl.DataFrame
) -> Iterable[Row]:
    """Rows of the table ``sharing``; the other tables hold valid trials only."""
    sent = {
        (trial.suite, item.workload)
        for trial in raw
        if trial.record is not None
        for item in trial.record.timed
        if item.engine
    }
    rates = {tuple(row[name] for name in (*_SETUP, "pass")): row for row in shown(limits).iter_rows(named=True)}
    for key, rows in sorted(passes.partition_by(_SETUP, as_dict=True).items()):
        if key[1:] in sent:
            yield dict(zip(_SETUP, key, strict=True)) | _of_setup(rows, _ttft(metrics, key), rates.get((*key, SECOND)))


def _ttft(metrics: pl.DataFrame, key: Sequence[Any]) -> dict[int, dict[str, float | None]]:
    """Median TTFT by repeat and pass."""
    here = metrics.filter(
        pl.all_horizontal(pl.col(name) == value for name, value in zip(_SETUP, key, strict=True)),
        pl.col("metric") == "ttft_s",
    )
    found: dict[int, dict[str, float | None]] = {}
    for repeat, name, value in here.select("repeat", "pass", "value").iter_rows():
        found.setdefault(repeat, {})[name] = value
    return found


def _of_setup(rows: pl.DataFrame, ttft: Mapping[int, Mapping[str, float | None]], rate: Row | None) -> Row:
    trials = [_of_trial(part) for _, part in sorted(rows.partition_by("repeat", as_dict=True).items())]
    seconds = list(ttft.values())
    return {
        "n": len(trials),
        "prompts": rows["requests"].max(),
        "prompt_length": rows["prompt_length"].max(),
        "concurrency": rows["concurrency"].max(),
        "answer": _answer({trial["answer"] for trial in trials}),
        **{name: median(trial[name] for trial in trials) for name in ("second_hit", "own_hit", "loaded_bytes")},
        "ttft_stored_s": median(each.get(STORED) for each in seconds),
        "ttft_second_s": median(each.get(SECOND) for each in seconds),
        "ttft_own_s": median(each.get(OWN) for each in seconds),
        "second_to_stored": median(ratio(each.get(SECOND), each.get(STORED)) for each in seconds),
        "second_to_own": median(ratio(each.get(SECOND), each.get(OWN)) for each in seconds),
        "load_gb_per_s": None if rate is None else rate["gb_per_s"],
        "load_basis": None if rate is None else rate["basis"],
    }


def _answer(answers: set[str | None]) -> str | None:
    """That of all trials; "in part" where they differ, None where one of them can't say."""
    if None in answers:
        return None
    return answers.pop() if len(answers) == 1 else "in part"


def _of_trial(rows: pl.DataFrame) -> Row:
    """Shares of the prompt tokens that weren't computed, and whether the second engine found what the first does."""
    second, own = (_hit(rows.filter(pl.col("pass") == name)) for name in (SECOND, OWN))
    answer = None
    if second is not None and own is not None:
        answer = "not found" if not second else "found" if second >= own else "in part"
    loaded = rows.filter(pl.col("pass") == SECOND)["loaded_bytes"]
    return {"answer": answer, "second_hit": second, "own_hit": own, "loaded_bytes": loaded[0] if len(loaded) else None}


def _hit(rows: pl.DataFrame) -> float | None:
    """Share of a pass's prompt tokens that came from a cache, the median over rounds; None where it isn't known."""
    shares = []
    for row in rows.iter_rows(named=True):
        hits = [row[f"tokens_{tier}"] for tier in (*CACHES, "unknown")]
        shares.append(None if None in hits else ratio(sum(hits), row["prompt_tokens"]))
    return median(shares)
