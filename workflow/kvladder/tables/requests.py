"""The requests of many trials as one table that never lies in memory as a whole.

Files are reduced by streaming into parts on disk, some hundred megabytes of them at a time: chunk lists, the bulk of
the files, exist only while they are parsed. What other tables need of the requests is taken from the parts' columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from kvladder.stats.samples import CARRIED
from kvladder.tables.model import SCHEMAS
from kvladder.tables.raw import RawTrial

Row = dict[str, Any]

_S = 1_000_000_000

_BATCH_BYTES = 256 << 20
_BATCH_TRIALS = 100
"""Trials that are read in one query: a query a file would cost more than parsing where files are small."""

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


@dataclass(frozen=True, slots=True)
class _File:
    """One trial's requests of one workload; ``number`` names it in the parts."""

    number: int
    trial: RawTrial
    workload: str

    @property
    def name(self) -> str:
        return f"{self.workload}.requests.jsonl"

    @property
    def path(self) -> Path:
        return self.trial.folder / self.name

    def damage(self) -> str | None:
        """Why it isn't the file that was judged. Verdicts are older than this reading, and a file that was changed
        since must not come in under them."""
        assert self.trial.record is not None  # noqa: S101 (only trials with a record are read)
        entry = self.trial.record.files.get(self.name)
        try:
            with self.path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            return f"{self.name} is missing"
        except OSError as error:
            return f"{self.name} can't be read: {error}"
        return None if entry is not None and content == entry.sha256 else f"{self.name} isn't what the trial wrote"

    def rows(self) -> pl.LazyFrame:
        """Its requests, one row each, as in the table, and the file's number."""
        own = {**self.trial.key, "workload": self.workload}
        named = _derive(pl.scan_ndjson(self.path, schema=_LINE)).with_columns(
            pl.lit(value).alias(column) for column, value in own.items()
        )
        return named.select(
            *(pl.col(column).cast(kind) for column, kind in SCHEMAS["requests"].items()),
            file=pl.lit(self.number, dtype=pl.Int32),
        )


class RequestStore:
    """The requests of trials that were added, in parts below ``folder``.

    Rows are in the order in which trials were added, inside a trial by workload, round and index.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[_File] = []
        self._parts: list[Path] = []

    def add(self, trials: Iterable[RawTrial]) -> list[RawTrial]:
        """Read the requests of valid trials. Returns all trials in the order given; one whose requests can't be read
        is ``failed``, and the reason names the file."""
        everything = list(trials)
        failed: dict[int, str] = {}
        with ThreadPoolExecutor(1) as pool:
            for batch in _batches((place, trial) for place, trial in enumerate(everything) if trial.status == "valid"):
                failed |= self._read(batch, pool)
        return [
            replace(trial, status="failed", reason=failed[place]) if place in failed else trial
            for place, trial in enumerate(everything)
        ]

    def _read(self, batch: Sequence[tuple[int, RawTrial]], pool: ThreadPoolExecutor) -> dict[int, str]:
        """Read these trials in one query, else one by one; returns why some failed, by place."""
        files = {place: self._number(trial) for place, trial in batch}
        # Hashing takes as long as a tenth of the parsing; files that turn out to be others are rare.
        checks = pool.submit(lambda: {place: _first(file.damage() for file in part) for place, part in files.items()})
        try:
            self._sink([file for part in files.values() for file in part])
            whole = True
        except (OSError, pl.exceptions.PolarsError):
            whole = False
        failed = {place: reason for place, reason in checks.result().items() if reason is not None}
        if whole and not failed:
            return {}
        if whole:
            self._parts.pop().unlink()
        for place, part in files.items():
            if place not in failed and (reason := self._read_alone(part)) is not None:
                failed[place] = reason
        return failed

    def _read_alone(self, files: Sequence[_File]) -> str | None:
        before = len(self._parts)
        for file in files:
            try:
                self._sink([file])
            except (OSError, pl.exceptions.PolarsError) as error:
                del self._parts[before:]
                return f"{file.name} can't be read: {str(error).splitlines()[0]}"
        return None

    def _number(self, trial: RawTrial) -> list[_File]:
        assert trial.record is not None  # noqa: S101 (a valid trial has one)
        workloads = sorted({part.workload for part in trial.record.timed})
        made = [_File(len(self._files) + place, trial, workload) for place, workload in enumerate(workloads)]
        self._files += made
        return made

    def _sink(self, files: Sequence[_File]) -> None:
        if not files:
            return
        path = self._folder / f"{len(self._parts)}.parquet"
        pl.concat([file.rows() for file in files]).sink_parquet(path)
        # A trial writes its requests in order, so that nothing has to be sorted, which takes all of them at once.
        if not _in_order(path):
            rows = pl.read_parquet(path).sort("file", "round", "index", maintain_order=True)
            rows.write_parquet(path)
        self._parts.append(path)

    def by_pass(self) -> dict[tuple[str, str, int, str, int], Row]:
        """What ``passes`` holds of requests, by setup, suite, repeat, workload and round."""
        found = {}
        for part in self._parts:
            rows = pl.scan_parquet(part).select(
                "file", "round", "ttft_s", "output_tokens", "prompt_tokens", ok=pl.col("status") == "ok"
            )
            for row in rows.group_by("file", "round").agg(**_PASS).collect().iter_rows(named=True):
                file = self._files[row.pop("file")]
                found[file.trial.setup, file.trial.suite, file.trial.repeat, file.workload, row.pop("round")] = row
        return found

    def medians(
        self, columns: Mapping[str, str], cells: pl.DataFrame | None
    ) -> Iterator[tuple[tuple[str, str, int, str, str], Row]]:
        """Medians of columns over requests that came through, by setup, suite, repeat, workload and pass.

        ``columns`` are columns by name of the median; ``cells`` as in `table`.
        """
        values = [pl.col(column).median().alias(name) for name, column in columns.items()]
        for part in self._parts:
            rows = pl.scan_parquet(part).filter(pl.col("status") == "ok")
            grouped = self._named(rows, cells).group_by("file", "workload", "pass").agg(values)
            for row in grouped.collect().iter_rows(named=True):
                trial = self._files[row.pop("file")].trial
                yield (trial.setup, trial.suite, trial.repeat, row.pop("workload"), row.pop("pass")), row

    def table(self, cells: pl.DataFrame | None) -> pl.LazyFrame:
        """The table ``requests``.

        ``cells`` has the column ``named`` by setup, suite, repeat, workload and round: other names of the workloads.
        """
        if not self._parts:
            return pl.LazyFrame(schema=SCHEMAS["requests"])
        return self._named(pl.scan_parquet(self._parts), cells).select(SCHEMAS["requests"].keys())

    def _named(self, rows: pl.LazyFrame, cells: pl.DataFrame | None) -> pl.LazyFrame:
        if cells is None:
            return rows
        columns = ("setup", "suite", "repeat", "workload")
        files = pl.DataFrame(
            [{**file.trial.key, "workload": file.workload, "file": file.number} for file in self._files],
            schema={**{column: SCHEMAS["requests"][column] for column in columns}, "file": pl.Int32},
        )
        names = cells.join(files, on=columns).select("file", "round", "named")
        joined = rows.join(names.lazy(), on=["file", "round"], how="left", maintain_order="left")
        return joined.with_columns(workload=pl.coalesce("named", "workload")).drop("named")


def _batches(trials: Iterable[tuple[int, RawTrial]]) -> Iterator[list[tuple[int, RawTrial]]]:
    batch: list[tuple[int, RawTrial]] = []
    size = 0
    for place, trial in trials:
        assert trial.record is not None  # noqa: S101 (a valid trial has one)
        batch.append((place, trial))
        size += sum(entry.bytes for name, entry in trial.record.files.items() if name.endswith(".requests.jsonl"))
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_TRIALS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _in_order(part: Path) -> bool:
    file, number, index = (pl.col(name) for name in ("file", "round", "index"))
    later = (number > number.shift()) | ((number == number.shift()) & (index >= index.shift()))
    order = pl.scan_parquet(part).select(((file != file.shift()) | later).all())
    return bool(order.collect(engine="streaming").item())


def _derive(lines: pl.LazyFrame) -> pl.LazyFrame:
    gaps = pl.col("chunk_ns").list.diff(null_behavior="drop")
    after_first = pl.col("output_tokens") - pl.col("chunk_tokens").list.first()
    return lines.select(
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
        tpot_s=pl.when(after_first > 0).then(
            (pl.col("chunk_ns").list.last() - pl.col("chunk_ns").list.first()) / after_first / _S
        ),
        e2e_s=(pl.col("end_ns") - pl.col("send_ns")) / _S,
        anomalies=pl.when(pl.col("anomalies").list.len() > 0).then(pl.col("anomalies").list.join("; ")),
    )


def _pass_columns() -> dict[str, pl.Expr]:
    """The same as `kvladder.stats.samples` takes of a list, without making one: bit for bit, which a test checks."""
    ttft = pl.col("ttft_s").filter("ok").drop_nulls()
    ordered, n = ttft.sort(), ttft.len().cast(pl.Int64)

    def at(place: pl.Expr) -> pl.Expr:
        return ordered.get(place, null_on_oob=True)

    def quantile(q: float) -> pl.Expr:
        place = (n - 1) * q
        below = place.floor().cast(pl.Int64)
        above = pl.min_horizontal(below + 1, n - 1)
        value = at(below) + (at(above) - at(below)) * (place - below)
        return pl.when(n * min(q, 1 - q) >= CARRIED - 1e-9).then(value)

    output = pl.col("output_tokens").filter("ok")
    return {
        "ttft_n": n,
        "ttft_median_s": (at((n - 1) // 2) + at(n // 2)) / 2,
        "ttft_min_s": ttft.min(),
        "ttft_max_s": ttft.max(),
        # Added up in the rows' order: a sum in any order would differ in the last bits from run to run.
        "ttft_mean_s": ttft.cum_sum().last() / n,
        "ttft_p90_s": quantile(0.90),
        "ttft_p99_s": quantile(0.99),
        "output_tokens": pl.when(output.null_count() == 0).then(output.sum()),
        "prompt_tokens_sent": pl.col("prompt_tokens").filter("ok").sum(),
        "prompt_length": pl.when(pl.col("prompt_tokens").n_unique() == 1).then(pl.col("prompt_tokens").first()),
    }


_PASS = _pass_columns()
