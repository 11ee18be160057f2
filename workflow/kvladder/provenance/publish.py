"""Published results: raw data of a finished experiment in one small archive, and its report rebuilt from nothing else.

An experiment's raw data are its trials, those of a truth bench (``workflow/bench.smk``) its cells. Captures for
timelines are published as an experiment of their own, as the tables that they were reduced to.
``python -m kvladder.provenance.publish pack CONFIG NAME`` writes ``results/published/NAME``: ``raw.tar.xz`` and
``experiment.yaml``, the config that gave it. ``… rebuild`` unpacks each of them where it isn't yet and builds its
report into ``reports/published/NAME.*``, with a budget of no time: nothing is ever measured for it. ``derived.sha256``
holds the hashes of the tables and figures: a rebuild that gives others fails, unless ``--record`` takes them as the new
ones.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

from kvladder.config import rooflines
from kvladder.config.yaml import load_file

PUBLISHED = Path("results", "published")
REPORTS = Path("reports", "published")
RAW = "raw.tar.xz"
CONFIG = "experiment.yaml"
SUMS = "derived.sha256"
REDUCED = "timelines/captures/*/tables"
"""What is left of captures for timelines: a profiler's own files are large, and name what else ran on the machine."""
RECORDS = ("trials/*/*/*/trial.json", "cells/*/*/*/*/cell.json")
"""What is written last into the folder of a trial or a cell: it is finished."""
LEFT_OUT = ("verdict.json", "own-verdict.json", "client.log")
"""Files that judging makes from the raw ones, and made again; and what a load client printed, which nothing reads."""
LEFT_OUT_FOLDER = "columns"
"""Below a trial: its requests once more, by `kvladder.tables.columns`."""
TIMELINE_RULES = (
    "timelines",
    "collect_timelines",
    "draw_timeline_figure",
    "write_perfetto",
    "write_timeline_report",
)
"""Rules that begin at reduced captures: nothing is captured."""
BENCH = "workflow/bench.smk"
BENCH_RULES = ("all", "bench_tables", "draw_bench_figure", "write_bench_report")
"""Rules that begin at stored cells: with only these a cell that is missing is an error, not a measurement."""


def pack(experiment: Path, archive: Path) -> int:
    """Archive the raw files of every finished trial or cell, and every capture's tables; returns how many there are.

    Equal input gives an equal archive, byte for byte: sorted names, no times, no owners. Raises OSError.
    """
    finished = sorted(path.parent for pattern in RECORDS for path in experiment.glob(pattern))
    finished += sorted(experiment.glob(REDUCED))
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_name(f".{archive.name}.partial")
    with lzma.open(partial, "wb", preset=6) as compressed, tarfile.open(fileobj=compressed, mode="w") as tar:
        for path in _files([*finished, *rooflines.files(experiment)]):
            data = repacked(path) if path.suffix == ".parquet" else path.read_bytes()
            entry = tarfile.TarInfo(path.relative_to(experiment).as_posix())
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    partial.rename(archive)
    return len(finished)


def repacked(path: Path) -> bytes:
    """A Parquet file not compressed, xz does that better, and a cell's requests less what their other columns give.

    Left out are ``last_read_ns`` (``due_ns`` less the scripted TTFT) and ``client_first_token_ns`` (``client_send_ns``
    and ``client_ttft_ns``). Raises OSError or polars' ComputeError.
    """
    import polars as pl  # noqa: PLC0415 (not needed for trials)

    packed = io.BytesIO()
    frame = pl.read_parquet(path).drop("last_read_ns", "client_first_token_ns", strict=False)
    frame.write_parquet(packed, compression="uncompressed", statistics=False)
    return packed.getvalue()


def _files(places: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for place in places:
        if place.is_file():
            found.append(place)
        elif place.is_dir():
            here = (path for path in place.rglob("*") if path.is_file() and path.name not in LEFT_OUT)
            found += [path for path in here if path.parent.name != LEFT_OUT_FOLDER]
    return sorted(found)


def unpack(archive: Path, experiment: Path) -> None:
    """Unpack an archive below ``results/<experiment>``; what lies there stays. Raises OSError or tarfile.TarError."""
    with tarfile.open(archive, "r:xz") as tar:
        for member in tar:
            target = experiment / member.name
            if not target.exists():
                tar.extract(member, experiment, filter="data")


class Differs(Exception):
    """What is asked for isn't published, or its tables and figures come out otherwise than published."""


def derived_sums(experiment: Path) -> dict[str, str]:
    """SHA-256 of every table (CSV) and figure (SVG) below ``results/<experiment>``, by relative path."""
    places = [experiment, experiment / "timelines"]
    files = sorted(path for place in places for part in ("tables/*.csv", "figures/*.svg") for path in place.glob(part))
    return {path.relative_to(experiment).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def rebuild(root: Path, names: Iterable[str] = (), *, record: bool = False) -> list[Path]:
    """Build the reports of the published results (all of them by default) and return their paths.

    Works in ``root``. Raises CalledProcessError when a build fails, Differs when a table or figure isn't byte for byte
    the published one; with ``record`` they become the published ones.
    """
    reports: list[Path] = []
    there = {path.parent.name: path.parent for path in sorted((root / PUBLISHED).glob(f"*/{RAW}"))}
    for name in list(names) or there:
        if name not in there:
            raise Differs(f"{name!r} isn't published; there is: {', '.join(there) or 'nothing'}")
        folder = there[name]
        # A folder of its own: what was measured here under the experiment's name stays apart, and stays to be measured.
        experiment = f"published-{folder.name}"
        unpack(folder / RAW, root / "results" / experiment)
        timelines = any((root / "results" / experiment).glob(REDUCED))
        argv = [sys.executable, "-m", "snakemake", *_targets(folder / CONFIG, timelines=timelines), "--cores", "all"]
        argv += ["--config", f"experiment={experiment}"]
        argv += ["--configfile", str((folder / CONFIG).relative_to(root))]
        subprocess.run(argv, cwd=root, check=True, env={**os.environ, "KVLADDER_BUDGET_S": "0"})
        _compare(folder / SUMS, derived_sums(root / "results" / experiment), record=record)
        for ending in ("html", "pdf"):
            target = root / REPORTS / f"{folder.name}.{ending}"
            target.parent.mkdir(parents=True, exist_ok=True)
            page = f"{experiment}-timelines" if timelines else experiment
            shutil.copyfile(root / "reports" / f"{page}.{ending}", target)
            reports.append(target)
        for trace in (root / "reports" / "perfetto").glob(f"{experiment}-*.json.gz"):
            (root / REPORTS / "perfetto").mkdir(exist_ok=True)
            shutil.copyfile(trace, root / REPORTS / "perfetto" / trace.name)
    return reports


def _targets(config: Path, *, timelines: bool) -> list[str]:
    """What snakemake is asked for, to make a report from stored raw data."""
    if timelines:
        return ["timelines", "--allowed-rules", *TIMELINE_RULES]
    if "blocks" in load_file(config):
        return ["all", "-s", BENCH, "--allowed-rules", *BENCH_RULES]
    return ["report"]


def _compare(path: Path, sums: dict[str, str], *, record: bool) -> None:
    text = "".join(f"{value}  {name}\n" for name, value in sums.items())
    if record:
        path.write_text(text, encoding="utf-8")
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    published = {name: value for value, name in (line.split("  ", 1) for line in lines)}
    changed = sorted(name for name in {*published, *sums} if published.get(name) != sums.get(name))
    if changed:
        raise Differs(f"{path}: other bytes than published: {', '.join(changed)}; --record accepts them")


def main() -> None:
    """Command line: see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("config", type=Path, help="the experiment's config file")
    packing.add_argument("name", help="name under results/published")
    rebuilding = commands.add_parser("rebuild")
    rebuilding.add_argument("names", nargs="*")
    rebuilding.add_argument("--record", action="store_true", help="take the tables and figures as the published ones")
    given = parser.parse_args()
    if given.command == "rebuild":
        try:
            for path in rebuild(Path.cwd(), given.names, record=given.record):
                print(path.relative_to(Path.cwd()))
        except Differs as error:
            sys.exit(f"kvladder: {error}")
        return
    folder = PUBLISHED / given.name
    experiment = str(load_file(given.config)["experiment"])
    count = pack(Path("results", experiment), folder / RAW)
    shutil.copyfile(given.config, folder / CONFIG)
    print(f"{count} trials, cells or captures, {(folder / RAW).stat().st_size} bytes: {folder / RAW}")


if __name__ == "__main__":
    main()
