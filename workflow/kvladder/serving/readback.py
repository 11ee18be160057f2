"""What running servers show of themselves through /proc: compiled extensions they loaded, memory they hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvladder.serving import procfs

_KIB = 1024


@dataclass(frozen=True)
class Memory:
    """Memory of a process tree in bytes; None = not one process could be read.

    ``rss_bytes`` counts a page that processes share once for each of them.
    """

    rss_bytes: int | None


def mapped_modules(pids: Iterable[int], wanted: Sequence[str | re.Pattern[str]]) -> dict[str, bool]:
    """Say for each wanted file whether one of the processes has it mapped.

    A string is searched as it is in the paths of mapped files (``vllm/_C``), a pattern as a regular expression. The
    key is the string or the pattern's text. A name is left out (unknown) when it was not found and the maps of a living
    process could not be read.
    """
    paths: set[str] = set()
    blind = False
    for pid in pids:
        mapped = procfs.mapped_files(pid)
        if mapped is None:
            blind |= procfs.read_process(pid) is not None
        else:
            paths |= mapped
    found: dict[str, bool] = {}
    for item in wanted:
        pattern = re.compile(re.escape(item)) if isinstance(item, str) else item
        hit = any(pattern.search(path) for path in paths)
        if hit or not blind:
            found[item if isinstance(item, str) else item.pattern] = hit
    return found


def memory(pids: Iterable[int]) -> Memory:
    """Return the memory of those of the processes that still live."""
    rss = [size for size in map(_resident, pids) if size is not None]
    return Memory(rss_bytes=sum(rss) if rss else None)


def _resident(pid: int) -> int | None:
    """Return the resident memory of a process in bytes; None when there is none to read."""
    try:
        text = (procfs.PROC / str(pid) / "status").read_text()
    except OSError:
        return None
    value = next((line.split()[1] for line in text.splitlines() if line.startswith("VmRSS:")), None)
    return None if value is None else int(value) * _KIB
