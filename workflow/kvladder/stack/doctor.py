"""Is this machine fit for the experiment? Each check says what it saw, and what to do where it fails."""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from kvladder.config import stack as stacks
from kvladder.config.experiment import ExperimentConfig
from kvladder.config.stack import StackStamp
from kvladder.stack import debian
from kvladder.stack.install import wrong_versions
from kvladder.stack.paths import find, patch_files, stamp_of

_ROOM = 8 * 10**9
"""Bytes of disk that the README asks for: engines, model and results; the first are most of it."""
_ROOM_INSTALLED = 2 * 10**9
"""What is left to write once the engines are installed."""
_SHM = "/dev/shm"  # noqa: S108 (engines put their host tiers there)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor: ``fail`` means that the experiment can't run."""

    state: Literal["ok", "warn", "fail"]
    what: str
    seen: str

    def __str__(self) -> str:
        return f"{self.state:4}  {self.what}: {self.seen}"


def examine(config: ExperimentConfig, results: Path) -> list[Finding]:
    """All findings about this machine for one experiment. Starts no server and changes nothing."""
    folder = find(config.stack)
    findings: list[Finding] = []
    for check in (_stack, _packages, _user, _disk, _tiers_on_disk, _memory, _shm, _loopback, _gpu):
        findings += check(config, folder, results)
    return findings


def _stack(_config: ExperimentConfig, folder: Path, _results: Path) -> Iterator[Finding]:
    stack = stacks.load(folder)
    yield Finding("ok", "harness", f"Python {sys.version.split()[0]}, {sys.executable}")
    patch_files(folder, stack)
    try:
        stamp = StackStamp.model_validate_json(stamp_of(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        yield Finding("fail", f"stack {folder.name}", "not installed: run `snakemake env`")
        return
    wrong = wrong_versions(stack, stamp.packages)
    state: Literal["ok", "fail"] = "fail" if wrong else "ok"
    seen = (
        "; ".join(wrong)
        or f"{stack.engine} {stack.engine_version}, Python {stamp.python}, {len(stamp.patches)} patches"
    )
    yield Finding(state, f"stack {folder.name}", seen)


def _packages(_config: ExperimentConfig, folder: Path, _results: Path) -> Iterator[Finding]:
    stack = stacks.load(folder)
    lacking = debian.missing(stack.debian)
    if lacking:
        yield Finding("fail", "Debian packages", f"missing: apt-get install {' '.join(lacking)}")
    for package in stack.debian:
        library = debian.LIBRARIES.get(package)
        if library is None or package in lacking:
            continue
        try:
            ctypes.CDLL(library)
            yield Finding("ok", package, f"{library} loads")
        except OSError as error:
            yield Finding("fail", package, str(error))


def _user(_config: ExperimentConfig, folder: Path, results: Path) -> Iterator[Finding]:
    caches = folder / ".cache"
    try:
        yield Finding("ok", "user", pwd.getpwuid(os.geteuid()).pw_name)
    except KeyError:
        yield Finding("warn", "user", f"uid {os.geteuid()} has no name: servers get one")
    home = Path.home() if os.environ.get("HOME") else Path("/")
    if not os.access(home, os.W_OK):
        yield Finding("warn", "home", f"{home} can't be written: servers get {caches / 'home'}")
    for what, place in (("results", results), ("caches of the engines", caches)):
        existing = _existing(place)
        if not os.access(existing, os.W_OK | os.X_OK):
            yield Finding("fail", what, f"{existing} can't be written")


def _disk(_config: ExperimentConfig, folder: Path, results: Path) -> Iterator[Finding]:
    existing = _existing(results)
    free = shutil.disk_usage(existing).free
    wanted = _ROOM_INSTALLED if stamp_of(folder).is_file() else _ROOM
    seen = f"{free / 1e9:.1f} GB free at {existing}"
    if free < wanted:
        yield Finding("warn", "disk", f"{seen}, about {wanted / 1e9:.0f} GB are needed")
    else:
        yield Finding("ok", "disk", seen)


def _tiers_on_disk(config: ExperimentConfig, _folder: Path, results: Path) -> Iterator[Finding]:
    """Where setups keep files of KV. How many there will be is known only when their prompts are: see `check_room`."""
    tiers = [setup.file_access(config.engine.block_size or 1) for setup in config.setups.values()]
    wanted: dict[Path, bool] = {}
    for tier in filter(None, tiers):
        place = _existing(Path(tier.path) if tier.path is not None else results)
        wanted[place] = wanted.get(place, False) or tier.direct
    for place, direct in wanted.items():
        seen = f"{shutil.disk_usage(place).free / 1e9:.1f} GB free at {place}"
        if not os.access(place, os.W_OK | os.X_OK):
            yield Finding("fail", "tier on disk", f"{place} can't be written")
        elif direct and not _opens_directly(place):
            lost = "vLLM falls back to the page cache, LMCache stores nothing"
            yield Finding("warn", "tier on disk", f"{seen}, but no O_DIRECT: {lost}; name another disk in `files.path`")
        else:
            yield Finding("ok", "tier on disk", f"{seen}{', O_DIRECT' if direct else ''}")


def _opens_directly(folder: Path) -> bool:
    """Whether the file system below a folder takes O_DIRECT; a file is there for that moment."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            return False
    return True


def _existing(place: Path) -> Path:
    """The folder itself, or the closest one above it that is there."""
    return next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())


def _memory(config: ExperimentConfig, _folder: Path, _results: Path) -> Iterator[Finding]:
    # Some virtual machines grow as memory is touched, so this can only warn.
    largest = _largest_tier(config)
    total = psutil.virtual_memory().total
    yield Finding(
        "warn" if largest > 0.9 * total else "ok", "memory", f"{_gib(total)}, largest host tier {_gib(largest)}"
    )


def _shm(config: ExperimentConfig, _folder: Path, _results: Path) -> Iterator[Finding]:
    try:
        size = shutil.disk_usage(_SHM).free
    except OSError:
        yield Finding("warn", _SHM, "is not there")
        return
    # Only some setups keep their host tier there; the others allocate it.
    largest = max((setup.shared_memory_bytes() for setup in config.setups.values()), default=0)
    state: Literal["ok", "fail"] = "ok" if size >= largest else "fail"
    yield Finding(state, _SHM, f"{_gib(size)} free, the largest setup puts {_gib(largest)} there")


def _largest_tier(config: ExperimentConfig) -> int:
    return max((size for setup in config.setups.values() for size in setup.capacity_bytes().values()), default=0)


def _loopback(_config: ExperimentConfig, _folder: Path, _results: Path) -> Iterator[Finding]:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            with socket.create_connection(listener.getsockname(), timeout=2):
                yield Finding("ok", "loopback", "listens and connects")
    except OSError as error:
        yield Finding("fail", "loopback", str(error))


def _gpu(_config: ExperimentConfig, folder: Path, _results: Path) -> Iterator[Finding]:
    if stacks.load(folder).device != "cuda":
        return
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("fail", "GPU", str(error))
        return
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    yield Finding("ok" if done.returncode == 0 and lines else "fail", "GPU", "; ".join(lines) or done.stderr.strip())


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
