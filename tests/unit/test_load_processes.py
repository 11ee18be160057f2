"""A pass that several client processes send: one order, one series, one clock, and nobody left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from scripted_server import HEAD, Close, Exchange, ScriptedServer, timed_server

from kvladder.config.traffic import PassPlan, Pool, Request
from kvladder.gates.concurrency_held import held
from kvladder.load import Limits, PassResult, Progress, Target, connection, processes, processes_for, run_pass
from kvladder.load.processes import ClientProcessError, merged, run_in_processes

LIMITS = Limits(connect_s=2, request_s=10, stall_s=5)


def plan(count: int, concurrency: int, tokens: int = 1, **changes: Any) -> PassPlan:
    wave = [Request(index, f"p{index}", array("I", [index, 50_000]), tokens) for index in range(count)]
    return PassPlan(
        **{"workload": "w", "name": "warm", "round": 2, "concurrency": concurrency, "requests": wave} | changes
    )


def send(port: int, sent: PassPlan, count: int = 2, **options: Any) -> PassResult:
    return run_in_processes(Target("127.0.0.1", port, "m"), sent, LIMITS, count, **options)


def children() -> list[psutil.Process]:
    """Client processes of this one, without the servers of tests."""
    return [psutil.Process(child.pid) for child in multiprocessing.active_children()]


def slow_answer(exchange: Exchange) -> None:
    time.sleep(0.03)
    exchange.answer()


def hang(exchange: Exchange) -> None:
    """Begin an answer, and wait until nobody is there to hear the rest."""
    exchange.send(HEAD)
    exchange.sock.recv(1)
    raise Close


def test_requests_are_sent_once_in_the_order_of_the_plan_and_the_slots_are_shared() -> None:
    with timed_server(0.03, 0.005, 3) as server:
        result = send(server.port, plan(60, 7, tokens=3), count=3)
        log = server.close()
    assert [record.index for record in result.records] == list(range(60)) == sorted(log)
    assert result.failed == 0 and all(record.output_tokens == 3 for record in result.records)
    assert children() == []
    # As the server read them: nobody was overtaken by more than the requests in flight.
    arrived = sorted(log, key=lambda index: log[index][0])
    assert max(abs(place - index) for place, index in enumerate(arrived)) <= 7
    # Times of all processes are on the server's clock too.
    for record in result.records:
        read, first, *_ = log[record.index]
        assert record.send_ns is not None and record.first_token_ns is not None
        assert result.start_ns <= record.eligible_ns <= record.send_ns <= read
        assert first <= record.first_token_ns <= result.end_ns
    assert len(result.process_cpu_ns) == 3 and min(result.process_cpu_ns) > 0
    assert result.client_cpu_ns == sum(result.process_cpu_ns)
    assert result.lateness.max_ns is not None


def test_the_merged_series_is_that_of_one_process() -> None:
    with timed_server(0.05, 0.01, 3) as server:
        result = send(server.port, plan(40, 9, tokens=3))
    series = result.in_flight
    assert series[0][1:] == (0, 40)
    assert series[-1][1:] == (0, 0)
    assert max(flying for _, flying, _ in series) == 9
    moments = [row[0] for row in series]
    assert moments == sorted(moments)
    assert result.start_ns == moments[0] and moments[-1] <= result.end_ns
    # Sums of what the records say, at every change.
    sent = sorted(record.send_ns or 0 for record in result.records)
    for now, flying, eligible in series:
        assert flying + (40 - eligible) <= sum(moment <= now for moment in sent)
        assert flying <= eligible <= 40
    share = held(SimpleNamespace(in_flight=series, concurrency=9, end_ns=result.end_ns))  # type: ignore[arg-type]
    assert share is not None and share > 0.9


def test_series_are_merged_moment_by_moment() -> None:
    one = [(10, 0, 0), (11, 1, 0), (20, 0, 1), (21, 1, 1), (40, 0, 2)]
    other = [(10, 0, 0), (12, 1, 0), (30, 0, 1)]
    assert merged([one, other], 3) == [
        (10, 0, 3),
        (10, 0, 3),
        (11, 1, 3),
        (12, 2, 3),
        (20, 1, 2),
        (21, 2, 2),
        (30, 1, 1),
        (40, 0, 0),
    ]


def test_what_fails_is_recorded_as_by_one_process() -> None:
    def script(exchange: Exchange) -> None:
        index = exchange.json["prompt"][0]
        if index % 3 == 0:
            exchange.send(b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno")
        elif index % 3 == 1:
            raise Close
        else:
            exchange.answer()

    def told(result: PassResult) -> list[tuple[Any, ...]]:
        return [(r.index, r.status, r.error, r.http_status, r.output_tokens, r.anomalies) for r in result.records]

    sent = plan(12, 4)
    with ScriptedServer(script) as server:
        several = told(send(server.port, sent))
        single = told(run_pass(Target("127.0.0.1", server.port, "m"), sent, LIMITS))
    assert several == single
    assert [row[1] for row in several] == ["failed", "failed", "ok"] * 4


def test_a_process_that_gets_no_request_is_no_trouble() -> None:
    def slow_first(exchange: Exchange) -> None:
        time.sleep(0.2 if exchange.json["prompt"][0] == 0 else 0)
        exchange.answer()

    with ScriptedServer(slow_first) as server:
        result = send(server.port, plan(2, 2))
        alone = send(server.port, plan(1, 8), count=4)
        nothing = send(server.port, plan(0, 8))
    assert result.failed == alone.failed == nothing.failed == 0
    assert (len(result.records), len(alone.records), nothing.records) == (2, 1, [])


def test_a_server_that_refuses_fails_every_request() -> None:
    result = send(1, plan(6, 4))
    assert {record.error for record in result.records} == {"cannot connect: Connection refused"}
    assert result.in_flight[-1][1:] == (0, 0)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 3),
        ({"concurrency": 2}, 2),
        ({"requests": [Request(0, "p", array("I", [1]), 1)]}, 1),
        ({"requests": [Request(0, "p", array("I", [1]), 1), Request(1, "p", array("I", [1]), 1, after=0)]}, 1),
        ({"pool": Pool(2, "fifo", 10)}, 1),
        ({"ramp_s": 1.0}, 1),
        ({"deadline_s": 9.0}, 1),
    ],
)
def test_how_many_processes_a_pass_can_have(changes: dict[str, Any], count: int) -> None:
    assert processes_for(plan(8, **{"concurrency": 8} | changes), 3) == count


def test_conversations_are_sent_by_one_process() -> None:
    wave = [Request(index, "p", array("I", [index]), 1, after=index - 1 if index else None) for index in range(4)]
    with ScriptedServer(slow_answer) as server:
        result = send(server.port, plan(0, 4, requests=wave))
    assert len(result.process_cpu_ns) == 1
    assert max(flying for _, flying, _ in result.in_flight) == 1


def test_a_plan_that_can_not_be_carried_out_starts_nothing() -> None:
    wave = [Request(7, f"p{place}", array("I", [1]), 1) for place in range(4)]
    with pytest.raises(ValueError, match="two requests have the same index"):
        send(1, plan(0, 4, requests=wave))
    for concurrency in (4, 1):
        with pytest.raises(ValueError, match=r"load.cores: 4096 isn't among the cores that this process may use: \d"):
            send(1, plan(8, concurrency), cores=[min(os.sched_getaffinity(0)), 4096])
    assert children() == []


def test_processes_are_pinned_and_keep_no_descriptor_of_the_parent() -> None:
    seen: dict[int, tuple[list[int], set[Path]]] = {}

    def look(_: Progress) -> None:
        for child in children():
            links = {entry.readlink() for entry in Path(f"/proc/{child.pid}/fd").iterdir()}
            seen[child.pid] = (child.cpu_affinity(), links)

    core = min(os.sched_getaffinity(0))
    ours, theirs = os.pipe()
    name = Path(f"/proc/self/fd/{ours}").readlink()
    with timed_server(0.7, 0, 1) as server:
        send(server.port, plan(4, 4), progress=look, cores=[core])
    for end in (ours, theirs):
        os.close(end)
    assert len(seen) == 2
    for cores, links in seen.values():
        assert cores == [core]
        assert name not in links


def test_a_pass_that_one_process_sends_is_pinned_too() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    seen: list[set[int]] = []
    with ScriptedServer(Exchange.answer) as server:
        for cores in ([core], []):
            send(server.port, plan(2, 1), cores=cores, progress=lambda _: seen.append(os.sched_getaffinity(0)))
            assert os.sched_getaffinity(0) == before
    assert seen == [{core}, before]


def test_a_name_is_looked_up_before_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not behind it: the resolver's lock, held by another thread at the fork, is held in the child for ever."""
    there = os.getpid()

    def look_up(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        assert os.getpid() == there and host == "engine.invalid"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))] * 2

    monkeypatch.setattr(processes, "getaddrinfo", look_up)
    with ScriptedServer(Exchange.answer) as server:
        sent = run_in_processes(Target("engine.invalid", server.port, "m"), plan(8, 4), LIMITS, 2)
    assert sent.failed == 0

    def unknown(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(processes, "getaddrinfo", unknown)
    lost = run_in_processes(Target("engine.invalid", 1, "m"), plan(8, 4), LIMITS, 2)
    assert {record.error for record in lost.records} == {"cannot resolve host engine.invalid"}


def test_progress_is_that_of_all() -> None:
    seen: list[Progress] = []
    with timed_server(0.3, 0, 1) as server:
        send(server.port, plan(24, 4), progress=seen.append)
    assert any(0 < now.done < 24 for now in seen)
    assert {now.total for now in seen} == {24}
    assert max(now.in_flight for now in seen) == 4
    assert (seen[-1].done, seen[-1].failed, seen[-1].in_flight) == (24, 0, 0)


def test_a_killed_process_ends_the_pass() -> None:
    def kill(now: Progress) -> None:
        if now.in_flight:
            children()[0].send_signal(signal.SIGKILL)

    with (
        ScriptedServer(hang) as server,
        pytest.raises(ClientProcessError, match=r"client process \d of 2 was killed by SIGKILL"),
    ):
        send(server.port, plan(8, 4), progress=kill)
    assert children() == []


def test_what_progress_raises_ends_the_pass() -> None:
    def stop(now: Progress) -> None:
        if now.in_flight:
            raise LookupError("the server is gone")

    begin = time.monotonic()
    with ScriptedServer(hang) as server, pytest.raises(LookupError, match="the server is gone"):
        send(server.port, plan(8, 4), progress=stop)
    assert time.monotonic() - begin < 5
    assert children() == []


def test_an_interrupt_passes_through() -> None:
    # A test run in the background begins with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with ScriptedServer(hang) as server:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            send(server.port, plan(8, 4))
    timer.join()
    signal.signal(signal.SIGINT, before)
    assert children() == []


def test_a_fault_of_ours_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(connection.Connection, "on_body", fail)
    with ScriptedServer(Exchange.answer) as server, pytest.raises(ZeroDivisionError, match="ours") as caught:
        send(server.port, plan(8, 4))
    assert "in a client process" in caught.value.__notes__[0] and "in fail" in caught.value.__notes__[0]


def test_an_exception_that_can_not_travel_is_told() -> None:
    class Local(Exception):
        pass

    assert "Local: here" in str(processes._portable(Local("here")))


PARENT = """
    import os, signal, sys, threading
    from array import array
    from kvladder.config.traffic import PassPlan, Request
    from kvladder.load import Limits, Target, run_in_processes
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    wave = [Request(index, "p", array("I", [index]), 1) for index in range(8)]
    plan = PassPlan("w", "warm", 0, 4, wave)
    run_in_processes(
        Target("127.0.0.1", int(sys.argv[1]), "m"), plan, Limits(2, 60, 60), 2,
        progress=lambda now: print(now.in_flight, flush=True),
    )
"""


@pytest.mark.parametrize(("end", "code"), [("kill", -signal.SIGKILL), ("interrupt the group", -signal.SIGINT)])
def test_processes_are_gone_with_their_parent(end: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT), encoding="utf-8")
    with ScriptedServer(hang) as server:
        command = [sys.executable, str(script), str(server.port)]
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0, text=True)
        assert parent.stdout is not None
        assert any(line == "4\n" for line in parent.stdout)
        left = psutil.Process(parent.pid).children()
        assert len(left) == 2
        if end == "kill":
            parent.kill()
        else:
            os.killpg(parent.pid, signal.SIGINT)
        _, errors = parent.communicate(timeout=10)
        gone, alive = psutil.wait_procs(left, timeout=5)
    assert alive == [] and len(gone) == 2
    assert parent.returncode == code
    assert ("KeyboardInterrupt" in errors) == (end != "kill")
    assert "client process" not in errors
