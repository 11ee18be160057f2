"""What a report says about where the numbers come from: hosts, stacks, harness; servers and settings by setup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvladder.tables.raw import RawTrial, canonical


def context(raw: Sequence[RawTrial], baseline: str, twins: Mapping[str, set[str]]) -> dict[str, Any]:
    """JSON for ``context.json``. Each distinct host, stack and harness is there once; a setup shows its first trial,
    a valid one where there is one. `twins` names, by setup, the others configured as it is: ``controls`` are the
    baseline's, ``repeated`` the groups of other setups that are there more than once."""
    recorded = [trial for trial in raw if trial.record is not None]
    shown: dict[str, RawTrial] = {}
    for trial in sorted(recorded, key=lambda item: (item.status != "valid", item.suite, item.repeat)):
        shown.setdefault(trial.setup, trial)
    records = [trial.record for trial in recorded if trial.record is not None]
    groups = {frozenset({setup, *others}) for setup, others in twins.items() if others}
    ran = dict.fromkeys((record.suite, part.workload) for record in records for part in record.timed)
    return {
        "schema": 1,
        "experiment": records[0].experiment if records else None,
        "baseline": baseline,
        "controls": sorted(twins.get(baseline, ())),
        "repeated": sorted(sorted(group) for group in groups if baseline not in group),
        "first_started_at": min((record.started_at for record in records), default=None),
        "last_started_at": max((record.started_at for record in records), default=None),
        "workloads": [list(pair) for pair in ran],
        "hosts": _distinct(record.host.model_dump(mode="json") for record in records),
        "stacks": _distinct(record.stack for record in records),
        "harness": _distinct(record.harness for record in records),
        "setups": {setup: _setup(trial) for setup, trial in sorted(shown.items())},
    }


def _setup(trial: RawTrial) -> dict[str, Any]:
    record = trial.record
    assert record is not None  # noqa: S101 (only recorded trials are shown)
    return {
        "kind": record.kind,
        "config": record.config,
        "expected": record.expected,
        "effective": record.effective.model_dump(mode="json"),
        "servers": [{"name": server.name, "argv": server.argv, "env": server.env} for server in record.servers],
    }


def _distinct(values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [value for _, value in sorted({canonical(value): value for value in values}.items())]
