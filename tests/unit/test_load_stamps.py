"""When a chunk arrived: the kernel's word, whatever the client did at the time; and how late the client was."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

import pytest
from scripted_server import DONE, END, HEAD, Exchange, ScriptedServer, event, usage, usage_event

from kvladder.config.traffic import PassPlan, Request
from kvladder.load import Limits, PassResult, Progress, Target, clock, connection, run_pass
from kvladder.load import client as client_module
from kvladder.load.decode import RawStream
from kvladder.load.lateness import Lateness, lateness
from kvladder.load.records import RequestTrace

BLOCKED_S = 0.3


def answer(exchange: Exchange) -> None:
    """Three tokens, 0.05 s apart, from 0.6 s on: while the client below is blocked."""
    exchange.send(HEAD)
    time.sleep(0.6)
    for place in range(3):
        exchange.chunks(event(None, usage=usage(1, place + 1)))
        time.sleep(0.05)
    time.sleep(0.3)
    exchange.chunks(usage_event(1, 3), DONE)
    exchange.send(END)


def measure(script: Callable[[Exchange], None], progress: Callable[[Progress], None] | None = None) -> PassResult:
    plan = PassPlan("w", "cold", 0, 1, [Request(0, "p0", array("I", [1]), 3)])
    with ScriptedServer(script) as server:
        result = run_pass(Target("127.0.0.1", server.port, "m"), plan, Limits(2, 5, 3), progress)
        measure.writes = server.exchanges[0].writes  # type: ignore[attr-defined]
    assert result.failed == 0
    return result


def block(now: Progress) -> None:
    """Hold the client's loop up: it is called after 0.5 s."""
    if now.done < now.total:
        time.sleep(BLOCKED_S)


def test_a_busy_client_neither_moves_the_first_token_nor_hides_that_it_was_late() -> None:
    result = measure(answer, block)
    (record,) = result.records
    (stream,) = result.streams
    writes = [written for written, _ in measure.writes]  # type: ignore[attr-defined]
    assert result.loop_lag_max_ns > 0.2e9
    # Chunks that waited together are one to the kernel, which stamps it when the last one came.
    assert len(set(record.chunk_ns)) < 3
    assert record.chunk_ns[-1] - writes[3] < 0.03e9
    assert writes[3] <= record.chunk_ns[-1]
    late = result.lateness
    assert late.max_ns is not None and late.edge_max_ns is not None and late.p99_ns is not None
    assert 0.01e9 < late.edge_max_ns <= late.max_ns < 0.5e9
    assert late.p99_ns == late.max_ns == max(stream.late)
    read_ns = stream.times[0] + stream.late[0]
    assert read_ns - writes[1] > 0.03e9


def test_without_kernel_stamps_the_moment_of_the_read_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_alive = 9  # SO_KEEPALIVE: an option that stamps nothing
    monkeypatch.setattr(connection, "_SO_TIMESTAMPNS", keep_alive)
    result = measure(answer, block)
    (record,) = result.records
    assert result.lateness == Lateness(None, None, None)
    assert set(result.streams[0].late) == {-1}
    assert record.first_token_ns is not None
    assert record.first_token_ns - measure.writes[3][0] > 0.03e9  # type: ignore[attr-defined]


@pytest.mark.parametrize("set_by_ns", [-(10**10), 10**10])
def test_a_stamp_that_can_not_be_right_is_not_used(monkeypatch: pytest.MonkeyPatch, set_by_ns: int) -> None:
    """Somebody has set the clock since the client last looked."""
    monkeypatch.setattr(client_module, "monotonic_less_real", lambda: clock.monotonic_less_real() + set_by_ns)
    result = measure(Exchange.answer)
    (record,) = result.records
    assert set(result.streams[0].late) == {-1}
    assert record.send_ns is not None and record.first_token_ns is not None
    assert 0 < record.first_token_ns - record.send_ns < 1e9


def test_a_fault_of_ours_ends_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(connection.Connection, "on_body", fail)
    with pytest.raises(ZeroDivisionError, match="ours"):
        measure(Exchange.answer)


def test_monotonic_less_real() -> None:
    before = time.monotonic_ns() - time.time_ns()
    found = clock.monotonic_less_real()
    assert abs(found - before) < 5e6  # two looks, between which this process may be held up
    assert abs(clock.monotonic_less_real() - found) < 1e6


def trace(first_token_ns: int | None) -> RequestTrace:
    return RequestTrace("w", "cold", 0, 0, "p0", 1, 1, 0, first_token_ns=first_token_ns)


def raw(times: list[int], late: list[int]) -> RawStream:
    return RawStream(Request(0, "p0", array("I", [1]), 1), times=array("q", times), late=array("q", late))


def test_lateness_of_edges_and_of_all() -> None:
    streams = [raw([10, 20, 30, 40], [1, 5, 90, 2]), raw([10, 20], [3, 7]), raw([], [])]
    records = [trace(20), trace(None), trace(None)]
    assert lateness(streams, records) == Lateness(p99_ns=90, max_ns=90, edge_max_ns=7)
    hundred = raw(list(range(200)), [4] * 198 + [50, 4])
    assert lateness([hundred], [trace(0)]) == Lateness(p99_ns=4, max_ns=50, edge_max_ns=4)


def test_lateness_is_unknown_without_stamps_and_never_zero() -> None:
    assert lateness([raw([10, 20], [-1, -1])], [trace(10)]) == Lateness(None, None, None)
    assert lateness([raw([10, 20, 30], [-1, 6, -1])], [trace(10)]) == Lateness(6, 6, None)
