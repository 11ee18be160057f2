"""One HTTP connection of the load client."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from socket import CMSG_SPACE, SO_ERROR, SOL_SOCKET, socket
from struct import Struct
from time import monotonic_ns
from typing import TYPE_CHECKING

import httptools

if TYPE_CHECKING:
    from kvladder.load.client import PassRun
    from kvladder.load.decode import RawStream
    from kvladder.load.wire import Wire

# Linux, <asm-generic/socket.h>; the socket module has no name for it.
_SO_TIMESTAMPNS = 35
_TIMESPEC = Struct("@ll")
_STAMP_ROOM = CMSG_SPACE(_TIMESPEC.size)
# A raw line break can't stand inside an event's JSON, so this is the end mark and never a token's text.
_DONE_LINE = re.compile(rb"[\r\n]data: ?\[DONE\][\r\n]")
_DONE_LENGTH = 16


class Connection:
    """Reads into the buffer that all connections share, stamps what arrives and keeps it; parses HTTP framing only.

    Each read brings its own stamp: when the kernel received its last byte. It is the moment that counts, however busy
    the loop is; where the kernel gives none, the moment of the read does. Several chunks that wait for a read are one
    to the kernel, with the stamp of the last. So the socket is read directly: no transport of asyncio hands on what
    comes beside the data, and asking for it before each read would be a second call.
    """

    __slots__ = (
        "buffer",
        "closed",
        "complete",
        "done_ns",
        "fd",
        "idle_since_ns",
        "interim",
        "keep_alive",
        "late",
        "now",
        "parser",
        "position",
        "receive",
        "rest",
        "run",
        "sock",
        "stream",
        "tail",
        "used",
    )

    def __init__(self, run: PassRun, sock: socket) -> None:
        self.run = run
        self.sock = sock
        self.fd = sock.fileno()
        # Looked up once: they are used at every read.
        self.receive = sock.recvmsg_into
        self.buffer = run.buffers[0]
        self.parser = httptools.HttpResponseParser(self)
        self.stream: RawStream | None = None
        self.rest: list[memoryview] | None = None
        self.position = -1
        self.now = 0
        self.late = -1
        self.idle_since_ns = 0
        self.used = self.closed = False
        self._reset()
        sock.setsockopt(SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        run.loop.add_reader(self.fd, self._readable)

    def _reset(self) -> None:
        self.complete = self.interim = self.keep_alive = False
        self.done_ns = 0
        self.tail = b""

    # --- the pass's side ---

    def usable(self, now: int, reuse_ns: int) -> bool:
        """Fit for a request: open, and not idle so long that the server may be about to close it."""
        return not self.closed and (not self.used or now - self.idle_since_ns < reuse_ns)

    def send(self, stream: RawStream, position: int, wire: Wire) -> None:
        """Hand a request to the socket; the clock of the request starts right before.

        Raises OSError when the connection is gone and nothing was written.
        """
        stream.send_ns = stream.last_ns = monotonic_ns()
        try:
            written = os.writev(self.fd, wire.pieces)
        except BlockingIOError:
            written = 0
        if written < wire.size:
            self.rest = _rest(wire.pieces, written)
            self.run.loop.add_writer(self.fd, self._writable)
        self.stream = stream
        self.position = position

    def check(self) -> None:
        """Notice that the connection is lost: an error that comes with data wakes the reader once and never again."""
        code = self.sock.getsockopt(SOL_SOCKET, SO_ERROR)
        if code:
            self._lost(OSError(code, os.strerror(code)))

    def release(self) -> bool:
        """Forget the finished stream; returns whether the connection can carry another one."""
        reusable = self.complete and self.keep_alive and self.rest is None and not self.closed
        self.stream = None
        self.used = True
        self.idle_since_ns = self.now
        self._reset()
        return reusable

    def drop(self) -> None:
        """Close at once, so that the server stops working for nobody."""
        self.stream = None
        if not self.closed:
            self.closed = True
            self.run.loop.remove_reader(self.fd)
            self._sent()
            self.sock.close()

    # --- the socket's side; what is raised here is a fault of ours and ends the pass ---

    def _writable(self) -> None:
        try:
            self.rest = _rest(self.rest, os.writev(self.fd, self.rest)) if self.rest else None
        except BlockingIOError:
            return
        except OSError:  # the read side knows more: an answer that came before the end, or why there is none
            self.rest = None
        if not self.rest:
            self._sent()

    def _sent(self) -> None:
        self.rest = None
        self.run.loop.remove_writer(self.fd)

    def _readable(self) -> None:
        try:
            received, ancillary, _, _ = self.receive(self.run.buffers, _STAMP_ROOM)
        except BlockingIOError:
            return
        except OSError as error:
            self.now = monotonic_ns()
            self._lost(error)
            return
        read_ns = self.now = monotonic_ns()
        self.late = -1
        stream = self.stream
        if not received:
            self._lost(None)
        elif stream is None:  # bytes that nobody asked for
            self.run.lost(self)
        else:
            stream.last_ns = read_ns
            if ancillary:
                seconds, nanoseconds = _TIMESPEC.unpack(ancillary[0][2])
                arrived = seconds * 1_000_000_000 + nanoseconds + self.run.monotonic_less_real
                earliest = stream.times[-1] if stream.times else stream.send_ns
                if earliest is not None and earliest <= arrived <= read_ns:  # else somebody has set the clock
                    self.now = arrived
                    self.late = read_ns - arrived
            self._read(stream, received)

    def _read(self, stream: RawStream, received: int) -> None:
        stream.received += received
        reason = None
        try:
            self.parser.feed_data(self.buffer[:received])
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
        stream.late.append(self.late)
        stream.pieces.append(body)
        tail = self.tail
        if tail or b"[DONE]" in body:
            self._look_for_done(stream, tail, body)
        if body.endswith(b"\n\n"):
            self.tail = b""  # behind a blank line nothing has begun
        else:
            self.tail = (body if len(body) >= _DONE_LENGTH else (tail or b"\n") + body)[-_DONE_LENGTH:]

    def _look_for_done(self, stream: RawStream, tail: bytes, body: bytes) -> None:
        """Find the end mark, which the border of two pieces may cut; a long piece is searched, never copied."""
        border = (tail or b"\n") + body[:_DONE_LENGTH]
        if not self.done_ns and (_done(border) or _done(body)):
            self.done_ns = stream.end_ns = self.now

    def on_message_complete(self) -> None:
        if not self.interim:
            self.complete = True


def _rest(pieces: Sequence[bytes | memoryview], written: int) -> list[memoryview]:
    """What is left of these pieces, without a copy, once so many bytes of them are written."""
    left = []
    for piece in pieces:
        if written < len(piece):
            left.append(memoryview(piece)[written:])
        written = max(written - len(piece), 0)
    return left


def _done(body: bytes) -> bool:
    return b"[DONE]" in body and _DONE_LINE.search(body) is not None
