"""Run a program of a stack so that `nsys` records the part of its life that is asked for.

    python -m kvladder_engine_plugin.profiled SWITCH PROGRAM [ARGUMENT...]

The engine begins and ends a profile when its API is asked to; a side process that copies KV on the GPU as well
(LMCache's server) knows nothing of profiles. Here a thread does it for the program: the profile begins when the file
SWITCH appears and ends when it goes. Meanwhile NVTX marks tell the time, as the engine's do (`marks.CLOCK`).
"""

import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvladder_engine_plugin.marks import CLOCK

POLL_S = 0.02
TICKS = 25
"""Polls between two marks of the clock."""


def follow(switch: Path, start: Callable[[], None], stop: Callable[[], None], mark: Callable[[str], None]) -> None:
    """Profile while ``switch`` is there, once; returns when it has come and gone."""
    for _ in _wait(switch, there=True):
        pass
    start()
    for number in _wait(switch, there=False):
        if number % TICKS == 0:
            mark(f"{CLOCK}{time.monotonic_ns()}")
    stop()


def _wait(path: Path, *, there: bool) -> Iterator[int]:
    number = 0
    while path.exists() != there:
        yield number
        number += 1
        time.sleep(POLL_S)


def main() -> None:
    """Start the thread, then become the program."""
    import torch  # noqa: PLC0415

    switch, program = Path(sys.argv[1]), sys.argv[2]
    profiler = torch.cuda.profiler
    arguments = (switch, profiler.start, profiler.stop, torch.cuda.nvtx.mark)
    threading.Thread(target=follow, args=arguments, name="kvladder-profiled", daemon=True).start()
    sys.argv = sys.argv[2:]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
