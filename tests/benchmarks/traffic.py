"""Judged trials with any number of requests: lines as the load client writes them, of random times.

Everything but the requests is a small trial's of `trial_factory`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import polars as pl
from table_factory import DEMO, judge
from trial_factory import Load, write_trial

WORKLOAD = "burst"
PASSES = ("cold", "first-hit", "warm", "warm")
PROMPT_TOKENS = 1000
MS = 1_000_000
_BLOCK = 50_000


def write(root: Path, *, records: int, trials: int, chunks: int) -> list[Path]:
    """Write ``trials`` trials of different setups and repeats below ``root``, with ``records`` requests in all of
    ``chunks`` chunks each; returns their folders."""
    setups = list(DEMO)
    folders = []
    for number in range(trials):
        setup = setups[number % len(setups)]
        kind, family = DEMO[setup]
        load = Load(requests=1, prompt_tokens=PROMPT_TOKENS, output_tokens=chunks, warm_rounds=2)
        folder = write_trial(
            root,
            setup=setup,
            kind=kind,
            repeat=number // len(setups),
            order=number,
            workloads={WORKLOAD: load},
            family=family,
        )
        judge(folder)
        share = records // trials + (number < records % trials)
        _fill(folder, max(1, share // len(PASSES)), chunks, number)
        folders.append(folder)
    return folders


def _fill(folder: Path, requests: int, chunks: int, seed: int) -> None:
    """Put so many requests into each pass of a trial, and bring its record up to date."""
    path = folder / f"{WORKLOAD}.requests.jsonl"
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        for number, name in enumerate(PASSES):
            for first in range(0, requests, _BLOCK):
                index = np.arange(first, min(first + _BLOCK, requests))
                _lines(rng, name, number, index, chunks).write_ndjson(file)
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    record = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    record["files"][path.name] = {
        "bytes": path.stat().st_size,
        "sha256": content,
        "lines": requests * len(PASSES),
    }
    for part in record["passes"]:
        part["requests"] = requests
    (folder / "trial.json").write_text(json.dumps(record), encoding="utf-8")


def _lines(rng: np.random.Generator, name: str, number: int, index: np.ndarray, chunks: int) -> pl.DataFrame:
    """Lines of these requests of one pass, keys in the client's order."""
    count = len(index)
    sent = 10**12 * (number + 1) + index * 50_000 + rng.integers(0, 40_000, count)
    gaps = rng.integers(8 * MS, 14 * MS, (count, chunks))
    gaps[:, 0] = rng.integers(20 * MS, 400 * MS, count)
    times = sent[:, None] + np.cumsum(gaps, axis=1)

    def lists(values: np.ndarray) -> pl.Series:
        return pl.Series(values, dtype=pl.Array(pl.Int64, chunks)).arr.to_list()

    def const(value: object, kind: pl.DataType | type[pl.DataType] | None = None) -> pl.Expr:
        return pl.lit(value, dtype=kind)

    return pl.select(
        const(1).alias("schema"),
        const(WORKLOAD).alias("workload"),
        const(name).alias("pass"),
        const(number).alias("round"),
        pl.Series("index", index),
        (const("p") + pl.Series(index).cast(pl.String)).alias("key"),
        const(PROMPT_TOKENS).alias("prompt_tokens"),
        const(chunks).alias("asked_tokens"),
        pl.Series("eligible_ns", sent - 7_000),
        const("ok").alias("status"),
        const(None, pl.String).alias("error"),
        const(200).alias("http_status"),
        pl.Series("response_id", [f"cmpl-{number}-{place:030}" for place in index.tolist()]),
        pl.Series("send_ns", sent),
        pl.Series("headers_ns", sent + 2 * MS),
        pl.Series("first_token_ns", times[:, 0]),
        pl.Series("end_ns", times[:, -1] + MS // 2),
        lists(times).alias("chunk_ns"),
        lists(np.ones_like(times)).alias("chunk_tokens"),
        const(chunks).alias("output_tokens"),
        lists(rng.integers(0, 128_000, (count, chunks))).alias("token_ids"),
        const(PROMPT_TOKENS).alias("usage_prompt_tokens"),
        const(chunks).alias("usage_completion_tokens"),
        const(None, pl.Int64).alias("usage_cached_tokens"),
        const(None, pl.Int64).alias("logprobs"),
        pl.Series([[]] * count, dtype=pl.List(pl.String)).alias("anomalies"),
    )
