"""A raw file of requests as columns: parsed, and for large trials kept beside the raw file.

The JSON lines are the truth. Parsing them is most of what tables of many requests cost, and they don't change, so that
the job that judges a large trial, and reads its requests anyway, leaves their columns in the trial's folder. Their
file's name has the hash of the lines and of what makes the columns: tables take those that belong to the file that the
trial wrote, and parse it where there are none. They may be deleted at any time.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl

from kvladder.config.records import TrialRecord

FOLDER = "columns"
"""Below a trial's folder."""

_S = 1_000_000_000

# What is read of a request's line: token ids and log probabilities, most of the file, are skipped. Whose requests they
# are is in the file's name and in trial.json.
_LINE: dict[str, Any] = {
    "pass": pl.String,
    "round": pl.Int64,
    "index": pl.Int64,
    "key": pl.String,
    "prompt_tokens": pl.Int64,
    "asked_tokens": pl.Int64,
    "status": pl.String,
    "error": pl.String,
    "eligible_ns": pl.Int64,
    "send_ns": pl.Int64,
    "first_token_ns": pl.Int64,
    "end_ns": pl.Int64,
    "chunk_ns": pl.List(pl.Int64),
    "chunk_tokens": pl.List(pl.Int64),
    "output_tokens": pl.Int64,
    "usage_cached_tokens": pl.Int64,
    "anomalies": pl.List(pl.String),
}


def parsed(path: Path) -> pl.LazyFrame:
    """The columns of ``requests`` that a file of JSON lines gives, a row a line.

    Reading them raises PolarsError or OSError.
    """
    times = pl.col("chunk_ns")
    # The same as `list.diff`, which takes six times as long.
    gaps = times.list.slice(1) - times.list.head(times.list.len() - 1)
    after_first = pl.col("output_tokens") - pl.col("chunk_tokens").list.first()
    return pl.scan_ndjson(path, schema=_LINE).select(
        "pass",
        "round",
        "index",
        "key",
        "status",
        "error",
        "prompt_tokens",
        "asked_tokens",
        "output_tokens",
        cached_tokens="usage_cached_tokens",
        queue_s=(pl.col("send_ns") - pl.col("eligible_ns")) / _S,
        ttft_s=(pl.col("first_token_ns") - pl.col("send_ns")) / _S,
        itl_median_s=gaps.list.median() / _S,
        itl_max_s=gaps.list.max() / _S,
        tpot_s=pl.when(after_first > 0).then((times.list.last() - times.list.first()) / after_first / _S),
        e2e_s=(pl.col("end_ns") - pl.col("send_ns")) / _S,
        anomalies=pl.when(pl.col("anomalies").list.len() > 0).then(pl.col("anomalies").list.join("; ")),
    )


def sink(rows: pl.LazyFrame, path: Path, *, by: tuple[str, ...]) -> None:
    """Write rows as parquet, in the order of ``by``. Raises PolarsError or OSError.

    A trial writes its requests in order, so that nothing has to be sorted, which takes all of them at once.
    """
    # Packing them better takes longer than it saves.
    rows.sink_parquet(path, compression="lz4")
    if not _in_order(path, by):
        pl.read_parquet(path).sort(by, maintain_order=True).write_parquet(path, compression="lz4")


def _in_order(path: Path, by: tuple[str, ...]) -> bool:
    before = pl.lit(False)
    for name in reversed(by):
        column, last = pl.col(name), pl.col(name).shift()
        before = (column < last) | ((column == last) & before)
    rows = pl.scan_parquet(path).select((~before).all())
    return bool(rows.collect(engine="streaming").item())


def keep(folder: Path) -> list[Path]:
    """Leave the columns of a finished trial's requests in its folder, in the order of round and index; returns the
    files. Those of earlier contents go, and none are left of a file that polars can't read: tables say so of the trial.

    Raises OSError, or ValidationError for the trial's record.
    """
    record = TrialRecord.model_validate_json((folder / "trial.json").read_bytes())
    wanted = {}
    for workload in sorted({part.workload for part in record.timed}):
        name = f"{workload}.requests.jsonl"
        wanted[kept(folder, workload, record.files[name].sha256)] = folder / name
    (folder / FOLDER).mkdir(exist_ok=True)
    made = []
    for path, source in wanted.items():
        partial = path.with_name(f".{path.name}.partial")
        try:
            sink(parsed(source), partial, by=("round", "index"))
        except pl.exceptions.PolarsError:
            continue
        made.append(partial.rename(path))
    for path in (folder / FOLDER).iterdir():
        if path not in made:
            path.unlink()
    return made


def kept(folder: Path, workload: str, content: str) -> Path:
    """Where the columns of a trial's requests are, if they were kept; ``content`` is the SHA-256 of the raw file."""
    return folder / FOLDER / f"{workload}.{content[:16]}-{_maker()}.parquet"


@cache
def _maker() -> str:
    """What makes the columns: this module, and polars, another version of which may round otherwise."""
    return hashlib.sha256(Path(__file__).read_bytes() + pl.__version__.encode()).hexdigest()[:16]
