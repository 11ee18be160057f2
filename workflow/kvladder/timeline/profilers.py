"""How servers are started under a profiler, when it records, and what files it leaves.

Two ways. `Nsys` sees copies and kernels of every process on a GPU, in one recording: ``nsys profile`` ends a recording
that an API call of the program began, and takes no second one. `Torch` works anywhere, for the engine alone, and writes
a trace each time that it is stopped.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvladder.counters.reading import ENGINE
from kvladder.serving import procfs
from kvladder.serving.process import ProcessSpec, ServerGroup

MARKS_FOLDER, MARKS_RANGES = "KVLADDER_MARKS", "KVLADDER_MARKS_RANGES"
"""Variables of the engine plugin (`kvladder_engine_plugin.marks`)."""

_POLL_S = 0.2
_STEADY_S = 1.0
_NSIGHT = "/opt/nvidia"
_HOMES = ("nsight-compute/*/host/target-linux-x64/nsys", "nsight-systems/*/target-linux-x64/nsys")
_IMPORTERS = ("nsight-compute/*/host/linux-desktop-*/QdstrmImporter", "nsight-systems/*/host-linux-x64/QdstrmImporter")


class TraceMissing(RuntimeError):
    """The profiler left no usable file; the message says for which window, and names a file that is there but cut."""


@dataclass(frozen=True, slots=True)
class Window:
    """One recording: its name, and the files that it left."""

    name: str
    files: tuple[Path, ...]


class Profiler(ABC):
    """A profiler of one capture; ``folder`` (absolute) is where its files go."""

    name: Literal["nsys", "torch"]
    once = False
    """Whether a server takes one recording only."""

    def __init__(self, folder: Path, deadline_s: float) -> None:
        self.folder, self.deadline_s = folder, deadline_s
        folder.mkdir(parents=True, exist_ok=True)

    def prepare(self, spec: ProcessSpec, python: Path) -> ProcessSpec:
        """The same server with its marks written, and the profiler around it."""
        env = {**spec.env, MARKS_FOLDER: str(self.folder), MARKS_RANGES: "nvtx" if self.name == "nsys" else self.name}
        return self._around(replace(spec, env=env), python)

    @abstractmethod
    def _around(self, spec: ProcessSpec, python: Path) -> ProcessSpec: ...

    @abstractmethod
    def began(self) -> None:
        """The engine has been told to start its profile."""

    @abstractmethod
    def ended(self, name: str, group: ServerGroup) -> Window:
        """The engine has stopped its profile: wait for the files. Raises TraceMissing."""


class Torch(Profiler):
    """torch's profiler inside the engine's workers, one trace a rank and window."""

    name = "torch"

    def __init__(self, folder: Path, deadline_s: float, ranks: int = 1) -> None:
        super().__init__(folder, deadline_s)
        self.ranks = ranks
        self._before: set[Path] = set()

    def _around(self, spec: ProcessSpec, python: Path) -> ProcessSpec:
        if spec.name != ENGINE:
            return spec
        config = {
            "profiler": "torch",
            "torch_profiler_dir": str(self.folder),
            "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
            "ignore_frontend": True,  # a second trace without a rank in its name, of nothing that marks don't say
        }
        # The engine's own scopes (preprocess, forward, sample) in its trace.
        env = {**spec.env, "VLLM_CUSTOM_SCOPES_FOR_PROFILING": "1"}
        return replace(spec, argv=[*spec.argv, "--profiler-config", json.dumps(config)], env=env)

    def began(self) -> None:
        """From now on only new files count."""
        self._before = set(traces(self.folder))

    def ended(self, name: str, group: ServerGroup) -> Window:
        """One new, whole trace a rank."""
        return Window(name, await_traces(self.folder, self._before, self.ranks, self.deadline_s, name))


def traces(folder: Path) -> list[Path]:
    """torch's traces in a folder, sorted."""
    return sorted(path for path in folder.iterdir() if path.name.endswith((".pt.trace.json", ".pt.trace.json.gz")))


def await_traces(folder: Path, before: set[Path], ranks: int, deadline_s: float, window: str) -> tuple[Path, ...]:
    """New whole traces, one a rank, as soon as they are there.

    A profiler that is started and stopped a second time may answer that all is well and write nothing; ranks may be
    missing, or share a path. Raises TraceMissing when the deadline passes: files of earlier windows are never taken,
    and one that is cut is named.
    """
    end = time.monotonic() + deadline_s
    while True:
        new = [path for path in traces(folder) if path not in before]
        if len(new) >= ranks:
            cut = [path.name for path in new if not is_whole(path)]
            if not cut:
                return tuple(new)
        else:
            cut = []
        if time.monotonic() >= end:
            if cut:
                raise TraceMissing(f"window {window}: cut or unreadable: {', '.join(cut)}")
            have = f"{len(new)} of {ranks} traces" if new else "no trace"
            raise TraceMissing(f"{have} for window {window} within {deadline_s:g} s")
        time.sleep(_POLL_S)


def is_whole(path: Path) -> bool:
    """Whether a trace has been written to its end: a gzip file checks out, and the last character closes the object."""
    opener = gzip.open if path.suffix == ".gz" else open
    last = b""
    try:
        with opener(path, "rb") as file:
            while chunk := file.read(1 << 20):
                last = chunk.rstrip() or last
    except (OSError, EOFError, zlib.error):
        return False
    return last.endswith(b"}")


class Nsys(Profiler):
    """NVIDIA Nsight Systems around every process that uses the GPU; one recording a server."""

    name = "nsys"
    once = True

    def __init__(self, folder: Path, deadline_s: float, tools: NsysTools, side: Sequence[str] = ()) -> None:
        """``side`` names side processes that use the GPU."""
        super().__init__(folder, deadline_s)
        self.tools, self._side = tools, frozenset(side)
        self._programs: dict[str, list[str]] = {}

    @property
    def switch(self) -> Path:
        """While this file is there, side processes are recorded."""
        return self.folder / "recording"

    def _around(self, spec: ProcessSpec, python: Path) -> ProcessSpec:
        if spec.name != ENGINE and spec.name not in self._side:
            return spec
        argv = list(spec.argv)
        if spec.name == ENGINE:
            argv += ["--profiler-config", '{"profiler":"cuda"}']
        else:
            argv = [str(python), "-m", "kvladder_engine_plugin.profiled", str(self.switch), *argv]
        self._programs[spec.name] = argv
        # The engine's own scopes as NVTX ranges, where its `nvtx` package is there (LMCache brings it along).
        env = {**spec.env, "VLLM_NVTX_SCOPES_FOR_PROFILING": "1"}
        return replace(spec, argv=[*self.tools.profile(self.folder / spec.name), *argv], env=env)

    def began(self) -> None:
        """Side processes follow the switch; they look often."""
        self.switch.touch()
        time.sleep(_STEADY_S)

    def ended(self, name: str, group: ServerGroup) -> Window:
        """A report a process. Where none comes while the program runs, it is asked to end: nsys then writes."""
        self.switch.unlink(missing_ok=True)
        for server in self._programs:
            if self._report(server, self.deadline_s) is None:
                for pid in _running(group.named(server).tree(), self._programs[server]):
                    os.kill(pid, signal.SIGTERM)
                if self._report(server, self.deadline_s) is None:
                    raise TraceMissing(f"nsys wrote no report of {server} within {2 * self.deadline_s:g} s")
        return Window(name, tuple(self._found(server)[0] for server in self._programs))

    def _found(self, server: str) -> list[Path]:
        """Reports of a server; one that needs no import first."""
        return [path for path in (self.folder / f"{server}{end}" for end in (".nsys-rep", ".qdstrm")) if path.is_file()]

    def _report(self, server: str, deadline_s: float) -> Path | None:
        """The report once it doesn't grow any more."""
        end, size, since = time.monotonic() + deadline_s, -1, time.monotonic()
        while time.monotonic() < end:
            found = self._found(server)
            now = found[0].stat().st_size if found else -1
            if now != size:
                size, since = now, time.monotonic()
            elif now > 0 and time.monotonic() - since >= _STEADY_S:
                return found[0]
            time.sleep(_POLL_S)
        return None

    def databases(self, window: Window, say: Callable[[str], None]) -> dict[str, Path]:
        """SQLite database of each process, by server. Raises TraceMissing with the tool's own words."""
        found = {}
        for report in window.files:
            say(f"nsys: {report.name}, {report.stat().st_size / 1e6:.1f} MB")
            found[report.stem] = self.tools.database(report, self.deadline_s * 4)
        return found


def _running(pids: Sequence[int], argv: Sequence[str]) -> list[int]:
    """Processes whose command line is exactly this: the program itself, and not the profiler before it."""
    wanted = [part.encode() for part in argv]
    found = []
    for pid in pids:
        try:
            line = (procfs.PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[:-1]
        except OSError:
            continue
        if line[1:] == wanted[1:]:
            found.append(pid)
    return found


@dataclass(frozen=True, slots=True)
class NsysTools:
    """Programs of Nsight Systems. ``importer`` is what makes a report of a raw recording where `nsys` alone can't: on
    machines that have only the target's half, as it comes with Nsight Compute."""

    nsys: Path
    importer: Path | None = None

    @classmethod
    def find(cls) -> NsysTools | None:
        """On PATH, or under /opt/nvidia; None where there is none."""
        on_path = shutil.which("nsys")
        home = Path(_NSIGHT)
        found = [Path(on_path)] if on_path else [path for mask in _HOMES for path in sorted(home.glob(mask))]
        importers = [path for mask in _IMPORTERS for path in sorted(home.glob(mask))]
        return cls(found[-1], importers[-1] if importers else None) if found else None

    def profile(self, report: Path) -> list[str]:
        """Words before a program's own; recording begins and ends with its calls of cudaProfilerStart and …Stop."""
        return [
            str(self.nsys),
            "profile",
            "--trace=cuda,nvtx",
            "--sample=none",
            "--cpuctxsw=none",
            "--trace-fork-before-exec=true",
            "--capture-range=cudaProfilerApi",
            "--capture-range-end=stop",
            f"--output={report}",
        ]

    def database(self, report: Path, deadline_s: float) -> Path:
        """Import where needed, then export to SQLite, beside the report. Raises TraceMissing."""
        if report.suffix == ".qdstrm":
            if self.importer is None:
                raise TraceMissing(f"{report.name} needs QdstrmImporter, which isn't there")
            imported = report.with_suffix(".nsys-rep")
            paths = [str(self.importer.parent), os.environ.get("LD_LIBRARY_PATH", "")]
            env = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(path for path in paths if path)}
            _call([str(self.importer), "-i", str(report), "-o", str(imported)], imported, deadline_s, env)
            report = imported
        database = report.with_suffix(".sqlite")
        argv = [str(self.nsys), "export", "--type", "sqlite", "--force-overwrite", "true", "-o", str(database)]
        _call([*argv, str(report)], database, deadline_s, dict(os.environ))
        return database


def _call(argv: Sequence[str], result: Path, deadline_s: float, env: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=deadline_s, check=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TraceMissing(f"{Path(argv[0]).name}: {error}") from error
    if not result.is_file():
        raise TraceMissing(f"{Path(argv[0]).name} made no {result.name} (exit {done.returncode}): {done.stdout[-500:]}")
