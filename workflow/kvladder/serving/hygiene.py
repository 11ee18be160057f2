"""Checks before a trial starts and after it stopped: nothing in the way, nothing left behind.

Only what carries our own mark is ever ended or deleted; anything else is a clear refusal, or a note when it's harmless.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from kvladder.serving import devices as gpu
from kvladder.serving import ports as tcp
from kvladder.serving import procfs, shm
from kvladder.serving.environment import child_env, ignored_variables
from kvladder.serving.errors import NotClean, PortInUse
from kvladder.serving.process import JOB_VARIABLE, end_marked, pid_namespace

__all__ = ["Baseline", "NotClean", "after_stop", "before_start", "child_env", "end_orphans", "ignored_variables"]

_ORPHAN_PATIENCE_S = 15.0
_GPU_PATIENCE_S = 20.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Baseline:
    """State before a trial: ``shm`` is what lay in /dev/shm (inode by name), ``notes`` what is worth a line."""

    shm: dict[str, int]
    notes: list[str] = field(default_factory=list)


def end_orphans(patience_s: float = _ORPHAN_PATIENCE_S) -> list[str]:
    """End servers of this user whose job is gone; returns them as text.

    Their supervisor ends them by itself, so they get ``patience_s`` to vanish before they're killed. A mark from
    another pid namespace is left alone: its pids mean nothing here.
    """
    deadline = time.monotonic() + patience_s
    while (marks := _orphan_marks()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return [text for mark in sorted(marks) for text in end_marked(mark, patience_s)]


def _orphan_marks() -> set[str]:
    marks = set()
    for process in procfs.processes():
        mark = procfs.environ(process.pid).get(JOB_VARIABLE, "")
        with contextlib.suppress(ValueError, OSError):
            namespace, pid, start, _ = (int(part) for part in mark.split(":"))
            own = (procfs.PROC / str(process.pid)).stat().st_uid == os.getuid()
            if own and namespace == pid_namespace() and not procfs.is_alive(pid, start):
                marks.add(mark)
    return marks


def before_start(
    *,
    tag: str,
    earlier: str = "",
    ports: Sequence[int] = (),
    devices: Sequence[str] = (),
    shm_names: Sequence[str] = (),
    shm_bytes: int = 0,
) -> Baseline:
    """Check that a trial can start; returns the baseline for ``after_stop``.

    ``shm_names`` are the names or shell patterns in /dev/shm that this trial's servers will make themselves, and
    ``shm_bytes`` what they'll put there. Servers left by a killed job are ended first, and unused files in /dev/shm
    that carry this trial's ``tag`` are deleted. So are those of earlier attempts at it where ``earlier`` says what all
    their tags share: everything up to the dash before eight random hex digits; the caller holds the lease. Raises
    NotClean when a port has a listener, a name in /dev/shm is taken or too little is free there. Other processes on a
    device and older left-overs in /dev/shm are noted only.
    """
    if earlier and not earlier.endswith("-"):
        raise ValueError(f"earlier must end with the dash before the random part: {earlier!r}")
    notes = [f"ended a server left by a killed job: {text}" for text in end_orphans()]
    swept = shm.sweep({}, {}, tag, earlier)
    notes += [f"left-over of an earlier try deleted: {shm.path_of(name)}" for name in swept.removed]
    notes += [f"left-over of an earlier try still in use: {shm.path_of(name)}" for name in swept.in_use]
    for port in ports:
        try:
            tcp.check_free(port)
        except PortInUse as error:
            raise NotClean(str(error)) from None
    there = shm.listing()
    if taken := sorted(name for name in there if any(fnmatchcase(name, pattern) for pattern in shm_names)):
        raise NotClean(f"{shm.path_of(taken[0])} exists already and isn't this trial's: remove it, or change the name")
    if shm_bytes and (free := shutil.disk_usage(procfs.SHM).free) < shm_bytes:
        raise NotClean(f"{procfs.SHM} has {free} bytes free, the setup needs {shm_bytes}: free or enlarge it")
    if there:
        notes.append(f"{procfs.SHM} held {len(there)} entries before the start, kept: {', '.join(sorted(there)[:5])}")
    for process in gpu.processes(devices):
        notes.append(f"GPU {process.device} is also used by pid {process.pid} ({process.name})")
    return Baseline(shm=there, notes=notes)


def after_stop(
    baseline: Baseline, *, tag: str, ports: Sequence[int] = (), devices: Sequence[str] = (), pids: Sequence[int] = ()
) -> list[str]:
    """Check that a stopped trial left nothing; returns notes on what was new in /dev/shm.

    ``pids`` are the processes the trial had (``ServerGroup.tree()`` while it ran): none may still have a context on a
    device; the driver gets a while to let go. Raises NotClean when a port has a listener or a device a process of ours.
    """
    for port in ports:
        if owner := tcp.owner_of(port):
            raise NotClean(f"port {port} still has a listener after the stop ({owner})")
    deadline = time.monotonic() + _GPU_PATIENCE_S
    while left := [process for process in gpu.processes(devices) if process.pid in pids]:
        if time.monotonic() >= deadline:
            raise NotClean(f"pid {left[0].pid} ({left[0].name}) still holds GPU {left[0].device} after the stop")
        time.sleep(_POLL_S)
    swept = shm.sweep(baseline.shm, {}, tag)
    notes = [f"left-over deleted: {shm.path_of(name)}" for name in swept.removed]
    notes += [f"left-over still in use: {shm.path_of(name)}" for name in swept.in_use]
    return notes + [f"new in /dev/shm and not ours as far as seen, kept: {name}" for name in swept.foreign]
