"""Time what Mooncake's transfer engine moves between two processes of this machine, for `rooflines.transfer_engine`.

Runs under the *stack's* interpreter, as a file (``python transfer_engine.py --out times.json``), and starts a second
process of itself: two engines, each with registered memory of its own, over TCP on 127.0.0.1. Reads and writes are of
the whole buffer in one call, and of objects as large as those of the store. A transfer that the engine refuses or fails
takes no time, so it is none: it ends the measurement, with what the engine answered.

Neither process outlives its deadline, however deep in the engine it hangs: the kernel ends it, and what was measured by
then is written. For that time the engines listen on every address, which no setting of theirs changes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MIB = 2**20
BUFFER = 128 * MIB
AT_ONCE = 256
"""Objects in one call: the engine queues 1,024 transfers to one peer, and refuses what is more."""
REPEATS = 5
PATIENCE_S = 0.5
"""How long one way of one size may go on repeating."""
LOOPBACK = "127.0.0.1"


class Refused(RuntimeError):
    """A call that the engine answered with an error."""


def ok(call: str, answer: int) -> None:
    """Raises Refused for another answer than 0."""
    if answer != 0:
        raise Refused(f"{call} returned {answer}")


class Peer:
    """A transfer engine with one registered buffer whose pages are all there.

    Raises ImportError without Mooncake, Refused when the engine can't start.
    """

    def __init__(self, size: int) -> None:
        from mooncake.engine import TransferEngine  # noqa: PLC0415 (not there for the harness)

        self.engine: Any = TransferEngine()
        # No metadata server: peers ask each other.
        ok("initialize", self.engine.initialize(LOOPBACK, "P2PHANDSHAKE", "tcp", ""))
        self._memory = mmap.mmap(-1, size)
        self._memory.write(b"\x01" * size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ok("register_memory", self.engine.register_memory(self.address, size))


@contextlib.contextmanager
def other_process(deadline_s: int) -> Iterator[tuple[str, int]]:
    """A second process with an engine and a buffer: its name for transfers, and the buffer's address there.

    Raises Refused when it doesn't come up.
    """
    argv = [sys.executable, __file__, "--serve", "--deadline", str(deadline_s)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None  # noqa: S101
            # The engine may have said something first.
            answer = next((line for line in process.stdout if line.startswith("{")), None)
            if answer is None:
                raise Refused("the other process ended before it had an engine")
            found = json.loads(answer)
            yield f"{LOOPBACK}:{found['port']}", found["address"]
        finally:
            process.kill()


def serve() -> None:
    """Be the other process: say where the buffer is, and stay as long as the one that asks is there."""
    peer = Peer(BUFFER)
    print(json.dumps({"port": peer.engine.get_rpc_port(), "address": peer.address}), flush=True)
    sys.stdin.read()


def seconds(once: Callable[[], None]) -> list[float]:
    """How long each of several calls takes; a first one, which connects and warms, is left out. Two at least."""
    once()
    begin, taken = time.monotonic(), list[float]()
    while len(taken) < REPEATS and (len(taken) < 2 or time.monotonic() - begin < PATIENCE_S):
        start = time.perf_counter_ns()
        once()
        taken.append((time.perf_counter_ns() - start) / 1e9)
    return taken


def transfers(mine: Peer, chunk: int, deadline_s: int) -> Iterator[dict[str, Any]]:
    """Reads and writes of the whole buffer, and of objects of ``chunk`` bytes (None: whole), with their seconds.

    Raises Refused for what the engine refuses.
    """
    chunk = min(chunk, BUFFER)
    places = range(0, BUFFER // chunk * chunk, chunk)
    batches = [places[first : first + AT_ONCE] for first in range(0, len(places), AT_ONCE)]
    with other_process(deadline_s) as (name, there):
        for way in ("read", "write"):
            whole, objects = (getattr(mine.engine, f"{call}_sync_{way}") for call in ("transfer", "batch_transfer"))

            def at_a_stretch(call: Any = whole, way: str = way) -> None:
                ok(f"transfer_sync_{way}", call(name, mine.address, there, BUFFER))

            def one_by_one(call: Any = objects, way: str = way) -> None:
                for batch in batches:
                    here, at_peer = ([base + place for place in batch] for base in (mine.address, there))
                    ok(f"batch_transfer_sync_{way}", call(name, here, at_peer, [chunk] * len(batch)))

            yield {"way": way, "chunk": None, "bytes": BUFFER, "seconds": seconds(at_a_stretch)}
            yield {"way": way, "chunk": chunk, "bytes": len(places) * chunk, "seconds": seconds(one_by_one)}


def write(out: Path, found: list[dict[str, Any]], problem: str | None) -> None:
    """What was measured so far, and why it isn't all; whole at any time."""
    partial = out.with_name(f"{out.name}.partial")
    partial.write_text(json.dumps({"transfers": found, "problem": problem}), encoding="utf-8")
    partial.rename(out)


def main() -> None:
    """Measure and write one JSON file, ``transfers`` and ``problem`` (None: all was measured); or serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--chunk", type=int, default=MIB, help="bytes of one object of the store")
    parser.add_argument("--deadline", type=int, default=10, help="seconds after which the process is ended")
    parser.add_argument("--serve", action="store_true", help="be the other process")
    options = parser.parse_args()
    # What the signal does by default needs no interpreter: a process that hangs inside the engine ends as well.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(options.deadline)
    if options.serve:
        serve()
    else:
        found: list[dict[str, Any]] = []
        write(options.out, found, f"it took longer than {options.deadline} s")
        try:
            mine = Peer(BUFFER)
            for transfer in transfers(mine, options.chunk, options.deadline):
                found.append(transfer)
                write(options.out, found, f"it took longer than {options.deadline} s")
            write(options.out, found, None)
        except (Refused, ImportError, OSError) as error:
            write(options.out, found, str(error))
    # Engines take seconds to go, for connections that nobody needs any more.
    os._exit(0)


if __name__ == "__main__":
    main()
