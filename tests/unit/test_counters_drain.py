"""The drain: flat means flat, and every wait ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kvladder.counters.drain import Drain, files_activity, wait_until_flat
from kvladder.counters.reading import ACTIVE

Sample = Mapping[str, float] | None


def until(seconds: float, before: Callable[[float], Sample], after: Sample) -> Callable[[], Sample]:
    """An activity that is `before(elapsed)` for so many seconds, and `after` then."""
    begin = time.monotonic()

    def sample() -> Sample:
        elapsed = time.monotonic() - begin
        return before(elapsed) if elapsed < seconds else after

    return sample


def test_no_tier_is_drained_at_once() -> None:
    begin = time.monotonic()
    assert wait_until_flat(dict, 5.0, 10.0) == Drain(None, True)
    assert time.monotonic() - begin < 4


def test_flat_from_the_start() -> None:
    begin = time.monotonic()
    assert wait_until_flat(lambda: {"bytes": 7.0}, 0.2, 5.0) == Drain(0, True)
    assert 0.2 <= time.monotonic() - begin < 4


def test_time_to_durable_is_the_last_change() -> None:
    drain = wait_until_flat(until(0.4, lambda elapsed: {"bytes": elapsed}, {"bytes": 1.0}), 1.5, 10.0)
    assert drain.drained is True
    assert drain.durable_ns is not None
    assert 0.35e9 <= drain.durable_ns < 1.5e9, "without the time for which it was flat"


def test_an_active_job_is_not_flat() -> None:
    busy = {"bytes": 1.0, f"{ACTIVE}jobs": 2.0}
    drain = wait_until_flat(until(0.5, lambda _: busy, {"bytes": 1.0, f"{ACTIVE}jobs": 0.0}), 0.1, 5.0)
    assert drain.drained is True
    assert drain.durable_ns is not None
    assert drain.durable_ns >= 0.4e9
    assert wait_until_flat(lambda: busy, 0.1, 0.4) == Drain(None, False)


def test_never_flat_ends_at_the_deadline() -> None:
    begin = time.monotonic()
    assert wait_until_flat(lambda: {"bytes": time.monotonic()}, 0.2, 0.6) == Drain(None, False)
    assert time.monotonic() - begin < 4


def test_no_counters_is_unknown() -> None:
    assert wait_until_flat(lambda: None, 0.2, 5.0) == Drain(None, None)


def test_counters_may_appear_with_their_first_event() -> None:
    drain = wait_until_flat(until(0.15, lambda _: None, {"bytes": 4.0}), 0.3, 5.0)
    assert drain.drained is True
    assert drain.durable_ns


def test_a_server_that_stops_answering_is_no_rest() -> None:
    drain = wait_until_flat(until(0.1, lambda _: {"bytes": 1.0}, None), 0.3, 0.8)
    assert drain == Drain(None, False)


def test_files_on_their_way_are_no_rest(tmp_path: Path) -> None:
    """vLLM 0.26 counts nothing of what it writes to a tier of files: the folder itself has to rest."""
    tier = tmp_path / "tier"
    unfinished = f"{ACTIVE}disk_files"
    assert files_activity(tier) == {"disk_bytes": 0, unfinished: 0}
    (tier / "a").mkdir(parents=True)
    (tier / "a" / "1.bin").write_bytes(b"x" * 10)
    (tier / "a" / "2.bin_77.tmp").write_bytes(b"x" * 3)
    assert files_activity(tier) == {"disk_bytes": 13, unfinished: 1}
    assert wait_until_flat(lambda: files_activity(tier), 0.1, 0.3) == Drain(None, False)
    (tier / "a" / "2.bin_77.tmp").rename(tier / "a" / "2.bin")
    assert files_activity(tier) == {"disk_bytes": 13, unfinished: 0}
    assert wait_until_flat(lambda: files_activity(tier), 0.1, 2.0).drained is True
