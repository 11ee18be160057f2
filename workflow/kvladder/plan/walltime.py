"""Where the wall time of a run went, stage by stage: ``python -m kvladder.plan.walltime EXPERIMENT``.

From what Snakemake (file persistence of the pinned version) keeps of each job in ``.snakemake/metadata``, so it costs
nothing while measuring and needs no files of its own. A job that ran again counts with its last time. Trials are split
further by the table ``held``, where the tables are built.
"""

from __future__ import annotations

import argparse
import csv
import json
from base64 import urlsafe_b64decode
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAGES: Mapping[str, tuple[str, ...]] = {
    "install": ("install_stack",),
    "model": ("make_model",),
    "rooflines": ("measure_rooflines",),
    "start": ("start_setup",),
    "measure": ("measure_trial",),
    "timelines": ("capture_timeline",),
    "judge": ("judge_trial", "judge_block", "settle_verdict"),
    "tables": ("build_tables",),
    "figures": ("draw_figure",),
    "report": ("write_report",),
}
"""Rules by what a reader calls them, in the order in which they run."""

HELD: Mapping[str, str] = {
    "start_s": "servers start",
    "warm_up_s": "warm-up",
    "timed_s": "timed passes",
    "between_s": "drains between them",
    "right_kv_s": "right-kv",
    "stop_s": "servers stop",
    "rest_s": "lost with trials that failed",
}
"""Columns of the table ``held`` and what they are."""


@dataclass(frozen=True)
class Stage:
    """One stage's jobs: how many, their seconds added up, and seconds of the clock in which any of them ran."""

    name: str
    jobs: int
    job_s: float
    wall_s: float


def stages(metadata: Path, experiment: str) -> list[Stage]:
    """Stages of an experiment that left a record, in order. Raises OSError for a record that can't be read."""
    rules = {rule: stage for stage, names in STAGES.items() for rule in names}
    # By its log, which every job has to itself: its outputs have records of their own, begun a millisecond apart.
    ran: defaultdict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for output, record in _records(metadata):
        stage = rules.get(record.get("rule") or "")
        start, end = record.get("starttime"), record.get("endtime")
        if stage is None or start is None or end is None:
            continue
        # A stack is every experiment's.
        if stage == "install" or output.startswith((f"results/{experiment}/", f"reports/{experiment}.")):
            job = "".join(record.get("log") or [output])
            other = ran[stage].get(job, (start, end))
            ran[stage][job] = (min(start, other[0]), max(end, other[1]))
    return [
        Stage(name, len(jobs), sum(end - start for start, end in jobs.values()), _covered(jobs.values()))
        for name in STAGES
        if (jobs := ran.get(name))
    ]


def _records(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Output file and record of every job. The file's name is the output's in base64, cut into folders where long."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            parts = path.relative_to(folder).parts
            name = "".join(part.removeprefix("@") for part in parts[:-1]) + parts[-1]
            yield urlsafe_b64decode(name).decode(), json.loads(path.read_bytes())


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def held(table: Path) -> dict[str, float]:
    """Seconds of all trials by part, from ``held.csv``; empty where it isn't there."""
    if not table.is_file():
        return {}
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {words: sum(float(row[column] or 0) for row in rows) for column, words in HELD.items()}


def main() -> None:
    """Print the stages, and below measuring what its trials held the machine for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment")
    parser.add_argument("--metadata", type=Path, default=Path(".snakemake", "metadata"))
    given = parser.parse_args()
    found = stages(given.metadata, given.experiment)
    parts = held(Path("results", given.experiment, "tables", "held.csv"))
    print(f"{'stage':<32}{'jobs':>6}{'job s':>10}{'wall s':>10}")
    for stage in found:
        print(f"{stage.name:<32}{stage.jobs:>6}{stage.job_s:>10.1f}{stage.wall_s:>10.1f}")
        if stage.name == "measure":
            for words, seconds in parts.items():
                print(f"  {words:<30}{'':>6}{seconds:>10.1f}")


if __name__ == "__main__":
    main()
