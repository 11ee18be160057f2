"""CPU time and memory of a client and all its processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from time import monotonic_ns

from kvladder.config.bench import UsageSample

_PERIOD_S = 0.1
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Run this thread, and what it starts, on these cores; on no cores in particular for none."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Sampler:
    """Looks at a process tree ten times a second, in a thread, until ``stop()``."""

    def __init__(self, root: int) -> None:
        self.samples: list[UsageSample] = []
        self._root = root
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> list[UsageSample]:
        """End; returns the samples in order of time."""
        self._stopping.set()
        self._thread.join()
        return self.samples

    def _run(self) -> None:
        # On two cores it shares the server's, which must not wait for it.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:
            sample = measure(self._root)
            if sample is not None:
                self.samples.append(sample)
            if self._stopping.wait(_PERIOD_S):
                return


def measure(root: int) -> UsageSample | None:
    """CPU time and memory of a process and its descendants now; None when it has ended.

    CPU time includes children that ended and were waited for; the kernel counts it in ticks (10 ms) a process.
    """
    now = monotonic_ns()
    cpu = rss = 0
    for process in tree(root):
        try:
            fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] == b"Z":
            continue
        # utime, stime, cutime, cstime and rss of proc(5), which counts from the process id.
        cpu += sum(map(int, fields[11:15])) * _TICK_NS
        rss += int(fields[21]) * _PAGE
    return UsageSample(t_ns=now, cpu_ns=cpu, rss_bytes=rss) if rss else None


def tree(root: int) -> list[int]:
    """A process and its descendants."""
    found = [root]
    for process in found:
        try:
            threads = list(Path(f"/proc/{process}/task").iterdir())
            for thread in threads:
                found += map(int, (thread / "children").read_text().split())
        except OSError:
            continue
    return found


def cpu_between(samples: list[UsageSample], start_ns: int, end_ns: int) -> float | None:
    """CPU seconds between two moments, linear between samples; None when the samples don't reach around both."""
    before, after = _cpu_at(samples, start_ns), _cpu_at(samples, end_ns)
    return None if before is None or after is None else (after - before) / 1e9


def _cpu_at(samples: list[UsageSample], moment_ns: int) -> float | None:
    for left, right in pairwise(samples):
        if left.t_ns <= moment_ns <= right.t_ns:
            share = (moment_ns - left.t_ns) / (right.t_ns - left.t_ns)
            return left.cpu_ns + share * (right.cpu_ns - left.cpu_ns)
    return None
