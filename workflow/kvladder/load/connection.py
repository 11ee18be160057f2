"""One HTTP connection of the load client."""

from __future__ import annotations

import asyncio
import os
import re
from time import monotonic_ns
from typing import TYPE_CHECKING, cast

import httptools

if TYPE_CHECKING:
    from kvladder.load.client import PassRun
    from kvladder.load.decode import RawStream

# A raw line break can't stand inside an event's JSON, so this is the end mark and never a token's text.
_DONE_LINE = re.compile(rb"[\r\n]data: ?\[DONE\][\r\n]")
_DONE_LENGTH = 16


class Connection(asyncio.BufferedProtocol):
    """Reads into the buffer that all connections share, stamps what arrives and keeps it; parses HTTP framing only.

    A read goes from the kernel to `buffer_updated` in one step, so one large buffer serves every connection: a first
    chunk of hundreds of kilobytes (the server echoes the prompt) takes few reads, and no memory a connection.
    """

    __slots__ = (
        "complete",
        "done_ns",
        "fd",
        "idle_since_ns",
        "interim",
        "keep_alive",
        "now",
        "parser",
        "position",
        "run",
        "stream",
        "tail",
        "transport",
        "used",
    )

    def __init__(self, run: PassRun) -> None:
        self.run = run
        self.parser = httptools.HttpResponseParser(self)
        self.stream: RawStream | None = None
        self.position = -1
        self.now = 0
        self.idle_since_ns = 0
        self.used = False
        self._reset()

    def _reset(self) -> None:
        self.complete = self.interim = self.keep_alive = False
        self.done_ns = 0
        self.tail = b"\n"

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.fd = transport.get_extra_info("socket").fileno()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.run.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.now = monotonic_ns()
        try:
            self._read(nbytes)
        except Exception as error:  # a fault of ours ends the pass, not the stream
            self.run.abort(error)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.now = monotonic_ns()
        try:
            self._lost(exc)
        except Exception as error:
            self.run.abort(error)

    # --- the pass's side ---

    def usable(self, now: int, reuse_ns: int) -> bool:
        """Fit for a request: open, and not idle so long that the server may be about to close it."""
        return not self.transport.is_closing() and (not self.used or now - self.idle_since_ns < reuse_ns)

    def send(self, stream: RawStream, position: int, wire: bytes) -> None:
        """Hand a request to the socket; the clock of the request starts right before.

        The first write bypasses the transport, which would hold it back until the loop has served every readable
        connection, and so would count the client's own queue as the server's time. Raises OSError when the connection
        is gone and nothing was written.
        """
        stream.send_ns = stream.last_ns = monotonic_ns()
        try:
            written = os.write(self.fd, wire)
        except BlockingIOError:
            written = 0
        if written < len(wire):
            self.transport.write(memoryview(wire)[written:])
        self.stream = stream
        self.position = position

    def release(self) -> bool:
        """Forget the finished stream; returns whether the connection can carry another one."""
        reusable = self.complete and self.keep_alive and not self.transport.is_closing()
        self.stream = None
        self.used = True
        self.idle_since_ns = self.now
        self._reset()
        return reusable

    def drop(self) -> None:
        """Close at once, so that the server stops working for nobody."""
        self.stream = None
        self.transport.abort()

    def _read(self, nbytes: int) -> None:
        stream = self.stream
        if stream is None:  # bytes that nobody asked for
            self.run.lost(self)
            return
        stream.last_ns = self.now
        stream.received += nbytes
        reason = None
        try:
            self.parser.feed_data(self.run.buffer[:nbytes])
        except httptools.HttpParserCallbackError as error:
            raise (error.__context__ or error) from None
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                reason = f"not HTTP: {error}"
            self.keep_alive = False
        if self.complete or reason is not None:
            self.run.finish(self, reason)
        elif stream.received > stream.byte_limit:
            self.run.finish(self, f"more than {stream.byte_limit} bytes")

    def _lost(self, exc: Exception | None) -> None:
        stream = self.stream
        if stream is None:
            self.run.lost(self)
            return
        reason = None
        if exc is not None:
            reason = f"connection lost: {exc}"
        elif stream.http_status is None:
            reason = "connection closed before a response"
        elif self.keep_alive and not self.done_ns:
            # Framed, but the frame never ended; the tokens decide whether that is a failure.
            stream.anomalies.append("connection closed inside the response body")
        self.run.finish(self, reason)

    # --- the HTTP parser's side ---

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        self.interim = 100 <= status < 200
        stream = self.stream
        if stream is None or self.interim or self.complete:
            return
        stream.headers_ns = self.now
        stream.http_status = status
        self.keep_alive = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        stream = self.stream
        if stream is None or self.complete:
            return
        stream.times.append(self.now)
        stream.pieces.append(body)
        recent = self.tail + body
        if b"[DONE]" in recent and not self.done_ns and _DONE_LINE.search(recent):
            self.done_ns = stream.end_ns = self.now
        self.tail = recent[-_DONE_LENGTH:]

    def on_message_complete(self) -> None:
        if not self.interim:
            self.complete = True
