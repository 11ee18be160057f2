"""From the raw pieces of a stream to its record; runs after the pass, so that no JSON is parsed on the clock."""

from __future__ import annotations

import json
import math
import re
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from pydantic_core import from_json

from kvladder.config.traffic import PassPlan, Request
from kvladder.load.records import RequestTrace

_LINE_END = re.compile(rb"\r\n?|\n")
_ONE_EVENT = re.compile(rb"data: [^\r\n]+\n\n")
_EXCERPT = 300
_TOKEN_ID = "token_id:"  # noqa: S105 - vLLM's prefix of a token that is named by its id


@dataclass(slots=True)
class RawStream:
    """What the client saw of one request: times, body pieces as they came, and why it ended early, if it did.

    ``times[i]`` is the arrival of ``pieces[i]`` in nanoseconds, ``late[i]`` how much later it was read, -1 where the
    kernel didn't stamp it and the moment of the read is all there is. ``reason`` is None for a stream that ended by
    itself.
    """

    request: Request
    byte_limit: int = sys.maxsize
    eligible_ns: int = 0
    send_ns: int | None = None
    last_ns: int = 0
    headers_ns: int | None = None
    end_ns: int | None = None
    http_status: int | None = None
    reason: str | None = None
    received: int = 0
    attempts: int = 0
    times: array[int] = field(default_factory=lambda: array("q"))
    late: array[int] = field(default_factory=lambda: array("q"))
    pieces: list[bytes] = field(default_factory=list)
    anomalies: list[str] = field(default_factory=list)


def decode_pass(plan: PassPlan, streams: Sequence[RawStream]) -> list[RequestTrace]:
    """The records of a pass in plan order; a request whose predecessor failed carries an anomaly that says so."""
    records = [decode(plan, stream) for stream in streams]
    failed = {record.index for record in records if record.status == "failed"}
    for stream, record in zip(streams, records, strict=True):
        if stream.request.after in failed:
            record.anomalies.append(f"request {stream.request.after}, which came before it, failed")
    return records


def decode(plan: PassPlan, stream: RawStream) -> RequestTrace:
    """The record of one stream; whatever the server sent, this raises nothing."""
    request = stream.request
    record = RequestTrace(
        workload=plan.workload,
        pass_name=plan.name,
        round=plan.round,
        index=request.index,
        key=request.key,
        prompt_tokens=len(request.prompt),
        asked_tokens=request.output_tokens,
        eligible_ns=stream.eligible_ns,
        http_status=stream.http_status,
        send_ns=stream.send_ns,
        headers_ns=stream.headers_ns,
        end_ns=stream.end_ns,
        anomalies=stream.anomalies.copy(),
    )
    if stream.http_status is not None and stream.http_status != 200:
        record.error = f"HTTP {stream.http_status}{_excerpt(b''.join(stream.pieces))}"
    elif stream.http_status is not None:
        record.error = _Reader(record).read(stream) or stream.reason
        _check_tokens(record)
    else:
        record.error = stream.reason or "connection closed before a response"
    record.status = "ok" if record.error is None else "failed"
    return record


def events(pieces: Sequence[bytes], times: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Split a server-sent event stream into ``(arrival ns, data)``; comments and events without data give nothing.

    An event arrives with the end of its last data line, wherever the bytes were cut. Lines end with LF, CRLF or CR. A
    last event without its blank line counts, for a server that closes the connection has sent it all the same.
    """
    if all(_ONE_EVENT.fullmatch(piece) for piece in pieces):  # what servers nearly always send
        yield from ((arrival, piece[6:-2]) for arrival, piece in zip(times, pieces, strict=True))
        return
    raw = b"".join(pieces)
    ends = list(accumulate(map(len, pieces)))
    piece = start = arrival = 0
    data: list[bytes] = []
    spans = [match.span() for match in _LINE_END.finditer(raw)]
    if raw and (not spans or spans[-1][1] < len(raw)):
        spans.append((len(raw), len(raw)))
    for line_end, line_next in spans:
        if line_end == start:
            if any(data):
                yield arrival, b"\n".join(data)
            data = []
        elif raw.startswith(b"data:", start, line_end):
            value = raw[start + 5 : line_end]
            data.append(value[1:] if value.startswith(b" ") else value)
            while piece < len(ends) - 1 and ends[piece] <= line_end:
                piece += 1
            arrival = times[piece]
        start = line_next
    if any(data):
        yield arrival, b"\n".join(data)


class _Reader:
    """Collects the events of one stream into its record."""

    def __init__(self, record: RequestTrace) -> None:
        self.record = record
        self.ids: list[int] = []
        self.counted = 0
        self.with_ids = self.without_ids = False
        self.logprobs: list[dict[str, float]] = []

    def read(self, stream: RawStream) -> str | None:
        """Fill the record; returns the server's own error message, if the stream carried one."""
        record = self.record
        error: str | None = None
        done = seen = False
        for arrival, data in events(stream.pieces, stream.times):
            seen = True
            if data.strip() == b"[DONE]":
                done = True
                break
            message = self._event(arrival, data)
            error = error or message
        if not seen and stream.pieces:
            body = b"".join(stream.pieces)
            error = _error_of(_parse(body)) or error
            self._note(f"no event stream{_excerpt(body)}")
        record.first_token_ns = record.chunk_ns[0] if record.chunk_ns else None
        if self.with_ids:
            record.token_ids = self.ids
        if self.without_ids:
            self._note("neither token ids nor a running usage: a chunk counts as one token")
        record.output_tokens = sum(record.chunk_tokens)
        if self.without_ids and not self.with_ids and record.usage_completion_tokens is not None:
            record.output_tokens = record.usage_completion_tokens
        record.logprobs = self.logprobs or None
        if error is None and stream.reason is None:
            if not done:
                self._note("no [DONE]")
            if record.usage_completion_tokens is None:
                self._note("no usage")
        return error

    def _event(self, arrival: int, data: bytes) -> str | None:
        event = _parse(data)
        if not isinstance(event, dict):
            self._note(f"unreadable event{_excerpt(data)}")
            return None
        error = _error_of(event)
        if error is not None:
            return error
        self._usage(event.get("usage"))
        if self.record.response_id is None and isinstance(event.get("id"), str):
            self.record.response_id = event["id"]
        found = event.get("choices")
        choices = [choice for choice in found if isinstance(choice, dict)] if isinstance(found, list) else []
        tokens = sum(map(self._choice, choices))
        if choices and not any(isinstance(choice.get("token_ids"), list) for choice in choices):
            tokens = self._running(event.get("usage"), tokens)
        if tokens:
            self.counted += tokens
            self.record.chunk_ns.append(arrival)
            self.record.chunk_tokens.append(tokens)
        return None

    def _running(self, usage: object, texts: int) -> int:
        """Tokens of a chunk without ids: by how much the running total in its usage grew; without one, a text is one.

        The total is exact where text isn't: a chunk may have several tokens, or none that can be seen.
        """
        total = _count(usage.get("completion_tokens")) if isinstance(usage, dict) else None
        if total is None:
            self.without_ids = self.without_ids or texts > 0
            return texts
        if texts and total <= self.counted:
            self._note("text in a chunk that adds no token to the usage")
        return max(0, total - self.counted)

    def _choice(self, choice: dict[str, Any]) -> int:
        """Tokens that a choice shows: its ids where the server sends them, else one for any text."""
        reason = choice.get("finish_reason")
        if reason not in (None, "length"):
            self._note(f"finish_reason {reason!r}"[:_EXCERPT])
        self._logprobs(choice.get("logprobs"))
        ids = choice.get("token_ids")
        if isinstance(ids, list) and all(_count(token) is not None for token in ids):
            self.with_ids = True
            self.ids += ids
            return len(ids)
        return int(_has_text(choice))

    def _usage(self, usage: object) -> None:
        """Usage is a running total where a server repeats it: the last one wins, nothing is summed."""
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            self.record.usage_prompt_tokens = _count(usage.get("prompt_tokens"))
            self.record.usage_completion_tokens = _count(usage.get("completion_tokens"))
            self.record.usage_cached_tokens = (
                _count(details.get("cached_tokens")) if isinstance(details, dict) else None
            )

    def _logprobs(self, logprobs: object) -> None:
        top = logprobs.get("top_logprobs") if isinstance(logprobs, dict) else None
        for position in top if isinstance(top, list) else ():
            numbers: dict[str, float] = {}
            for token, value in position.items() if isinstance(position, dict) else ():
                if not token.startswith(_TOKEN_ID):
                    self._note("log probabilities are not keyed by token id")
                elif isinstance(value, int | float) and math.isfinite(value):
                    numbers[token.removeprefix(_TOKEN_ID)] = float(value)
                else:
                    self._note("a log probability is no finite number")
            self.logprobs.append(numbers)

    def _note(self, anomaly: str) -> None:
        if anomaly not in self.record.anomalies and len(self.record.anomalies) < 20:
            self.record.anomalies.append(anomaly)


def _check_tokens(record: RequestTrace) -> None:
    """A stream that ended by itself is complete only with the tokens asked for; usage that disagrees is noted."""
    if record.error is None and record.output_tokens != record.asked_tokens:
        record.error = f"{record.output_tokens} of {record.asked_tokens} tokens"
    completion, prompt = record.usage_completion_tokens, record.usage_prompt_tokens
    if completion is not None and completion != record.output_tokens:
        record.anomalies.append(f"usage says {completion} completion tokens, {record.output_tokens} came")
    if prompt is not None and prompt != record.prompt_tokens:
        record.anomalies.append(f"usage says {prompt} prompt tokens, {record.prompt_tokens} were sent")


def _parse(data: bytes) -> Any:
    try:
        return from_json(data)
    except ValueError:
        pass
    try:
        return json.loads(data)  # slower, but takes half a surrogate pair for text
    except (ValueError, RecursionError):  # it nests by recursion: "[[[[…" is no ValueError
        return None


def _error_of(event: object) -> str | None:
    """The message of an error object in any of the shapes servers use; None for an event that is none."""
    if not isinstance(event, dict):
        return None
    error = event.get("error")
    if error is None and event.get("object") == "error":
        error = event
    if error is None:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    text = message if isinstance(message, str) and message else json.dumps(error)
    # A lone surrogate is legal JSON here but no legal UTF-8 in the records.
    return f"server error: {text[:_EXCERPT]}".encode("utf-8", "replace").decode()


def _has_text(choice: dict[str, Any]) -> bool:
    """Completion text, or a chat delta's content or reasoning; a role alone is no token."""
    delta = choice.get("delta")
    texts = [choice.get("text")]
    if isinstance(delta, dict):
        texts += [delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning")]
    return any(isinstance(text, str) and text for text in texts)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _excerpt(body: bytes) -> str:
    text = " ".join(body[: 4 * _EXCERPT].decode("utf-8", "replace").split())
    return f": {text[:_EXCERPT]}" if text else ""
