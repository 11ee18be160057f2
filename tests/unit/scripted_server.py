"""Raw-socket servers for tests of the load client: exact bytes at scripted times, with the times written down.

`ScriptedServer` runs a function for every request, in threads of the test process: for streams that misbehave.
`TimedServer` is a process of its own with a fixed schedule, whose log says when each request was read and when each
chunk was written: for measurements.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
HEAD_CLOSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def chunked(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(
    ids: Iterable[int] | None = None, text: str = "", usage: dict[str, Any] | None = None, **choice: Any
) -> bytes:
    """A completion chunk as vLLM sends it; ``ids`` None leaves the token ids out."""
    body: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **choice}
    if ids is not None:
        body["token_ids"] = list(ids)
    message: dict[str, Any] = {"id": "cmpl-1", "object": "text_completion", "choices": [body]}
    if usage is not None:
        message["usage"] = usage
    return data(message)


def data(message: Any) -> bytes:
    """One event with a JSON body."""
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """A usage object."""
    details = None if cached is None else {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}


def usage_event(prompt: int, completion: int, cached: int | None = None) -> bytes:
    """The last chunk of a stream with include_usage."""
    return data({"choices": [], "usage": usage(prompt, completion, cached)})


@dataclass
class Exchange:
    """One request as the server read it, and the means to answer it. ``writes`` holds (ns, bytes) in order."""

    sock: socket.socket
    number: int
    connection: int
    head: bytes
    body: bytes
    read_ns: int
    writes: list[tuple[int, int]] = field(default_factory=list)
    reset: bool = False

    @property
    def json(self) -> dict[str, Any]:
        """The request's body."""
        return json.loads(self.body)  # type: ignore[no-any-return]

    def send(self, payload: bytes) -> None:
        """Write bytes and note the moment right before."""
        self.writes.append((time.monotonic_ns(), len(payload)))
        self.sock.sendall(payload)

    def chunks(self, *payloads: bytes) -> None:
        """Write each payload as a chunk of its own."""
        for payload in payloads:
            self.send(chunked(payload))

    def answer(self) -> None:
        """A faultless stream: one token a chunk, with its id where the request asks for ids; usage, [DONE]."""
        request = self.json
        prompt, count = len(request["prompt"]), request["max_tokens"]
        ids = request.get("return_token_ids")
        self.send(HEAD)
        for place in range(count):
            self.chunks(event([7 + place]) if ids else event(None, usage=usage(prompt, place + 1)))
        self.chunks(usage_event(prompt, count), DONE)
        self.send(END)


class Close(Exception):
    """A script raises this to close the connection properly."""


class Reset(Exception):
    """A script raises this to reset the connection."""


Script = Callable[[Exchange], None]


class ScriptedServer:
    """Runs ``script`` for every request on a free loopback port; ``exchanges`` keeps what happened."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.exchanges: list[Exchange] = []
        self.connections = 0
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.stopping = threading.Event()

    def __enter__(self) -> ScriptedServer:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self.stopping.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(sock)
            self.connections += 1
            self._start(self._serve, sock, self.connections)

    def _serve(self, sock: socket.socket, connection: int) -> None:
        with contextlib.suppress(OSError), sock:
            stream = sock.makefile("rb")
            while True:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    line = stream.readline()
                    if not line:
                        return
                    head += line
                length = re.search(rb"(?i)content-length: *(\d+)", head)
                body = stream.read(int(length[1])) if length else b""
                with self._lock:
                    exchange = Exchange(sock, len(self.exchanges), connection, head, body, time.monotonic_ns())
                    self.exchanges.append(exchange)
                try:
                    self.script(exchange)
                except Close:
                    return
                except Reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    stream.close()
                    return


@contextlib.contextmanager
def timed_server(ttft_s: float, itl_s: float, tokens: int) -> Iterator[TimedServer]:
    """Start a `TimedServer` process; ``close()`` inside the block returns its log."""
    server = TimedServer(ttft_s, itl_s, tokens)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        for pipe in (server.process.stdin, server.process.stdout):
            assert pipe is not None
            pipe.close()


class TimedServer:
    """Answers every request with ``tokens`` tokens, the first ``ttft_s`` after the request was read, then every
    ``itl_s``; the first id of a prompt names it in the log."""

    def __init__(self, ttft_s: float, itl_s: float, tokens: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(ttft_s), str(itl_s), str(tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def close(self) -> dict[int, list[int]]:
        """Stop; gives [request read, first chunk written, second …] in ns by the prompt's first id."""
        out, _ = self.process.communicate(b"", timeout=30)
        return {int(first): times for first, times in json.loads(out).items()}


class _Timed(asyncio.Protocol):
    def __init__(self, ttft_s: float, itl_s: float, tokens: int, log: dict[str, list[int]]) -> None:
        self.ttft_s, self.itl_s, self.tokens, self.log = ttft_s, itl_s, tokens, log
        self.loop = asyncio.get_running_loop()
        self.pending = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.fd = transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        self.pending += data
        head, mark, body = self.pending.partition(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        if not mark or length is None or len(body) < int(length[1]):
            return
        self.pending.clear()
        prompt = re.search(rb'"prompt":\[(\d+)', body[:300])
        assert prompt is not None
        self.times = self.log.setdefault(prompt[1].decode(), [])
        self.times.append(time.monotonic_ns())
        os.write(self.fd, HEAD)
        self.left = self.tokens
        if self.ttft_s:
            self.loop.call_later(self.ttft_s, self.write)
        else:
            self.write()

    def write(self) -> None:
        self.times.append(time.monotonic_ns())
        self.left -= 1
        token = chunked(event(None, usage=usage(1, self.tokens - self.left)))
        if not self.left:
            os.write(self.fd, token + chunked(usage_event(1, self.tokens)) + chunked(DONE) + END)
            return
        os.write(self.fd, token)
        if self.itl_s:
            self.loop.call_later(self.itl_s, self.write)
        else:
            self.write()


async def _serve_timed(ttft_s: float, itl_s: float, tokens: int) -> None:
    log: dict[str, list[int]] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Timed(ttft_s, itl_s, tokens, log), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)
    print(json.dumps(log))


if __name__ == "__main__":
    import uvloop

    parser = argparse.ArgumentParser()
    parser.add_argument("ttft_s", type=float)
    parser.add_argument("itl_s", type=float)
    parser.add_argument("tokens", type=int)
    uvloop.run(_serve_timed(**vars(parser.parse_args())))
