"""Order, concurrency, connections and the way out of a pass."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from scripted_server import HEAD_CLOSE, Close, Exchange, ScriptedServer, event, timed_server, usage_event

from kvladder.config.records import RequestRecord
from kvladder.config.traffic import PassPlan, Request
from kvladder.load import Limits, PassResult, Progress, Target, client, connection, run_pass, write_records

LIMITS = Limits(connect_s=2, request_s=10, stall_s=5)


def requests(count: int, tokens: int = 1, prompt: int = 2, after: dict[int, int] | None = None) -> list[Request]:
    chain = after or {}
    return [
        Request(index, f"p{index}", array("I", [index, *range(50_000, 50_000 + prompt - 1)]), tokens, chain.get(index))
        for index in range(count)
    ]


def send(port: int, wave: list[Request], concurrency: int, limits: Limits = LIMITS, **options: Any) -> PassResult:
    plan = PassPlan(workload="w", name="warm", round=2, concurrency=concurrency, requests=wave)
    return run_pass(Target("127.0.0.1", port, "m", **options), plan, limits)


def slow_answer(exchange: Exchange) -> None:
    time.sleep(0.03)
    exchange.answer()


def test_concurrency_is_refilled_on_completion_in_order() -> None:
    with ScriptedServer(slow_answer) as server:
        result = send(server.port, requests(12), concurrency=4)
    assert result.failed == 0
    assert max(flying for _, flying, _ in result.in_flight) == 4
    sent = [record.send_ns for record in result.records]
    assert sent == sorted(sent, key=lambda ns: ns or 0)
    assert [row[1:] for row in result.in_flight[:5]] == [(0, 12), (1, 12), (2, 12), (3, 12), (4, 12)]
    assert result.in_flight[-1][1:] == (0, 0)
    assert [row[0] for row in result.in_flight] == sorted(row[0] for row in result.in_flight)
    held = wanted = 0
    for (start, flying, eligible), (end, _, _) in zip(result.in_flight, result.in_flight[1:], strict=False):
        held += flying * (end - start)
        wanted += min(4, eligible) * (end - start)
    assert held / wanted > 0.9
    assert result.start_ns <= result.in_flight[0][0] and result.end_ns >= result.in_flight[-1][0]
    assert result.client_cpu_ns > 0


def test_connections_open_before_the_clock_and_are_used_again() -> None:
    with ScriptedServer(slow_answer) as server:
        result = send(server.port, requests(20), concurrency=4)
        first_wave = {exchange.connection for exchange in server.exchanges}
        assert server.connections == 5  # one is spare
        assert len(first_wave) <= 5
    waits = [(record.send_ns or 0) - record.eligible_ns for record in result.records]
    assert min(waits) < 5e6


def test_server_that_closes_after_each_answer() -> None:
    def script(exchange: Exchange) -> None:
        exchange.send(HEAD_CLOSE)
        exchange.send(event([1]) + usage_event(2, 1) + b"data: [DONE]\n\n")
        raise Close

    with ScriptedServer(script) as server:
        result = send(server.port, requests(30), concurrency=4)
    assert [record.error for record in result.records] == [None] * 30
    assert 30 <= server.connections <= 40


def test_server_that_closes_unused_connections() -> None:
    """Connections opened ahead are lost at once: opened at need only then, not without end."""
    closed = threading.Event()

    def answer(exchange: Exchange) -> None:
        exchange.answer()

    with ScriptedServer(answer) as server:
        accept = server._serve

        def serve(sock: Any, connection: int) -> None:
            if connection <= 5:
                closed.set()
                sock.close()
            else:
                accept(sock, connection)

        server._serve = serve  # type: ignore[method-assign]
        result = send(server.port, requests(8), concurrency=2)
    assert closed.is_set()
    assert sum(record.status == "ok" for record in result.records) >= 4
    assert server.connections <= 30


def test_answer_before_the_request_is_out() -> None:
    """A server may refuse a body that it hasn't read; what is left of it must not reach the next request's server."""
    served: list[int] = []

    def serve(sock: Any, connection: int) -> None:
        sock.recv(1000)
        served.append(connection)
        sock.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        server.stopping.wait(5)

    with ScriptedServer(slow_answer) as server:
        server._serve = serve  # type: ignore[method-assign]
        result = send(server.port, requests(2, prompt=2_000_000), concurrency=1)
    assert [(record.status, record.http_status) for record in result.records] == [("failed", 413)] * 2
    assert len(set(served)) == 2
    (first, second) = result.records
    assert first.end_ns is not None and second.end_ns is not None and second.end_ns - first.eligible_ns < 3e9


def test_long_request_to_a_slow_reader_arrives_whole() -> None:
    """More than a socket takes at once: the rest follows as the server reads."""
    with ScriptedServer(Exchange.answer) as server:
        accept = server._serve

        def serve(sock: Any, connection: int) -> None:
            time.sleep(0.2)
            accept(sock, connection)

        server._serve = serve  # type: ignore[method-assign]
        wave = requests(2, prompt=2_000_000)
        result = send(server.port, wave, concurrency=2)
        assert sorted(exchange.json["prompt"] for exchange in server.exchanges) == [list(item.prompt) for item in wave]
    assert [record.error for record in result.records] == [None, None]


def test_a_turn_waits_for_the_one_before() -> None:
    with ScriptedServer(slow_answer) as server:
        result = send(server.port, requests(6, after={2: 0, 4: 2, 3: 1}), concurrency=6)
    records = result.records
    for later, earlier in ((2, 0), (4, 2), (3, 1)):
        assert records[later].eligible_ns >= (records[earlier].end_ns or 0)
    assert records[5].eligible_ns == records[0].eligible_ns
    assert result.in_flight[0][2] == 3
    assert all(not record.anomalies for record in records)


def test_a_turn_after_a_failed_one_is_sent_and_marked() -> None:
    def script(exchange: Exchange) -> None:
        if exchange.json["prompt"][0] == 0:
            raise Close
        exchange.answer()

    with ScriptedServer(script) as server:
        result = send(server.port, requests(2, after={1: 0}), concurrency=1)
    assert [record.status for record in result.records] == ["failed", "ok"]
    assert result.records[1].anomalies == ["request 0, which came before it, failed"]


@pytest.mark.parametrize(
    ("after", "message"),
    [({0: 1, 1: 0}, "circle"), ({1: 1}, "circle"), ({1: 7}, "waits for request 7, which is not in the pass")],
)
def test_plans_that_can_not_be_carried_out(after: dict[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        send(9, requests(3, after=after), concurrency=1)
    with pytest.raises(ValueError, match="concurrency"):
        send(9, requests(1), concurrency=0)


def test_empty_pass() -> None:
    result = send(9, [], concurrency=1)
    assert (result.records, result.in_flight, result.failed) == ([], [], 0)


def test_key_goes_into_the_header_and_not_into_repr() -> None:
    with ScriptedServer(Exchange.answer) as server:
        send(server.port, requests(1), concurrency=1, api_key="s3cret")
        assert b"Authorization: Bearer s3cret\r\n" in server.exchanges[0].head
        assert b"POST /v1/completions HTTP/1.1\r\n" in server.exchanges[0].head
        assert b"Host: 127.0.0.1:%d\r\n" % server.port in server.exchanges[0].head
    assert "s3cret" not in repr(Target("h", 1, "m", "s3cret"))


@pytest.mark.parametrize("bad", [{"api_key": "a\r\nb"}, {"path": "x"}, {"path": "/a b"}])
def test_targets_that_do_not_fit_a_header(bad: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="must"):
        Target("h", 1, "m", **bad)


def test_limits_are_positive() -> None:
    with pytest.raises(ValueError, match="stall_s"):
        Limits(1, 1, 0)


def test_records_round_trip(tmp_path: Path) -> None:
    def script(exchange: Exchange) -> None:
        if exchange.number == 1:
            raise Close
        exchange.answer()

    with ScriptedServer(script) as server:
        result = send(server.port, requests(3, tokens=2), concurrency=1)
    path = tmp_path / "w.requests.jsonl"
    assert write_records(path, result.records) == 3
    assert write_records(path, result.records, append=True) == 3
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 6
    for line, trace in zip(lines, result.records * 2, strict=True):
        record = RequestRecord.model_validate_json(line)
        assert record.model_dump(by_alias=True) == json.loads(line)
        assert record.pass_name == "warm"
        for name in trace.__slots__:
            assert getattr(record, name) == getattr(trace, name)


def test_progress_and_undisturbed_interpreter() -> None:
    seen: list[tuple[Progress, bool]] = []

    def script(exchange: Exchange) -> None:
        time.sleep(0.3)
        exchange.answer()

    with ScriptedServer(script) as server:
        plan = PassPlan("w", "cold", 0, 1, requests(3))
        target = Target("127.0.0.1", server.port, "m")
        run_pass(target, plan, LIMITS, progress=lambda now: seen.append((now, gc.isenabled())))
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert seen[0][1] is False
    assert (seen[0][0].total, seen[0][0].in_flight) == (3, 1)
    assert seen[-1][0] == Progress(total=3, done=3, failed=0, in_flight=0)


def test_what_progress_raises_ends_the_pass() -> None:
    def stop(_: Progress) -> None:
        raise RuntimeError("server died")

    def hang(exchange: Exchange) -> None:
        server.stopping.wait(30)

    with ScriptedServer(hang) as server:
        plan = PassPlan("w", "cold", 0, 1, requests(1))
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="server died"):
            run_pass(Target("127.0.0.1", server.port, "m"), plan, LIMITS, progress=stop)
        assert time.monotonic() - begin < LIMITS.stall_s
    assert gc.isenabled()


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_pass_through(number: signal.Signals, busy: bool) -> None:
    """Both while the loop sleeps and while its callbacks run; in a process of its own, for the handlers' sake."""
    code = f"""
        import signal, sys, threading, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from array import array
        from scripted_server import ScriptedServer, HEAD, chunked, event
        from kvladder.config.traffic import PassPlan, Request
        from kvladder.load import Limits, Target, run_pass

        def script(exchange):
            exchange.send(HEAD)
            print("up", flush=True)
            while True:
                if {busy}:
                    exchange.send(chunked(event([1])) * 50)
                    time.sleep(0.001)
                else:
                    exchange.send(chunked(b":"))
                    time.sleep(0.3)

        def terminate(*_):
            raise SystemExit(7)

        signal.signal(signal.SIGTERM, terminate)
        with ScriptedServer(script) as server:
            plan = PassPlan("w", "cold", 0, 3, [Request(i, str(i), array("I", [i]), 100_000) for i in range(3)])
            try:
                run_pass(Target("127.0.0.1", server.port, "m"), plan, Limits(2, 20, 20))
            except KeyboardInterrupt:
                sys.exit(8)
    """
    process = subprocess.Popen(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=8)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (8 if number == signal.SIGINT else 7), errors.decode()
    assert b"Traceback" not in errors


def test_bias_of_ttft_at_64_in_flight() -> None:
    """Against the server's own write times; the best of three, for a machine that does other things."""
    medians: list[float] = []
    while len(medians) < 3 and min(medians, default=9.0) >= 2:
        with timed_server(ttft_s=0.05, itl_s=0.01, tokens=4) as server:
            result = send(server.port, requests(256, tokens=4, prompt=1000), concurrency=64)
            log = server.close()
        assert result.failed == 0
        assert max(flying for _, flying, _ in result.in_flight) == 64
        late = [(record.first_token_ns or 0) - log[record.index][1] for record in result.records]
        assert min(late) >= 0
        medians.append(sorted(late)[len(late) // 2] / 1e6)
    assert min(medians) < 2


def test_a_wave_of_long_prompts_lets_the_loop_look_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """40,000 ids are 240 kB: sent at a stretch, 64 of them would hold back what arrives meanwhile."""
    stretches: list[list[int]] = [[]]
    write, turn = connection.Connection.send, client.PassRun._next_turn

    def send_one(self: connection.Connection, stream: Any, position: int, wire: Any) -> None:
        stretches[-1].append(wire.size)
        write(self, stream, position, wire)

    def next_turn(self: client.PassRun) -> None:
        stretches.append([])
        turn(self)

    monkeypatch.setattr(connection.Connection, "send", send_one)
    monkeypatch.setattr(client.PassRun, "_next_turn", next_turn)
    with ScriptedServer(slow_answer) as server:
        assert send(server.port, requests(8, prompt=40_000), concurrency=8).failed == 0
        long = [sizes for sizes in stretches if sizes]
        stretches[:] = [[]]
        assert send(server.port, requests(64), concurrency=64).failed == 0
    assert [len(sizes) for sizes in long] == [1] * 8 and min(map(min, long)) > 200_000
    assert max(len(sizes) for sizes in stretches) == 16


def test_long_prompts_and_their_echo() -> None:
    """60,000 ids go out in one body and come back in the first chunk (several reads); others aren't held up."""

    def script(exchange: Exchange) -> None:
        exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        prompt = exchange.json["prompt"]
        exchange.chunks(
            event([1], prompt_token_ids=prompt), event([2]), usage_event(len(prompt), 2), b"data: [DONE]\n\n"
        )
        exchange.send(b"0\r\n\r\n")

    wave = requests(6, tokens=2, prompt=60_000)
    with ScriptedServer(script) as server:
        result = send(server.port, wave, concurrency=3)
        assert sorted(exchange.json["prompt"] for exchange in server.exchanges) == [list(item.prompt) for item in wave]
    for record in result.records:
        assert (record.status, record.anomalies, record.chunk_tokens) == ("ok", [], [1, 1])
        assert record.usage_prompt_tokens == 60_000
    assert result.client_cpu_ns < 0.5e9
