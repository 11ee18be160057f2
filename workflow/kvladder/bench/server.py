"""Building, running and reading the reference server (``server.c``)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvladder.bench.usage import on_cores
from kvladder.config.bench import Fault

SOURCE = Path(__file__).with_name("server.c")
_LOG_S = 60


class ServerError(RuntimeError):
    """The reference server can't be built or didn't do its work."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request as the server saw it; nanoseconds of CLOCK_MONOTONIC.

    ``arrival_ns`` is the kernel's stamp of its first byte, ``first_read_ns`` and ``last_read_ns`` are when the server
    had read the first and the last one, ``due_ns`` is the first token's deadline. The write of chunk k lasted from
    ``write_ns[k]`` to ``written_ns[k]``; ``end_ns`` is when the last write began or the client was gone (0: neither
    came). ``state`` is ``complete``, ``closed`` (the client left) or ``open``.
    """

    number: int
    connection: int
    request_id: str
    bytes: int
    state: str
    arrival_ns: int
    first_read_ns: int
    last_read_ns: int
    due_ns: int
    end_ns: int
    tokens: int
    write_ns: list[int]
    written_ns: list[int]

    @property
    def write_took_ns(self) -> list[int]:
        """How long each write took: so much may a bias be the server's own."""
        return [end - begin for begin, end in zip(self.write_ns, self.written_ns, strict=True)]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the server is told to do; see ``server.c`` for the faults."""

    ttft_ms: float
    itl_ms: float
    fault: Fault = "none"
    spin_us: float = 0

    @property
    def arguments(self) -> list[str]:
        """Command line."""
        arguments = ["--ttft-us", f"{self.ttft_ms * 1000:g}", "--itl-us", f"{self.itl_ms * 1000:g}"]
        return [*arguments, "--spin-us", f"{self.spin_us:g}", "--fault", self.fault]


def build(binary: Path) -> None:
    """Compile the server. Raises ServerError with the compiler's message, or when there is none."""
    binary.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-O2", "-std=gnu11", "-o", str(binary), str(SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ServerError("the reference server is built with gcc: apt-get install gcc libc6-dev") from None
    if done.returncode != 0:
        raise ServerError(f"{SOURCE.name} can't be compiled: {done.stderr.strip()}")


class ReferenceServer:
    """A running server; ``stop()`` ends it and returns its log."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        assert process.stdout is not None  # noqa: S101
        self.process = process
        self.log = log
        line = process.stdout.readline()
        if not line:
            raise ServerError(f"the reference server ended at once, with {process.wait()}")
        self.port = int(line)

    @property
    def cpu_s(self) -> float:
        """CPU time that its one thread has used."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9

    def stop(self) -> list[Served]:
        """End the server; gives its requests by number. Raises ServerError when it fails."""
        self.process.communicate(b"", timeout=_LOG_S)
        if self.process.returncode != 0:
            raise ServerError(f"the reference server ended with {self.process.returncode}")
        with self.log.open(encoding="utf-8") as file:
            return [Served(**json.loads(line)) for line in file]


@contextmanager
def running(binary: Path, schedule: Schedule, log: Path, cores: Collection[int] = ()) -> Iterator[ReferenceServer]:
    """Serve on a free loopback port, on ``cores`` where given. It ends with the block, and with this process."""
    command = [str(binary.absolute()), *schedule.arguments, "--log", str(log)]
    with on_cores(cores):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield ReferenceServer(process, log)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None  # noqa: S101
            pipe.close()
