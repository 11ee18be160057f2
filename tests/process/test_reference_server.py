"""The reference server: what it sends, when, and what it writes down."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, get_args

import pytest

from kvladder.bench.server import SOURCE, ReferenceServer, Schedule, Served, ServerError, build, running
from kvladder.config.bench import Fault

MS = 1_000_000


def test_it_compiles_without_a_warning(tmp_path: Path) -> None:
    options = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fsanitize=address,undefined"]
    command = ["gcc", *options, "-o", str(tmp_path / "s"), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match="apt-get install gcc"):
        build(tmp_path / "s")


class Client:
    """One connection, blocking."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.stream = self.sock.makefile("rb")

    def send(self, path: str = "/v1/completions", headers: str = "", **body: Any) -> None:
        data = json.dumps({"model": "m", "prompt": [1, 2, 3], "stream": True} | body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
        self.sock.sendall(head.encode() + data)

    def head(self) -> int:
        status = int(self.stream.readline().split()[1])
        while self.stream.readline().strip():
            pass
        return status

    def chunk(self) -> bytes:
        """The next HTTP chunk; empty at the end of the body."""
        size = int(self.stream.readline(), 16)
        data = self.stream.read(size)
        assert self.stream.readline() == b"\r\n"
        return data

    def answer(self, **body: Any) -> tuple[int, list[bytes]]:
        """Send, and read the whole answer."""
        self.send(**body)
        status = self.head()
        return status, list(iter(self.chunk, b""))


def events(chunks: list[bytes]) -> list[Any]:
    """The data of the events, [DONE] as it is."""
    lines = re.split(rb"\r?\n", b"".join(chunks))
    data = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    return [item.decode() if item == b"[DONE]" else json.loads(item) for item in data]


@pytest.fixture
def serve(binary: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ReferenceServer]:
    """A server with the schedule of the test's parameter, 1 ms and 1 ms without."""
    schedule = getattr(request, "param", Schedule(1, 1))
    with running(binary, schedule, tmp_path / "log.jsonl") as server:
        yield server


def test_a_stream_as_vllm_sends_it(serve: ReferenceServer) -> None:
    client = Client(serve.port)
    status, chunks = client.answer(
        max_tokens=3, stream_options={"include_usage": True}, return_token_ids=True, prompt=[5, 6, 7]
    )
    first, second, third, usage, done = events(chunks)
    assert (status, len(chunks), done) == (200, 5, "[DONE]")
    assert [item["choices"][0]["token_ids"] for item in (first, second, third)] == [[0], [1], [1]]
    assert [item["choices"][0]["text"] for item in (first, second, third)] == ["#0", " w", " w"]
    assert [item["choices"][0]["finish_reason"] for item in (first, second, third)] == [None, None, "length"]
    assert first["choices"][0]["prompt_token_ids"] == [5, 6, 7] and "prompt_token_ids" not in second["choices"][0]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 3 and first["usage"] is None


def test_only_what_was_asked_for(serve: ReferenceServer) -> None:
    _, chunks = Client(serve.port).answer(max_tokens=2, prompt="some words")
    *tokens, done = events(chunks)
    assert done == "[DONE]" and len(tokens) == 2
    assert all("token_ids" not in item["choices"][0] for item in tokens)


def test_usage_in_every_chunk_where_asked_for(serve: ReferenceServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *tokens, usage, _ = events(Client(serve.port).answer(max_tokens=3, stream_options=options)[1])
    assert [item["usage"]["completion_tokens"] for item in (*tokens, usage)] == [1, 2, 3, 3]


def test_chat_begins_with_the_role(serve: ReferenceServer) -> None:
    _, chunks = Client(serve.port).answer(path="/v1/chat/completions", max_completion_tokens=2)
    role, first, second, _ = events(chunks)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [item["choices"][0]["delta"] for item in (first, second)] == [{"content": "#0"}, {"content": " w"}]


def test_connections_are_kept_and_requests_are_numbered_and_named(serve: ReferenceServer) -> None:
    one, two = Client(serve.port), Client(serve.port)
    for client, name in ((one, "a"), (two, "b"), (one, "c")):
        client.answer(max_tokens=1, headers=f"X-Request-Id: {name}\r\n")
    log = serve.stop()
    assert [(item.number, item.connection, item.request_id, item.state) for item in log] == [
        (0, 0, "a", "complete"),
        (1, 1, "b", "complete"),
        (2, 0, "c", "complete"),
    ]


def test_other_paths(serve: ReferenceServer) -> None:
    client = Client(serve.port)
    for path, key in (("/v1/models", "data"), ("/health", None), ("/metrics", None)):
        client.sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = b"".join(iter(client.stream.readline, b"\r\n"))
        body = client.stream.read(int(re.findall(rb"content-length: (\d+)", head)[0]))
        assert (json.loads(body).get("data") is not None) == (key is not None)
    assert client.answer(max_tokens=1)[0] == 200
    assert len(serve.stop()) == 1


@pytest.mark.parametrize("serve", [Schedule(20, 5, spin_us=50)], indirect=True)
def test_it_keeps_its_schedule_and_says_how_well(serve: ReferenceServer) -> None:
    """Deadlines are absolute: lateness doesn't add up, and no token comes early."""
    client = Client(serve.port)
    for _ in range(20):
        client.answer(max_tokens=8)
    log = serve.stop()
    late = [at - item.due_ns - k * 5 * MS for item in log for k, at in enumerate(item.write_ns)]
    assert [len(item.write_ns) for item in log] == [8] * 20
    assert min(late) >= 0
    assert median(late) < 1 * MS  # some 2 µs on a quiet machine
    last = [item.write_ns[-1] - item.due_ns - 35 * MS for item in log]
    assert median(last) < 1 * MS
    assert all(item.due_ns - item.last_read_ns == 20 * MS for item in log)
    assert all(len(item.write_took_ns) == 8 and min(item.write_took_ns) > 0 for item in log)


def test_arrival_is_the_first_bytes_and_not_when_the_server_read_them(serve: ReferenceServer) -> None:
    """A body in two parts, and a server that is kept from reading: the kernel's stamp tells."""
    client = Client(serve.port)
    body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    before = time.monotonic_ns()
    client.sock.sendall(head + body[:5])
    after = time.monotonic_ns()
    time.sleep(0.05)
    client.sock.sendall(body[5:])
    assert client.head() == 200
    subprocess.run(["kill", "-STOP", str(serve.process.pid)], check=True)
    other = Client(serve.port)
    held_back = time.monotonic_ns()
    other.send(max_tokens=1)
    time.sleep(0.05)
    subprocess.run(["kill", "-CONT", str(serve.process.pid)], check=True)
    assert other.head() == 200
    cut, held = serve.stop()
    slack = 200_000  # the stamp goes through another clock
    assert before - slack <= cut.arrival_ns <= after + 5 * MS
    assert cut.last_read_ns - cut.arrival_ns >= 49 * MS
    assert held.arrival_ns - held_back < held.first_read_ns - held_back - 30 * MS


def test_long_prompts_come_back_whole(serve: ReferenceServer) -> None:
    """More than a socket takes at once; a second stream goes on meanwhile."""
    prompt = list(range(10_000, 70_000))
    slow, quick = Client(serve.port), Client(serve.port)
    slow.send(prompt=prompt, max_tokens=3, return_token_ids=True)
    time.sleep(0.05)
    assert quick.answer(max_tokens=2)[0] == 200
    assert slow.head() == 200
    first, *_, done = events(list(iter(slow.chunk, b"")))
    assert first["choices"][0]["prompt_token_ids"] == prompt and done == "[DONE]"
    assert serve.stop()[0].bytes > 360_000


def test_a_client_that_leaves(serve: ReferenceServer) -> None:
    client = Client(serve.port)
    client.send(max_tokens=100_000)
    client.head()
    client.chunk()
    client.stream.close()
    client.sock.close()
    time.sleep(0.1)
    assert Client(serve.port).answer(max_tokens=1)[0] == 200
    gone, there = serve.stop()
    assert (gone.state, there.state) == ("closed", "complete")
    assert 0 < gone.tokens < 1000 and gone.end_ns >= gone.write_ns[-1]


FAULTS = [fault for fault in get_args(Fault) if fault != "none"]


@pytest.mark.parametrize("fault", FAULTS)
def test_streams_that_misbehave(binary: Path, tmp_path: Path, fault: Fault) -> None:
    options = {"include_usage": True}
    with running(binary, Schedule(2, 1, fault), tmp_path / "log") as server:
        client = Client(server.port)
        client.send(max_tokens=8, stream_options=options, return_token_ids=True)
        status = client.head()
        if fault == "endless":
            chunks = [client.chunk() for _ in range(50)]
            client.sock.close()
            client.stream.close()
            time.sleep(0.1)
        else:
            chunks = list(iter(client.chunk, b""))
            assert client.sock.send(b"") == 0  # still open
        (log,) = server.stop()
    check_fault(fault, status, chunks, log)


def check_fault(fault: Fault, status: int, chunks: list[bytes], log: Served) -> None:
    """That a fault is what its name says, and nothing else is wrong."""
    raw = b"".join(chunks)
    if fault in ("http-500", "http-429"):
        assert status == int(fault[-3:]) and json.loads(raw)["error"]["code"] == status
        assert log.write_ns == []
        return
    assert status == 200
    items = events(chunks)
    texts = [item["choices"][0]["text"] for item in items if isinstance(item, dict) and item.get("choices")]
    gaps = [later - earlier for earlier, later in zip(log.write_ns, log.write_ns[1:], strict=False)]
    usual = ["#0", *[" w"] * 7]
    want = {
        "empty-first": ["", *usual],
        "no-text": [""] * 8,
        "several": ["#0 w w w", " w w w w"],
        "short": usual[:4],
        "error-200": usual[:4],
        "endless": ["#0", *[" w"] * 49],
    }.get(fault, usual)
    assert texts == want
    assert ("[DONE]" in items) == (fault not in ("no-done", "endless"))
    assert (max(gaps) > 1.9e9) == (fault == "stall")
    assert (b"\r\n" in raw) == (fault == "crlf") and (b"\n\n" in raw) == (fault != "crlf")
    assert (b": ping\n\n" in raw) == (fault == "comments")
    assert ("error" in items[-2]) == (fault == "error-200") if fault != "endless" else True
    assert all(chunk.endswith((b"\n\n", b"\r\n\r\n")) for chunk in chunks) == (fault != "cut")
    totals = [item["usage"]["completion_tokens"] for item in items if isinstance(item, dict) and item.get("usage")]
    whole = {"usage": [*range(1, 9), 8], "short": [4], "no-text": [0], "error-200": [], "endless": []}
    assert totals == whole.get(fault, [8])
    assert log.state == ("closed" if fault == "endless" else "complete")


def test_no_text_carries_no_ids(binary: Path, tmp_path: Path) -> None:
    with running(binary, Schedule(0, 0, "no-text"), tmp_path / "log") as server:
        items = events(Client(server.port).answer(max_tokens=2, return_token_ids=True)[1])
    assert all("token_ids" not in item["choices"][0] for item in items if isinstance(item, dict))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--log: a file is wanted"),
        (["--log", "x", "--fault", "odd"], "--fault: unknown: odd"),
        (["--log", "x", "--ttft-us", "5ms"], "--ttft-us: a number of microseconds is wanted, not 5ms"),
        (["--log", "x", "--itl-us", "-1"], "--itl-us: a number of microseconds"),
    ],
)
def test_arguments_that_can_not_be_used(binary: Path, arguments: list[str], message: str) -> None:
    command = [str(binary), *arguments]
    done = subprocess.run(command, stdin=subprocess.PIPE, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr


def test_it_ends_with_whoever_started_it(binary: Path, tmp_path: Path) -> None:
    with running(binary, Schedule(1, 1), tmp_path / "log") as server:
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert server.process.wait(5) == 0
    assert (tmp_path / "log").read_text() == ""
