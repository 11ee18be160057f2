"""Wait until nothing is being stored any more, with an end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvladder.counters.reading import ACTIVE

Activity = Mapping[str, float] | None

FIRST_S = 0.05
SLOWEST_S = 0.25


@dataclass(frozen=True, slots=True)
class Drain:
    """How a drain ended.

    ``durable_ns``: from the call until the last change that was seen; None when that was never seen, or there is no
    tier. ``drained``: the counters were flat; None: there are no counters to tell.
    """

    durable_ns: int | None
    drained: bool | None


def wait_until_flat(activity: Callable[[], Activity], quiet_s: float, deadline_s: float) -> Drain:
    """Sample ``activity`` until it has not changed, with no job in flight, for ``quiet_s``; at most ``deadline_s``.

    The first sample is taken at once. An empty mapping says that there is no tier: drained, nothing to wait for. None
    says that the counters aren't there; as a series may appear with its first event only, that is believed after
    ``quiet_s``. Samples are 50 ms apart at first, 250 ms later, and never take more than a fifth of the time, so that
    scraping doesn't disturb what it watches.
    """
    begin = time.monotonic_ns()
    quiet_ns, deadline_ns = int(quiet_s * 1e9), int(deadline_s * 1e9)
    pause = FIRST_S
    last: Activity = activity()
    if last is not None and not last:
        return Drain(None, True)
    since, elapsed = 0, time.monotonic_ns() - begin
    cost_s = elapsed / 1e9
    while True:
        busy = last is not None and any(value > 0 for name, value in last.items() if name.startswith(ACTIVE))
        if elapsed - since >= quiet_ns and not busy:
            return Drain(None, None) if last is None else Drain(since, True)
        if elapsed >= deadline_ns:
            return Drain(None, None if last is None else False)
        left_s = (deadline_ns - elapsed) / 1e9
        time.sleep(max(min(max(pause, 4 * cost_s), left_s), 0.001))
        pause = min(pause * 1.5, SLOWEST_S, max(quiet_s / 4, FIRST_S))
        asked = time.monotonic_ns()
        sample = activity()
        elapsed = time.monotonic_ns() - begin
        cost_s = (begin + elapsed - asked) / 1e9
        # A server that stops answering says nothing about its stores: neither a change nor a rest.
        if sample is None and last is not None:
            since = elapsed
        elif sample != last or busy:
            last, since = sample, elapsed


def files_activity(folder: Path) -> dict[str, float]:
    """What moves on disk while a tier of files is written: bytes below ``folder``, and files not yet renamed.

    vLLM 0.26 has no counter of what it writes to such a tier. Both versions write a block under a name with ``.tmp``
    first. A folder that isn't there yet holds nothing. Ten thousand files take a tenth of a second.
    """
    size, unfinished, folders = 0, 0, [str(folder)]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except FileNotFoundError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
                continue
            unfinished += entry.name.endswith(".tmp")
            try:
                size += entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                # Renamed meanwhile: it counts next time.
                continue
    return {"disk_bytes": size, f"{ACTIVE}disk_files": unfinished}
