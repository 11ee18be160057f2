"""Just enough of an HTTP/1.1 server for the stand-ins, FOR TESTS ONLY: keep-alive requests with a length."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

NAME = "kvladder-stub-engine (not vLLM, tests only)"


@dataclass(frozen=True)
class Request:
    """One request: ``headers`` by lower-case name."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """A whole answer: ``body`` is text, something for JSON, or None for nothing."""

    status: int
    body: Any = None

    def encode(self) -> bytes:
        """The bytes of head and body."""
        text = isinstance(self.body, str)
        data = b"" if self.body is None else (self.body if text else json.dumps(self.body)).encode()
        head = f"HTTP/1.1 {self.status} {'OK' if self.status == 200 else 'Error'}\r\nserver: {NAME}\r\n"
        head += f"content-type: {'text/plain' if text else 'application/json'}\r\ncontent-length: {len(data)}\r\n\r\n"
        return head.encode() + data


Handler = Callable[[Request, asyncio.StreamWriter], Awaitable[Answer | None]]
"""Answers a request; None where it has written a stream of its own and closed it with the connection's end in mind."""


class Hangup(Exception):
    """Raised by a handler that wants the connection closed."""


async def serve(handler: Handler, host: str, port: int) -> asyncio.Server:
    """Listen; the server runs until it is closed."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, Hangup):
            while True:
                answer = await handler(await _request(reader), writer)
                if answer is not None:
                    writer.write(answer.encode())
                await writer.drain()
        writer.close()

    return await asyncio.start_server(connection, host, port, limit=2**24)


async def _request(reader: asyncio.StreamReader) -> Request:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    path, _, query = target.partition("?")
    return Request(method, path, query, headers, body)
