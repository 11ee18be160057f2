"""Trial folders as they lie on disk: what can be read of them, and what became of each trial."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import polars as pl
from pydantic import ValidationError

from kvladder.config.records import TrialRecord, Verdict

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


_SAMPLE = dict.fromkeys(("t_ns", "sampler_cpu_ns", "pcie_tx_bytes", "pcie_rx_bytes"), pl.Int64)


def samples(folder: Path) -> pl.DataFrame:
    """A trial's host and device samples in order, as far as tables show them; no rows where there are none."""
    try:
        return pl.read_ndjson(folder / "probes.jsonl", schema=_SAMPLE)
    except (OSError, pl.exceptions.PolarsError):
        return pl.DataFrame(schema=_SAMPLE)


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return " ".join((".".join(str(part) for part in first["loc"]), first["msg"])).strip()
    return str(error).splitlines()[0]


def canonical(value: object) -> str:
    """JSON text that is equal for equal values."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
