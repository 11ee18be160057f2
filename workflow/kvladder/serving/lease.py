"""Leases on devices and on the machine: what guarantees that two trials never measure over each other.

The scheduler's resource caps keep most jobs apart; they hand out no device ids and know nothing of a second run. Locks
are machine-wide (a folder shared by all users) and end with the last process that holds them.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvladder.serving import devices
from kvladder.serving.errors import LeaseTimeout
from kvladder.serving.locks import LockFile, runtime_folder

_RETRY_S = 0.2
_PROGRESS_S = 10.0


@dataclass(frozen=True)
class Lease:
    """What a trial holds: ``devices`` as CUDA_VISIBLE_DEVICES wants them, ``fds`` for ``servers(hold=…)``."""

    devices: list[str]
    fds: list[int]

    @property
    def env(self) -> dict[str, str]:
        """Variables for the servers: the leased devices and no other (none at all for a trial without GPU)."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@contextlib.contextmanager
def lease(
    gpus: int,
    *,
    holder: str,
    host_slots: int = 1,
    deadline_s: float = 24 * 3600.0,
    progress: Callable[[str], None] = lambda _: None,
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Lease]:
    """Hold ``gpus`` devices and a slot of the machine inside the ``with`` block; blocks until they're free.

    ``host_slots`` is how many trials may run on this machine at once; 1 keeps it for this one alone, also against
    trials that would share. ``holder`` is shown to those who wait. ``progress`` gets a line when waiting starts and
    every ten seconds. All or nothing, so two waiting trials never block each other.
    Raises LeaseTimeout after ``deadline_s``, ValueError when the machine hasn't that many visible devices.
    """
    visible = devices.visible(os.environ if environ is None else environ) if gpus else []
    if gpus > len(visible):
        raise ValueError(f"{gpus} GPUs asked for, {len(visible)} visible ({', '.join(visible) or 'none'})")
    folder = folder or runtime_folder("leases", shared=True)
    names = {device: devices.lock_name(device) for device in visible}
    start = time.monotonic()
    next_word = 0.0
    while True:
        held = _try(folder, holder, names, gpus, host_slots)
        if isinstance(held, _Held):
            break
        waited = time.monotonic() - start
        if waited >= deadline_s:
            raise LeaseTimeout(f"not free after {deadline_s:g} s: {held}")
        if waited >= next_word:
            progress(f"waiting for {held}")
            next_word = waited + _PROGRESS_S
        time.sleep(_RETRY_S * (1 + random.random()))  # noqa: S311 - jitter only
    try:
        yield Lease(devices=held.devices, fds=[lock.fd for lock in held.locks])
    finally:
        for lock in held.locks:
            lock.release()


@dataclass(frozen=True)
class _Held:
    devices: list[str]
    locks: list[LockFile]


def _try(folder: Path, holder: str, names: Mapping[str, str], gpus: int, host_slots: int) -> _Held | str:
    """Take everything or nothing; a text says what is missing and who has it."""
    with contextlib.ExitStack() as undo:
        locks: list[LockFile] = []

        def take(name: str, *, exclusive: bool = True) -> LockFile | None:
            """Take one lock; the answer is the lock that is in the way, None when it was taken."""
            lock = LockFile(folder / f"{name}.lock")
            if not lock.acquire(holder, exclusive=exclusive):
                return lock
            undo.callback(lock.release)
            locks.append(lock)
            return None

        # One trial that wants the machine alone locks "host" for itself; trials that share lock it together and a slot
        # each.
        if blocked := take("host", exclusive=host_slots == 1):
            return f"this machine (held by {blocked.holder()})"
        if host_slots > 1:
            blocked_slots = []
            for slot in range(host_slots):
                blocked = take(f"host-{slot}")
                if blocked is None:
                    break
                blocked_slots.append(f"slot {slot} held by {blocked.holder()}")
            else:
                return f"a slot of this machine ({'; '.join(blocked_slots)})"
        chosen: list[str] = []
        busy: list[str] = []
        for device, name in names.items():
            if len(chosen) == gpus:
                break
            if blocked := take(name):
                busy.append(f"GPU {device} (held by {blocked.holder()})")
            else:
                chosen.append(device)
        if len(chosen) < gpus:
            return f"{gpus - len(chosen)} more of {', '.join(busy)}"
        undo.pop_all()
        return _Held(devices=chosen, locks=locks)
