"""The requests of many trials as one table that never lies in memory as a whole.

Files are reduced by streaming into parts on disk, some hundred megabytes of them at a time: chunk lists, the bulk of
the files, exist only while they are parsed. Of a trial whose columns were kept when it was judged, those are the parts.
What other tables need of the requests is taken from the parts' columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import polars as pl

from kvladder.config.records import FileEntry
from kvladder.stats.samples import CARRIED
from kvladder.tables import columns
from kvladder.tables.model import SCHEMAS
from kvladder.tables.raw import RawTrial

Row = dict[str, Any]

_BATCH_BYTES = 256 << 20
_BATCH_TRIALS = 100
"""Trials that are read in one query: a query a file would cost more than parsing where files are small."""
_HASHED_AT_ONCE = 2


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
        try:
            with self.path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            return f"{self.name} is missing"
        except OSError as error:
            return f"{self.name} can't be read: {error}"
        as_written = self.entry is not None and content == self.entry.sha256
        return None if as_written else f"{self.name} isn't what the trial wrote"

    @property
    def entry(self) -> FileEntry | None:
        """What the trial says of it."""
        assert self.trial.record is not None  # noqa: S101 (only trials with a record are read)
        return self.trial.record.files.get(self.name)

    def kept(self) -> Path | None:
        """Its columns, where judging the trial left some of this very file."""
        if self.entry is None:
            return None
        path = columns.kept(self.trial.folder, self.workload, self.entry.sha256)
        return path if path.is_file() else None

    def rows(self, kept: Path | None = None) -> pl.LazyFrame:
        """Its requests, one row each, as in the table, and the file's number; from its columns, if they were kept."""
        own = {**self.trial.key, "workload": self.workload}
        read = columns.parsed(self.path) if kept is None else pl.scan_parquet(kept)
        named = read.with_columns(pl.lit(value).alias(column) for column, value in own.items())
        return named.select(
            *(pl.col(column).cast(kind) for column, kind in SCHEMAS["requests"].items()),
            file=pl.lit(self.number, dtype=pl.Int32),
        )


class RequestStore:
    """The requests of trials that were added, in parts: files below ``folder``, and columns that were kept.

    Rows are in the order in which trials were added, inside a trial by workload, round and index.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[_File] = []
        self._parts: list[pl.LazyFrame] = []

    def add(self, trials: Iterable[RawTrial]) -> list[RawTrial]:
        """Read the requests of valid trials. Returns all trials in the order given; one whose requests can't be read
        is ``failed``, and the reason names the file."""
        everything = list(trials)
        valid = [(place, self._number(trial)) for place, trial in enumerate(everything) if trial.status == "valid"]
        failed: dict[int, str] = {}
        with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
            for kept, group in groupby(valid, lambda item: all(file.kept() for file in item[1])):
                if kept:
                    failed |= self._take(list(group), pool)
                    continue
                for batch in _batches(group):
                    failed |= self._read(dict(batch), pool)
        return [
            replace(trial, status="failed", reason=failed[place]) if place in failed else trial
            for place, trial in enumerate(everything)
        ]

    def _take(self, trials: Sequence[tuple[int, list[_File]]], pool: ThreadPoolExecutor) -> dict[int, str]:
        """Take the kept columns of these trials; returns why some failed, by place."""
        failed = {}
        damages = pool.map(_damage, (files for _, files in trials))
        for (place, files), damage in zip(trials, damages, strict=True):
            if damage is not None:
                failed[place] = damage
            else:
                self._parts += [file.rows(file.kept()) for file in files]
        return failed

    def _read(self, files: Mapping[int, list[_File]], pool: ThreadPoolExecutor) -> dict[int, str]:
        """Parse the files of these trials in one query, else one by one; returns why some failed, by place."""
        # Hashing takes as long as a tenth of the parsing; files that turn out to be others are rare.
        checks = pool.submit(lambda: {place: _damage(part) for place, part in files.items()})
        try:
            self._sink([file for part in files.values() for file in part])
            whole = True
        except (OSError, pl.exceptions.PolarsError):
            whole = False
        failed = {place: reason for place, reason in checks.result().items() if reason is not None}
        if whole and not failed:
            return {}
        if whole:
            self._parts.pop()
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
        path = self._folder / f"{files[0].number}-{files[-1].number}.parquet"
        columns.sink(pl.concat([file.rows() for file in files]), path, by=("file", "round", "index"))
        self._parts.append(pl.scan_parquet(path))

    def by_pass(self) -> dict[tuple[str, str, int, str, int], Row]:
        """What ``passes`` holds of requests, by setup, suite, repeat, workload and round."""
        found = {}
        for part in self._parts:
            rows = part.select("file", "round", "ttft_s", "output_tokens", "prompt_tokens", ok=pl.col("status") == "ok")
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
            rows = part.filter(pl.col("status") == "ok")
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
        return self._named(pl.concat(self._parts), cells).select(SCHEMAS["requests"].keys())

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


def _batches(trials: Iterable[tuple[int, list[_File]]]) -> Iterator[list[tuple[int, list[_File]]]]:
    batch: list[tuple[int, list[_File]]] = []
    size = 0
    for place, files in trials:
        batch.append((place, files))
        size += sum(file.entry.bytes for file in files if file.entry is not None)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_TRIALS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _damage(files: Iterable[_File]) -> str | None:
    return next((reason for file in files if (reason := file.damage()) is not None), None)


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
