"""Every test here starts real processes, and afterwards nothing of them may be left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvladder.serving import ports
from kvladder.serving.process import ProcessSpec, Readiness, ServerGroup, servers

HERE = Path(__file__).parent
FAKE = HERE / "servers" / "fake.py"
MARK = "KVL_TEST_MARK"


def marked(mark: str) -> list[str]:
    """Return all living processes that inherited this test's environment; on purpose no code of the library."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(f"{entry.name} {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}")
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Return the first true answer of ``condition``; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail(f"condition not met within {seconds} s")


def _heed_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@dataclass
class World:
    """A test's place: folder, ports, names, and the ways to start what it needs."""

    folder: Path
    ports: list[int]
    mark: str
    lines: list[str] = field(default_factory=list)

    @property
    def tag(self) -> str:
        return f"kvl-{self.mark[:12]}"

    @property
    def pid_file(self) -> Path:
        return self.folder / "pids"

    def pids(self) -> list[int]:
        return [int(line) for line in self.pid_file.read_text().split()] if self.pid_file.exists() else []

    def argv(self, *options: object, place: int = 0) -> list[str]:
        fixed = [sys.executable, str(FAKE), "--port", str(self.ports[place]), "--pids", str(self.pid_file)]
        return [*fixed, *map(str, options)]

    def spec(self, *options: object, place: int = 0, name: str = "engine", **changes: Any) -> ProcessSpec:
        values: dict[str, Any] = {
            "name": name,
            "argv": self.argv(*options, place=place),
            "env": {},
            "cwd": self.folder,
            "log": self.folder / f"{name}.log",
            "ready": Readiness(port=self.ports[place], http_path="/health", deadline_s=15),
        }
        return ProcessSpec(**(values | changes))

    def servers(self, *specs: ProcessSpec, **options: Any) -> ServerGroup:
        values: dict[str, Any] = {"caches": self.folder / "caches", "grace_s": 5, "progress": self.lines.append}
        return servers(specs, self.tag, **(values | options))

    def job(
        self, *specs: ProcessSpec, mode: str = "sleep", grace_s: float = 5, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a job process of its own that runs the specs, with the signals of a terminal.

        A test run under nohup ignores SIGHUP, a job in a shell's background SIGINT; children would inherit that.
        """
        order = {
            "tag": self.tag,
            "caches": str(self.folder / "caches"),
            "grace_s": grace_s,
            "specs": [
                {
                    "name": spec.name,
                    "argv": list(spec.argv),
                    "log": str(spec.log),
                    "port": spec.ready.port,
                    "deadline_s": spec.ready.deadline_s,
                }
                for spec in specs
            ],
        }
        path = self.folder / "order.json"
        path.write_text(json.dumps(order))
        return subprocess.Popen(
            [sys.executable, str(HERE / "servers" / "job.py"), str(path), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **{"preexec_fn": _heed_signals, **options},
        )

    def shm_names(self) -> list[str]:
        return [entry.name for entry in Path("/dev/shm").iterdir() if self.mark[:12] in entry.name]

    def is_clean(self) -> bool:
        return not marked(self.mark) and not self.shm_names()


def read_until(job: subprocess.Popen[str], word: str) -> list[str]:
    """Read the job's output up to the line that starts with ``word``."""
    assert job.stdout is not None
    lines = []
    for line in job.stdout:
        lines.append(line.strip())
        if line.startswith(word):
            return lines
    pytest.fail(f"job ended without {word}: {lines} {job.stderr.read() if job.stderr else ''}")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Give a place, and check after the test: no survivor, ports free, nothing left in /dev/shm."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    with ports.reserve(3) as reserved:
        place = World(folder=tmp_path, ports=reserved.ports, mark=mark)
        yield place
        survivors = marked(mark)
        left = place.shm_names()
        for name in left:
            (Path("/dev/shm") / name).unlink()
        for line in survivors:
            os.kill(int(line.split()[0]), 9)
        assert not survivors, survivors
        assert not left, left
        assert [ports.owner_of(port) for port in place.ports] == [None, None, None]
