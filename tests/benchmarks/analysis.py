"""How the analysis grows with what it is given: seconds, CPU seconds and peak memory over size.

    make bench-analysis

or one of its two parts, with PYTHONPATH=tests:tests/unit:

    python tests/benchmarks/analysis.py requests     request records → verdicts, → kept columns, → all tables
    python tests/benchmarks/analysis.py experiment   trials → snakemake -n, tables, figures and reports, a no-op rerun
    python tests/benchmarks/analysis.py table        what was measured, in Markdown

Each point is measured in a process of its own, on data made for it below ``--scratch`` and removed after it. Results go
to ``--out`` as JSON: points of the same kind and size are replaced there, others stay. A benchmark and no test: no
number fails it. A machine that does something else meanwhile gives other numbers; each point says how busy it was.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import experiments
import traffic

from kvladder.provenance.host import describe_host

Point = dict[str, Any]

# A line's bytes without its chunks, and those of a chunk; and what columns and tables add to it.
_LINE_BYTES, _CHUNK_BYTES, _DERIVED_BYTES = 520, 22, 300

_BUILD = """
import sys
from pathlib import Path
from kvladder.tables.build import build, find_trials
build(find_trials(Path(sys.argv[1])), Path(sys.argv[2]), baseline="plain")
"""
_COLUMNS = """
import sys
from pathlib import Path
from kvladder.tables.columns import keep
for folder in sys.argv[1:]:
    keep(Path(folder))
"""
_JUDGE = """
import sys
from pathlib import Path
from kvladder.judge import judge_trial
judge_trial(Path(sys.argv[1]))
"""


def measured(argv: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> Point:
    """Run a command: wall and CPU seconds of it and all its children, and the largest resident memory of one process.

    Raises CalledProcessError, with the command's output printed, when it fails.
    """
    log = folder / "benchmark.log"
    load = os.getloadavg()[0]
    with log.open("wb") as output:
        start = time.monotonic()
        process = subprocess.Popen(argv, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.stderr.write(log.read_text(encoding="utf-8", errors="replace")[-5000:])
        raise subprocess.CalledProcessError(process.returncode, list(argv))
    return {
        "wall_s": round(wall, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "load_before": round(load, 1),
    }


def of_requests(
    scratch: Path, sizes: Sequence[int], chunks: int, per_trial: int, keep: Callable[[Point], None]
) -> None:
    """Records of all trials to all tables, parsed; to the columns that judging keeps, and from them to all tables; of
    one trial to its own verdict, where a trial may have as many."""
    for size in sizes:
        needed = size * (_LINE_BYTES + _CHUNK_BYTES * chunks + _DERIVED_BYTES)
        free = shutil.disk_usage(scratch).free
        if needed > free:
            print(f"{size:,} records of {chunks} chunks need {needed / 1e9:.0f} GB of disk, {free / 1e9:.0f} are free")
            continue
        trials = max(1, size // per_trial)
        folders = traffic.write(scratch, records=size, trials=trials, chunks=chunks)
        root = folders[0].parents[2]
        names = [folder / f"{traffic.WORKLOAD}.requests.jsonl" for folder in folders]
        about = {
            "records": size,
            "chunks": chunks,
            "trials": trials,
            "bytes": sum(path.stat().st_size for path in names),
        }
        steps = {
            "tables: parsed": [_BUILD, str(root), "tables"],
            "columns kept by judging": [_COLUMNS, *map(str, folders)],
            "tables": [_BUILD, str(root), "tables"],
        }
        if trials == 1:
            steps["judge, without columns"] = [_JUDGE, str(folders[0])]
        for what, arguments in steps.items():
            keep({"what": what, **about, **measured([sys.executable, "-c", *arguments], scratch)})
        _empty(scratch)


def of_experiment(scratch: Path, sizes: Sequence[int], keep: Callable[[Point], None]) -> None:
    """Finished trials of `experiments` to their report, and what it costs to find nothing to do."""
    for size in sizes:
        folder = scratch / "clone"
        project = experiments.write(folder, max(1, size // experiments.TRIALS_A_REPEAT))
        environment = project.environment(KVLADDER_BUDGET_S="0")
        steps = {
            "dry run": ["-n", "--quiet"],
            "tables": ["--cores", "2", "tables"],
            "figures and report": ["--cores", "2", "report"],
            "no-op rerun": ["--cores", "2"],
        }
        for what, arguments in steps.items():
            point = measured(project.command(*arguments), folder, environment)
            keep({"what": f"snakemake: {what}", "trials": size, **point})
        _empty(scratch)


def _empty(scratch: Path) -> None:
    for path in scratch.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def keeper(path: Path) -> Callable[[Point], None]:
    """What stores a point: each at once, so that a run that is broken off leaves those that it made."""
    host = describe_host([]).model_dump(mode="json")
    size = ("what", "records", "chunks", "trials")

    def keep(point: Point) -> None:
        point = {**point, "measured_at": datetime.now(UTC).isoformat(timespec="seconds"), "host": host}
        points = json.loads(path.read_text(encoding="utf-8"))["points"] if path.is_file() else []
        points = [other for other in points if any(other.get(key) != point.get(key) for key in size)]
        points.append(point)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schema": 1, "points": points}, indent=1) + "\n", encoding="utf-8")
        about = ", ".join(f"{point[key]:,} {key}" for key in size[1:] if key in point)
        print(
            f"{point['what']}: {about}: {point['wall_s']:.1f} s, {point['cpu_s']:.1f} CPU s, "
            f"{point['peak_rss_bytes'] / 1e9:.2f} GB",
            flush=True,
        )

    return keep


def table(path: Path) -> str:
    """The points of a file as a Markdown table, by kind and size."""
    points = json.loads(path.read_text(encoding="utf-8"))["points"]
    sizes = ("chunks", "records", "trials")
    lines = [
        "| what | records | chunks | trials | seconds | CPU seconds | peak memory, GB | load before |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for point in sorted(points, key=lambda point: (point["what"], *(point.get(key, 0) for key in sizes))):
        counts = [f"{point[key]:,}" if key in point else "" for key in ("records", "chunks", "trials")]
        numbers = [f"{point['wall_s']:.1f}", f"{point['cpu_s']:.1f}", f"{point['peak_rss_bytes'] / 1e9:.2f}"]
        lines.append(f"| {' | '.join([point['what'], *counts, *numbers, str(point['load_before'])])} |")
    hosts = {f"{point['host']['cpu']}, {point['host']['cores']} cores" for point in points}
    return "\n".join([*lines, "", "Measured on: " + "; ".join(sorted(hosts))])


def main() -> None:
    """Command line: see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results", "bench-analysis", "points.json"))
    parser.add_argument("--scratch", type=Path, default=Path("results", "bench-analysis", "scratch"))
    kinds = parser.add_subparsers(dest="kind", required=True)
    requests = kinds.add_parser("requests")
    requests.add_argument("--records", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 10_000_000])
    requests.add_argument("--chunks", type=int, default=16)
    requests.add_argument(
        "--per-trial", type=int, default=100_000, help="records of a trial; fewer records are one trial"
    )
    experiment = kinds.add_parser("experiment")
    experiment.add_argument("--trials", type=int, nargs="+", default=[10, 100, 1000])
    kinds.add_parser("table")
    given = parser.parse_args()
    if given.kind == "table":
        print(table(given.out))
        return
    given.scratch.mkdir(parents=True, exist_ok=True)
    if any(given.scratch.iterdir()):
        sys.exit(f"{given.scratch} isn't empty, and is emptied by this")
    keep = keeper(given.out)
    scratch = given.scratch.resolve()
    if given.kind == "requests":
        of_requests(scratch, given.records, given.chunks, given.per_trial, keep)
    else:
        of_experiment(scratch, given.trials, keep)


if __name__ == "__main__":
    main()
