"""Left-overs in /dev/shm: told apart by proof of ownership, never by the look of a name.

A file is a trial's own when it was not there before the trial and a process of the trial was seen to have it open or
mapped, or when its name carries the trial's tag. Several containers may share one /dev/shm without seeing each other's
processes, so a name such as ``psm_…`` proves nothing. Standard library only: the supervisor imports it.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvladder.serving import procfs

_RANDOM = r"[0-9a-f]{8}(?![0-9a-f])"

MIN_TAG = 6
"""A shorter tag could sit in a stranger's file name by chance."""


def listing() -> dict[str, int]:
    """Return what lies in /dev/shm: inode by name."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in procfs.SHM.iterdir():
            with contextlib.suppress(OSError):
                found[entry.name] = entry.lstat().st_ino
    return found


def new_since(before: Mapping[str, int]) -> dict[str, int]:
    """Return what came since ``before``; a name that came back with another inode counts as new."""
    return {name: inode for name, inode in listing().items() if before.get(name) != inode}


def path_of(name: str) -> str:
    """Return the full path of a name, for a message."""
    return str(procfs.SHM / name)


def used_by(pids: Iterable[int]) -> set[str]:
    """Return the names that the processes have open or mapped."""
    return {name for pid in pids for name in procfs.shm_names(pid)}


@dataclass(frozen=True)
class Sweep:
    """Outcome of a clean-up: names ``removed``, still ``in_use``, and new ones of unproven origin (``foreign``)."""

    removed: list[str] = field(default_factory=list)
    in_use: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


def sweep(before: Mapping[str, int], seen: Mapping[str, int], tag: str, earlier: str = "") -> Sweep:
    """Delete the files that are proved to be the trial's own and that no living process uses.

    ``seen`` holds name and inode of files that a process of the trial had open or mapped. ``earlier`` is what the tags
    of all attempts at this trial share, up to the dash before eight random hex digits: files that carry it were left by
    an attempt before. Only to be given while the machine's lease is held, so that no other attempt can be running.
    """
    attempt = re.compile(re.escape(earlier) + _RANDOM) if len(earlier) >= MIN_TAG else None
    new = new_since(before)
    own = {
        name
        for name, inode in new.items()
        if seen.get(name) == inode
        or (len(tag) >= MIN_TAG and tag in name)
        or (attempt is not None and attempt.search(name))
    }
    used = used_by(process.pid for process in procfs.processes()) & own if own else set()
    removed = [name for name in sorted(own - used) if _remove(name, new[name])]
    return Sweep(removed=removed, in_use=sorted(used), foreign=sorted(new.keys() - own))


def _remove(name: str, inode: int) -> bool:
    path = procfs.SHM / name
    with contextlib.suppress(OSError):
        found = path.lstat()
        if found.st_ino == inode and stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            path.unlink()
            return True
    return False
