"""Conversations in pools: throughput, TTFT, hits and bytes by working set, and the turns of a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import polars as pl

from kvladder.config.records import PassRecord, PoolRecord, WindowTokens
from kvladder.gates.base import measured
from kvladder.stats.ladder import Turn, Window, cliff, steady_window
from kvladder.stats.samples import ratio
from kvladder.tables.model import CACHES, Tables
from kvladder.tables.raw import RawTrial

Row = dict[str, Any]

_S = 1_000_000_000

_LINE: dict[str, Any] = {
    "key": pl.String,
    "pass": pl.String,
    "round": pl.Int64,
    "status": pl.String,
    "prompt_tokens": pl.Int64,
    "output_tokens": pl.Int64,
    "send_ns": pl.Int64,
    "first_token_ns": pl.Int64,
    "end_ns": pl.Int64,
    "usage_cached_tokens": pl.Int64,
}
_PLACE = r"^c(?<conversation>\d+)-t(?<turn>\d+)$"
"""Of a turn, in a request's ``key``."""


def ladder_rows(raw: Iterable[RawTrial]) -> tuple[list[Row], list[Row]]:
    """Rows of ``ladder`` and of ``turns``: of every pass of a valid trial in which conversations took turns."""
    ladder: list[Row] = []
    turns: list[Row] = []
    for trial in raw:
        for part, pool in _pools(trial):
            requests = _requests(trial, part)
            window = _window(requests, pool, part)
            names = {**trial.key, "workload": part.workload, "round": part.round, "pool": pool.size}
            names |= {"working_set_tokens": pool.size * pool.tokens, "steady": window is not None}
            counted = requests if window is None else requests.filter(pl.col("end_ns").is_between(*_edges(window)))
            ladder.append({**names, **_pool_row(trial, part, pool, window, counted)})
            turns += [{**names, **row} for row in _turn_rows(counted)]
    return ladder, turns


def cliff_rows(ladder: pl.DataFrame) -> Iterator[Row]:
    """Rows of ``cliffs``: of each setup that hit at all, the working set at which its hits halve, block by block."""
    hit = ladder.filter(pl.col("predicted_ceiling") > 0).with_columns(
        share=pl.col("measured_hits") / pl.col("predicted_ceiling")
    )
    for (setup, order), rows in hit.group_by("setup", "order", maintain_order=True):
        blocks = [
            cliff(list(block.sort("working_set_tokens").select("working_set_tokens", "share").iter_rows()))
            for _, block in rows.drop_nulls("share").group_by("repeat", maintain_order=True)
        ]
        found = [value for value in blocks if value is not None]
        middle = pl.Series(found, dtype=pl.Float64).median() if blocks and len(found) == len(blocks) else None
        yield {
            "setup": setup,
            "order": order,
            "blocks": len(blocks),
            "halved": len(found),
            "tokens": middle,
            "tokens_low": min(found, default=None),
            "tokens_high": max(found, default=None),
            "largest": rows["working_set_tokens"].max(),
            **{f"capacity_{tier}_tokens": rows[f"capacity_{tier}_tokens"].max() for tier in CACHES},
        }


def shown_order(tables: Tables) -> str | None:
    """The order policy that figures and reports show together: that of the pool which ran first. None without one."""
    ran = {(suite, workload): place for place, (suite, workload) in enumerate(tables.context.get("workloads", []))}
    rows = tables.ladder.select("suite", "workload", "order").unique().sort(pl.all()).iter_rows()
    found = sorted((ran.get((suite, workload), len(ran)), order) for suite, workload, order in rows)
    return found[0][1] if found else None


def shown(tables: Tables) -> pl.DataFrame:
    """Rows of ``ladder`` that are of `shown_order`."""
    return tables.ladder.filter(pl.col("order").eq_missing(pl.lit(shown_order(tables))))


def by_working_set(tables: Tables, columns: Sequence[str]) -> pl.DataFrame:
    """``ladder`` over trials, of `shown_order`: a row a setup and working set.

    Each of ``columns`` is a median, with its extremes as ``<column>_min`` and ``<column>_max``. Further columns are
    ``hit_share``, ``predicted_share`` and ``ceiling_share`` of the prompt tokens, ``pool``, ``n`` and ``steady``.
    """
    shares = {"hit_share": "measured_hits", "predicted_share": "predicted_hits", "ceiling_share": "predicted_ceiling"}
    rows = shown(tables).with_columns(
        (pl.col(hits) / pl.col("prompt_tokens")).alias(share) for share, hits in shares.items()
    )
    names = list(dict.fromkeys([*columns, *shares]))
    return (
        rows.group_by("setup", "working_set_tokens")
        .agg(
            *(pl.col(name).median() for name in names),
            *(pl.col(name).min().alias(f"{name}_min") for name in names),
            *(pl.col(name).max().alias(f"{name}_max") for name in names),
            pool=pl.col("pool").first(),
            n=pl.len().cast(pl.Int64),
            steady=pl.col("steady").all(),
        )
        .sort("setup", "working_set_tokens")
    )


def _pools(trial: RawTrial) -> Iterator[tuple[PassRecord, PoolRecord]]:
    if trial.status != "valid" or trial.record is None:
        return
    for part in sorted(trial.record.timed, key=lambda item: (item.workload, item.round)):
        if part.pool is not None:
            yield part, part.pool


def _requests(trial: RawTrial, part: PassRecord) -> pl.DataFrame:
    lines = pl.scan_ndjson(trial.folder / f"{part.workload}.requests.jsonl", schema=_LINE)
    mine = (pl.col("pass") == part.name) & (pl.col("round") == part.round) & (pl.col("status") == "ok")
    place = pl.col("key").str.extract_groups(_PLACE)
    return (
        lines.filter(mine)
        .with_columns(
            conversation=place.struct.field("conversation").cast(pl.Int64),
            turn=place.struct.field("turn").cast(pl.Int64),
        )
        .collect()
    )


def _window(requests: pl.DataFrame, pool: PoolRecord, part: PassRecord) -> Window | None:
    turns = [Turn(*row) for row in requests.select("conversation", "send_ns", "end_ns").iter_rows()]
    each = max(requests["turn"].to_list(), default=0) + 1
    window = steady_window(turns, pool.size, each)
    if window is None:
        return None
    # Who is still ramping up isn't steady either.
    start = max(window.start, part.start_ns + int(part.ramp_s * _S))
    return Window(start, window.end) if start < window.end else None


def _edges(window: Window) -> tuple[int, int]:
    return window.start + 1, window.end


def _pool_row(trial: RawTrial, part: PassRecord, pool: PoolRecord, window: Window | None, counted: pl.DataFrame) -> Row:
    assert trial.verdict is not None  # noqa: S101 (what makes a trial valid)
    start, end = (part.start_ns, part.end_ns) if window is None else (window.start, window.end)
    seconds = (end - start) / _S
    sums = counted.select(
        tokens=pl.col("prompt_tokens").sum() + pl.col("output_tokens").sum(),
        middle=((pl.col("first_token_ns") - pl.col("send_ns")) / _S).median(),
        most=((pl.col("first_token_ns") - pl.col("send_ns")) / _S).max(),
    ).row(0, named=True)
    tokens = next(
        (each for each in trial.verdict.windows if (each.workload, each.round) == (part.workload, part.round)), None
    )
    predicted = next(
        (each for each in trial.verdict.predictions if (each.workload, each.round) == (part.workload, part.round)), None
    )
    hits = {} if predicted is None else predicted.hits
    return {
        "conversation_tokens": pool.tokens,
        "order": pool.order,
        "concurrency": part.concurrency,
        "requests": part.requests,
        "window_start_s": (start - part.start_ns) / _S,
        "window_end_s": (end - part.start_ns) / _S,
        "window_requests": counted.height,
        "tokens_per_s": sums["tokens"] / seconds if seconds else None,
        "requests_per_s": counted.height / seconds if seconds else None,
        "ttft_median_s": sums["middle"],
        "ttft_max_s": sums["most"],
        "prompt_tokens": None if tokens is None else tokens.prompt_tokens,
        "measured_hits": None if tokens is None else measured(tokens),
        **{f"measured_{tier}": None if tokens is None else tokens.by_source.get(tier) for tier in CACHES},
        "predicted_hits": None if predicted is None else sum(hits.values()),
        **{f"predicted_{tier}": None if predicted is None else hits.get(tier, 0) for tier in CACHES},
        "predicted_ceiling": None if predicted is None else predicted.ceiling,
        **{f"capacity_{tier}_tokens": None if predicted is None else predicted.capacity.get(tier) for tier in CACHES},
        **_bytes(tokens, part.requests),
    }


def _bytes(tokens: WindowTokens | None, requests: int) -> Row:
    if tokens is None:
        return {}
    names = ("stored_bytes", "loaded_bytes", "disk_write_bytes", "disk_read_bytes")
    moved = {name: getattr(tokens, name) for name in names}
    return moved | {
        "stored_per_loaded": ratio(tokens.stored_bytes, tokens.loaded_bytes),
        "disk_written_per_read": ratio(tokens.disk_write_bytes, tokens.disk_read_bytes),
        "stored_gb_per_1000": ratio(tokens.stored_bytes, requests * 1_000_000),
        "disk_written_gb_per_1000": ratio(tokens.disk_write_bytes, requests * 1_000_000),
    }


def _turn_rows(requests: pl.DataFrame) -> Iterable[Row]:
    grouped = requests.group_by("turn").agg(
        n=pl.len().cast(pl.Int64),
        prompt_tokens=pl.col("prompt_tokens").first(),
        cached_tokens=pl.col("usage_cached_tokens").median(),
        ttft_median_s=((pl.col("first_token_ns") - pl.col("send_ns")) / _S).median(),
    )
    return grouped.sort("turn").iter_rows(named=True)
