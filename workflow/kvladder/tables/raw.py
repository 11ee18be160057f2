"""Trial folders as they lie on disk: what can be read of them, and what became of each trial."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import polars as pl
from pydantic import ValidationError

from kvladder.config.records import TrialRecord, Verdict
from kvladder.tables.model import SCHEMAS

Status = Literal["valid", "invalid", "failed"]


@dataclass(frozen=True)
class RawTrial:
    """One trial folder. ``record`` is None for a trial that never finished, ``verdict`` for one that wasn't judged."""

    folder: Path
    setup: str
    suite: str
    repeat: int
    run: str
    record: TrialRecord | None
    verdict: Verdict | None
    status: Status
    reason: str | None

    @property
    def key(self) -> dict[str, str | int]:
        """The columns that name a trial in every table."""
        return {"setup": self.setup, "suite": self.suite, "repeat": self.repeat, "run": self.run}


def read_trial(folder: Path) -> RawTrial:
    """Read ``trial.json`` and ``verdict.json`` of ``…/<setup>/<suite>/r<repeat>-<run>``.

    Never raises for what the files contain: a trial without a readable record is ``failed``, one without a verdict
    ``invalid``, each with the reason.
    """
    repeat, _, run = folder.name.removeprefix("r").partition("-")
    setup, suite = folder.parent.parent.name, folder.parent.name
    record = verdict = None
    status: Status
    reason: str | None
    try:
        record = TrialRecord.model_validate_json((folder / "trial.json").read_bytes())
    except FileNotFoundError:
        status, reason = "failed", "the trial never finished: it has no trial.json"
    except (OSError, ValidationError) as error:
        status, reason = "failed", f"trial.json can't be read: {_first_line(error)}"
    else:
        setup, suite, repeat, run = record.setup, record.suite, str(record.repeat), record.run
        try:
            verdict = Verdict.model_validate_json((folder / "verdict.json").read_bytes())
        except FileNotFoundError:
            status, reason = "invalid", "the trial was not judged: it has no verdict.json"
        except (OSError, ValidationError) as error:
            status, reason = "invalid", f"verdict.json can't be read: {_first_line(error)}"
        else:
            status, reason = verdict.status, verdict.reason
            if (verdict.setup, verdict.suite, verdict.repeat, verdict.run) != (setup, suite, record.repeat, run):
                status, reason, verdict = "invalid", "verdict.json belongs to another trial", None
        if record.status == "failed":
            status, reason = "failed", record.reason or reason
    return RawTrial(folder, setup, suite, int(repeat), run, record, verdict, status, reason)


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return " ".join((".".join(str(part) for part in first["loc"]), first["msg"])).strip()
    return str(error).splitlines()[0]


class UnreadableRequestsError(ValueError):
    """A request file that is missing, cut or damaged; the message names it."""


_S = 1_000_000_000

# What is read of a request's line: token ids and log probabilities, most of the file, are skipped.
_LINE: dict[str, Any] = {
    "workload": pl.String,
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


def read_requests(trial: RawTrial) -> pl.DataFrame:
    """The requests of a trial, one row each, as in the table ``requests``.

    Files are scanned and reduced one at a time, so that chunk lists, the bulk of them, never pile up. Raises
    UnreadableRequestsError.
    """
    assert trial.record is not None  # noqa: S101 (only trials with a record get here)
    parts = []
    for workload in dict.fromkeys(part.workload for part in trial.record.passes):
        name = f"{workload}.requests.jsonl"
        entry = trial.record.files.get(name)
        try:
            with (trial.folder / name).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            if entry is None or content != entry.sha256:
                # Verdicts are older than this reading: a file that was changed since must not come in under them.
                raise UnreadableRequestsError(f"{name} isn't what the trial wrote")
            part = _derive(pl.scan_ndjson(trial.folder / name, schema=_LINE)).collect(engine="streaming")
        except FileNotFoundError:
            raise UnreadableRequestsError(f"{name} is missing") from None
        except (OSError, pl.exceptions.PolarsError) as error:
            raise UnreadableRequestsError(f"{name} can't be read: {str(error).splitlines()[0]}") from None
        parts.append(part)
    rows = pl.concat(parts) if parts else pl.DataFrame(schema=_derive(pl.LazyFrame(schema=_LINE)).collect_schema())
    named = rows.with_columns(**{key: pl.lit(value) for key, value in trial.key.items()})
    return named.select(SCHEMAS["requests"].keys()).cast(pl.Schema(SCHEMAS["requests"]))


def _derive(lines: pl.LazyFrame) -> pl.LazyFrame:
    gaps = pl.col("chunk_ns").list.diff(null_behavior="drop")
    after_first = pl.col("output_tokens") - pl.col("chunk_tokens").list.first()
    return lines.select(
        "workload",
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


def failed_with(trial: RawTrial, reason: str) -> RawTrial:
    """The same trial, failed for a reason that only showed when its requests were read."""
    return RawTrial(
        trial.folder, trial.setup, trial.suite, trial.repeat, trial.run, trial.record, trial.verdict, "failed", reason
    )


def canonical(value: object) -> str:
    """JSON text that is equal for equal values."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
