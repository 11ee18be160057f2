"""Streams that misbehave: each gives the right record, in bounded time."""

from __future__ import annotations

import socket
import time
from array import array
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from scripted_server import (
    DONE,
    END,
    HEAD,
    HEAD_CLOSE,
    Close,
    Exchange,
    Reset,
    ScriptedServer,
    chunked,
    data,
    event,
    usage,
    usage_event,
)

from kvladder.config.traffic import PassPlan, Request
from kvladder.load import Limits, PassResult, RequestTrace, Target, run_pass

LIMITS = Limits(connect_s=2, request_s=5, stall_s=2)


def plan(*requests: Request, concurrency: int = 1) -> PassPlan:
    return PassPlan(workload="w", name="cold", round=0, concurrency=concurrency, requests=requests)


def request(index: int = 0, tokens: int = 4, after: int | None = None, prompt: int = 3) -> Request:
    return Request(index, f"p{index}", array("I", [index, *range(1, prompt)]), tokens, after)


def send(port: int, *requests: Request, limits: Limits = LIMITS, concurrency: int = 1, **options: Any) -> PassResult:
    return run_pass(Target("127.0.0.1", port, "m"), plan(*requests, concurrency=concurrency), limits, **options)


def one(
    script: Callable[[Exchange], None], tokens: int = 4, limits: Limits = LIMITS, **options: Any
) -> tuple[RequestTrace, Exchange]:
    """Send one request to a server that answers with ``script``."""
    with ScriptedServer(script) as server:
        result = send(server.port, request(tokens=tokens), limits=limits, **options)
    assert result.in_flight[-1][1:] == (0, 0)
    return result.records[0], server.exchanges[0]


def stream(*payloads: bytes | float) -> Callable[[Exchange], None]:
    """A script that sends each payload as a chunk; a number is a pause in seconds."""

    def script(exchange: Exchange) -> None:
        exchange.send(HEAD)
        for payload in payloads:
            if isinstance(payload, bytes):
                exchange.chunks(payload)
            else:
                time.sleep(payload)
        exchange.send(END)

    return script


def ids(*tokens: int) -> bytes:
    return b"".join(event([token]) for token in tokens)


FULL = (ids(1), ids(2), ids(3), ids(4), usage_event(3, 4), DONE)


def near(measured_ns: int, written_ns: int) -> bool:
    """A stamp never precedes its write, and follows by less than a very busy machine may take."""
    return 0 <= measured_ns - written_ns <= 1e9


def test_faultless_stream() -> None:
    record, exchange = one(stream(*FULL))
    assert (record.status, record.error, record.anomalies, record.http_status) == ("ok", None, [], 200)
    assert (record.workload, record.pass_name, record.round, record.index, record.key) == ("w", "cold", 0, 0, "p0")
    assert (record.prompt_tokens, record.asked_tokens, record.output_tokens) == (3, 4, 4)
    assert (record.token_ids, record.chunk_tokens) == ([1, 2, 3, 4], [1, 1, 1, 1])
    assert (record.usage_prompt_tokens, record.usage_completion_tokens, record.usage_cached_tokens) == (3, 4, None)
    assert record.send_ns is not None and record.headers_ns is not None and record.end_ns is not None
    assert record.eligible_ns <= record.send_ns <= exchange.read_ns
    assert near(record.headers_ns, exchange.writes[0][0])
    assert record.first_token_ns == record.chunk_ns[0]
    for stamp, (written, _) in zip(record.chunk_ns, exchange.writes[1:], strict=False):
        assert near(stamp, written)
    assert exchange.json == {
        "model": "m",
        "prompt": [0, 1, 2],
        "max_tokens": 4,
        "min_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


@pytest.mark.parametrize(
    "first",
    [
        event([], text=""),
        event(None, text=""),
        data({"choices": [{"index": 0, "delta": {"role": "assistant"}}]}),
        data({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
        data({"choices": []}),
    ],
)
def test_chunk_without_token_is_no_first_token(first: bytes) -> None:
    record, exchange = one(stream(first, 0.1, *FULL))
    assert (record.status, record.anomalies, record.chunk_tokens) == ("ok", [], [1, 1, 1, 1])
    assert record.first_token_ns is not None
    assert near(record.first_token_ns, exchange.writes[2][0])


def test_text_and_chat_deltas_count_where_there_are_no_ids() -> None:
    delta = data({"choices": [{"index": 0, "delta": {"content": "b"}}]})
    reasoning = data({"choices": [{"index": 0, "delta": {"reasoning_content": "c"}}]})
    record, _ = one(stream(event(None, text="a"), delta, reasoning, event(None, text="d"), usage_event(3, 4), DONE))
    assert (record.status, record.output_tokens, record.token_ids) == ("ok", 4, None)
    assert record.chunk_tokens == [1, 1, 1, 1]
    assert record.anomalies == ["neither token ids nor a running usage: a chunk counts as one token"]


def running(*totals: int, **choice: Any) -> bytes:
    """Chunks as vLLM sends them for a request that asks for no ids, from an engine that makes no text."""
    return b"".join(event(None, usage=usage(3, total), token_ids=None, **choice) for total in totals)


def test_running_usage_counts_where_there_are_no_ids() -> None:
    """Exactly: no token, one, two at once, one; the sum at the end adds nothing."""
    record, exchange = one(stream(running(0), 0.05, running(1), running(3), running(4), usage_event(3, 4), DONE))
    assert (record.status, record.anomalies) == ("ok", [])
    assert (record.chunk_tokens, record.output_tokens, record.token_ids) == ([1, 2, 1], 4, None)
    assert record.first_token_ns is not None
    assert near(record.first_token_ns, exchange.writes[2][0])
    assert record.response_id == "cmpl-1"


def test_running_usage_wins_over_text() -> None:
    record, _ = one(stream(running(2, text="a"), running(2, text="b"), running(1), running(4), DONE))
    assert (record.status, record.chunk_tokens) == ("ok", [2, 2])
    assert record.anomalies == ["text in a chunk that adds no token to the usage"]


def test_running_usage_that_stops_too_early() -> None:
    record, _ = one(stream(running(1, 2), usage_event(3, 2), DONE))
    assert (record.status, record.error, record.chunk_tokens) == ("failed", "2 of 4 tokens", [1, 1])


def test_usage_in_the_last_chunk_alone() -> None:
    """Texts count until then; the rest is the last chunk's."""
    record, _ = one(stream(event(None, text="a"), event(None, text="b"), running(4, text="c"), DONE))
    assert (record.status, record.chunk_tokens, record.output_tokens) == ("ok", [1, 1, 2], 4)


def test_several_tokens_in_a_chunk_and_last_chunks_without_text() -> None:
    empty = event([], finish_reason="length")
    record, exchange = one(stream(event([1, 2, 3], text="abc"), 0.05, event([4]), 0.05, empty, usage_event(3, 4), DONE))
    assert (record.status, record.chunk_tokens, record.token_ids) == ("ok", [3, 1], [1, 2, 3, 4])
    assert near(record.chunk_ns[1], exchange.writes[2][0])


def test_no_token_at_all() -> None:
    record, _ = one(stream(event([], text=""), usage_event(3, 0), DONE))
    assert (record.status, record.error) == ("failed", "0 of 4 tokens")
    assert (record.first_token_ns, record.chunk_ns, record.output_tokens) == (None, [], 0)
    assert record.end_ns is not None


def test_usage_in_every_chunk_the_last_one_wins() -> None:
    totals = [usage(3, 0), usage(3, 1), usage(3, 2)]
    record, exchange = one(
        stream(
            event([], usage=totals[0]),
            0.05,
            event([1], usage=totals[1]),
            event([2], usage=totals[2]),
            usage_event(3, 2, cached=2),
            DONE,
        ),
        tokens=2,
    )
    assert (record.status, record.anomalies) == ("ok", [])
    assert (record.usage_prompt_tokens, record.usage_completion_tokens, record.usage_cached_tokens) == (3, 2, 2)
    assert record.first_token_ns is not None
    assert near(record.first_token_ns, exchange.writes[2][0])


def test_usage_that_disagrees_is_noted() -> None:
    record, _ = one(stream(*FULL[:4], usage_event(4, 5), DONE))
    assert record.status == "ok"
    assert record.anomalies == [
        "usage says 5 completion tokens, 4 came",
        "usage says 4 prompt tokens, 3 were sent",
    ]


def test_keep_alive_comments_are_no_token() -> None:
    pings = [b":\n", b": ping\n\n", b"id: 7\n", b"event: ping\ndata:\n\n", b"data: \n\n"]
    record, exchange = one(stream(*pings, 0.3, *FULL), limits=Limits(2, 5, 1))
    assert (record.status, record.anomalies) == ("ok", [])
    assert record.first_token_ns is not None and record.send_ns is not None
    assert near(record.first_token_ns, exchange.writes[6][0])
    assert record.first_token_ns - record.send_ns >= 0.3e9


def test_comment_that_a_proxy_turned_into_data() -> None:
    record, _ = one(stream(b"data: : ping\n\n", *FULL))
    assert (record.status, record.anomalies) == ("ok", ["unreadable event: : ping"])


def test_pings_only_end_at_the_request_deadline() -> None:
    def script(exchange: Exchange) -> None:
        exchange.send(HEAD)
        while True:
            exchange.chunks(b": ping\n\n")
            time.sleep(0.05)

    record, _ = one(script, limits=Limits(2, 0.5, 0.2))
    assert (record.status, record.error, record.output_tokens) == ("failed", "not finished within 0.5 s", 0)
    assert record.send_ns is not None and record.end_ns is not None
    assert 0.5e9 <= record.end_ns - record.send_ns < 1.5e9


@pytest.mark.parametrize("line_end", [b"\r\n", b"\r"])
def test_other_line_ends(line_end: bytes) -> None:
    record, _ = one(stream(*(payload.replace(b"\n", line_end) for payload in FULL)))
    assert (record.status, record.anomalies, record.token_ids) == ("ok", [], [1, 2, 3, 4])


def test_data_over_several_lines_and_without_blank() -> None:
    record, _ = one(
        stream(b'data:{"choices":\ndata:[{"token_ids":[1,2,3,4]}]}\n\n', usage_event(3, 4), b"data:[DONE]\n\n")
    )
    assert (record.status, record.anomalies, record.token_ids) == ("ok", [], [1, 2, 3, 4])


@pytest.mark.parametrize("size", [1, 3, 7])
def test_bytes_cut_anywhere(size: int) -> None:
    def script(exchange: Exchange) -> None:
        answer = HEAD + b"".join(chunked(payload.replace(b"\n", b"\r\n")) for payload in FULL) + END
        for start in range(0, len(answer), size):
            exchange.send(answer[start : start + size])

    record, _ = one(script)
    assert (record.status, record.anomalies, record.token_ids) == ("ok", [], [1, 2, 3, 4])


def test_token_arrives_with_the_end_of_its_line() -> None:
    first = ids(1)
    record, exchange = one(stream(first[:20], 0.1, first[20:-1], 0.1, *(b"\n" + ids(2), *FULL[2:])))
    assert record.status == "ok"
    assert near(record.chunk_ns[0], exchange.writes[2][0])
    assert near(record.chunk_ns[1], exchange.writes[3][0])


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "engine died", "type": "x", "code": 500}},
        {"object": "error", "message": "engine died", "code": 500},
        {"error": "engine died"},
    ],
)
def test_error_object_after_200(error: dict[str, Any]) -> None:
    record, _ = one(stream(ids(1), data(error), DONE))
    assert (record.status, record.error, record.http_status) == ("failed", "server error: engine died", 200)
    assert (record.output_tokens, record.anomalies) == (1, [])


def test_error_object_instead_of_a_stream() -> None:
    record, _ = one(stream(b'{"error":{"message":"no such model"}}'))
    assert (record.status, record.error) == ("failed", "server error: no such model")


@pytest.mark.parametrize(("status", "phrase"), [(500, b"Internal Server Error"), (429, b"Too Many Requests")])
def test_http_error(status: int, phrase: bytes) -> None:
    def script(exchange: Exchange) -> None:
        body = b'{"error":\n  "overloaded"}'
        exchange.send(b"HTTP/1.1 %d %b\r\nContent-Length: %d\r\n\r\n%b" % (status, phrase, len(body), body))

    record, _ = one(script)
    assert (record.status, record.http_status) == ("failed", status)
    assert record.error == f'HTTP {status}: {{"error": "overloaded"}}'
    assert (record.first_token_ns, record.output_tokens, record.anomalies) == (None, None, [])


def test_clean_close_too_short() -> None:
    def script(exchange: Exchange) -> None:
        exchange.send(HEAD_CLOSE)
        exchange.send(ids(*range(10)))
        raise Close

    record, _ = one(script, tokens=64)
    assert (record.status, record.error) == ("failed", "10 of 64 tokens")
    assert (record.output_tokens, record.usage_completion_tokens) == (10, None)
    assert record.anomalies == ["no [DONE]", "no usage"]


def test_too_many_tokens() -> None:
    record, _ = one(stream(*FULL), tokens=3)
    assert (record.status, record.error) == ("failed", "4 of 3 tokens")


def test_no_done_is_complete_with_a_note() -> None:
    def script(exchange: Exchange) -> None:
        exchange.send(HEAD_CLOSE)
        exchange.send(b"".join(FULL[:-1]))
        raise Close

    record, _ = one(script)
    assert (record.status, record.output_tokens, record.anomalies) == ("ok", 4, ["no [DONE]"])


def test_no_usage_is_complete_and_unknown() -> None:
    record, _ = one(stream(*FULL[:4], DONE))
    assert (record.status, record.output_tokens, record.anomalies) == ("ok", 4, ["no usage"])
    assert (record.usage_prompt_tokens, record.usage_completion_tokens) == (None, None)


def test_close_inside_a_chunked_body() -> None:
    def script(exchange: Exchange) -> None:
        exchange.send(HEAD)
        exchange.chunks(*FULL[:-1])
        raise Close

    record, _ = one(script)
    assert (record.status, record.output_tokens) == ("ok", 4)
    assert record.anomalies == ["connection closed inside the response body", "no [DONE]"]


def test_last_event_without_blank_line() -> None:
    def script(exchange: Exchange) -> None:
        exchange.send(HEAD_CLOSE)
        exchange.send(b"".join(FULL[:3]) + ids(4).rstrip())
        raise Close

    record, _ = one(script)
    assert (record.status, record.token_ids) == ("ok", [1, 2, 3, 4])


def test_stall_in_the_middle_shows_in_the_gaps() -> None:
    record, _ = one(stream(*FULL[:2], 0.5, *FULL[2:]))
    assert record.status == "ok"
    gaps = [later - earlier for earlier, later in pairwise(record.chunk_ns)]
    assert 0.3e9 < gaps[1] < 1.5e9
    assert gaps[1] == max(gaps)


@pytest.mark.parametrize("before", [(), FULL[:2]])
def test_stall_past_its_limit(before: tuple[bytes, ...]) -> None:
    def script(exchange: Exchange) -> None:
        exchange.send(HEAD)
        exchange.chunks(*before)
        time.sleep(1.2)

    record, _ = one(script, limits=Limits(2, 5, 0.6))
    assert (record.status, record.error, record.output_tokens) == ("failed", "no byte for 0.6 s", len(before))
    assert record.end_ns is not None and record.send_ns is not None
    assert 0.6e9 <= record.end_ns - record.send_ns < 2e9


def test_endless_stream_ends_at_the_deadline_and_keeps_what_it_has() -> None:
    def script(exchange: Exchange) -> None:
        exchange.send(HEAD)
        while True:
            exchange.chunks(ids(9))
            time.sleep(0.02)

    record, exchange = one(script, limits=Limits(2, 0.5, 0.3))
    assert (record.status, record.error) == ("failed", "not finished within 0.5 s")
    assert record.output_tokens is not None and 4 < record.output_tokens <= len(exchange.writes)
    assert len(record.chunk_ns) == record.output_tokens == len(record.token_ids or [])


def test_flood_is_cut_off() -> None:
    def script(exchange: Exchange) -> None:
        exchange.send(HEAD)
        while True:
            exchange.chunks(b":" + b"x" * 100_000 + b"\n")

    record, _ = one(script)
    assert record.status == "failed"
    assert record.error == f"more than {(1 << 20) + 16 * 3 + (4 << 10) * 4} bytes"


def test_response_left_open_after_done() -> None:
    def script(exchange: Exchange) -> None:
        exchange.send(HEAD)
        exchange.chunks(*FULL)
        time.sleep(0.6)

    record, exchange = one(script)
    assert (record.status, record.anomalies) == ("ok", ["response left open after [DONE]"])
    assert record.end_ns is not None
    assert near(record.end_ns, exchange.writes[6][0])


@pytest.mark.parametrize("cut", range(1, len(DONE)))
def test_done_in_two_pieces(cut: int) -> None:
    """Behind a long piece and before another one, as soon as it is whole."""

    def script(exchange: Exchange) -> None:
        exchange.send(HEAD)
        exchange.chunks(b":" + b"x" * 1000 + b"\n", *FULL[:-1], DONE[:cut])
        exchange.chunks(DONE[cut:] + b":" + b"x" * 1000)
        time.sleep(0.3)

    record, exchange = one(script)
    assert (record.status, record.anomalies) == ("ok", ["response left open after [DONE]"])
    assert record.end_ns is not None
    assert near(record.end_ns, exchange.writes[7][0])


def test_done_as_a_tokens_text_ends_nothing() -> None:
    record, _ = one(stream(event([1], text="data: [DONE]\n"), 0.25, ids(2), ids(3), ids(4), usage_event(3, 4), DONE))
    assert (record.status, record.anomalies, record.output_tokens) == ("ok", [], 4)


@pytest.mark.parametrize("pause", [0, 0.1])
def test_connection_reset(pause: float) -> None:
    """Also together with the data before it."""

    def script(exchange: Exchange) -> None:
        exchange.send(HEAD + chunked(ids(1)))
        time.sleep(pause)
        raise Reset

    record, _ = one(script)
    assert record.status == "failed"
    assert record.error is not None and "reset" in record.error.lower()
    assert (record.output_tokens, record.http_status) == (1, 200)
    assert record.end_ns is not None and record.send_ns is not None
    assert record.end_ns - record.send_ns < LIMITS.stall_s * 0.5e9


def test_closed_before_a_response() -> None:
    def script(exchange: Exchange) -> None:
        raise Close

    record, _ = one(script)
    assert (record.status, record.error) == ("failed", "connection closed before a response")
    assert (record.http_status, record.headers_ns, record.output_tokens) == (None, None, None)


def test_connection_refused() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        result = send(bound.getsockname()[1], request(0), request(1, after=0), request(2), concurrency=2)
    for record in result.records:
        assert record.status == "failed"
        assert record.error is not None and "cannot connect" in record.error and "refused" in record.error.lower()
        assert (record.send_ns, record.end_ns, record.first_token_ns) == (None, None, None)
    assert result.records[1].anomalies == ["request 0, which came before it, failed"]


def test_connection_that_nobody_answers() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        result = send(port, request(), limits=Limits(0.3, 5, 5))
        for filler in fillers:
            filler.close()
    assert result.records[0].error == "cannot connect: no connection within 0.3 s"


def test_host_that_does_not_resolve() -> None:
    result = run_pass(Target("no-such-host.invalid", 80, "m"), plan(request()), Limits(1, 1, 1))
    assert result.records[0].error == "cannot resolve host no-such-host.invalid"


def test_garbage_is_no_http() -> None:
    def script(exchange: Exchange) -> None:
        exchange.send(b"SSH-2.0-OpenSSH_9.6\r\n")
        time.sleep(0.2)

    record, _ = one(script)
    assert record.status == "failed"
    assert record.error is not None and record.error.startswith("not HTTP: ")


def test_interim_response_is_skipped() -> None:
    def script(exchange: Exchange) -> None:
        exchange.send(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        exchange.answer()

    record, _ = one(script)
    assert (record.status, record.http_status, record.output_tokens) == ("ok", 200, 4)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"data: " + b"[" * 100_000 + b"\n\n",
        b"data: 5\n\n",
        b"data: \xff\xfe{\n\n",
        data({"choices": [], "half": "\ud83d"}),
        data({"choices": 5}),
        data({"choices": [5, {"token_ids": ["x"], "text": 3, "delta": 4}], "usage": [1]}),
        data({"choices": [], "usage": {"prompt_tokens": "many", "completion_tokens": True}}),
        data({"choices": [{"logprobs": {"top_logprobs": [None, {"a": "b"}]}}]}),
    ],
)
def test_nonsense_never_raises(nonsense: bytes) -> None:
    record, _ = one(stream(nonsense, *FULL))
    assert (record.status, record.output_tokens) == ("ok", 4)
    assert record.usage_completion_tokens == 4


def test_logprobs_by_token_id() -> None:
    def position(**values: float) -> dict[str, Any]:
        return {"top_logprobs": [{f"token_id:{token[1:]}": value for token, value in values.items()}]}

    record, exchange = one(
        stream(
            event([1], logprobs=position(t1=-0.1, t22=-2.5)),
            event([2], logprobs=position(t2=-0.2, t1=float("-inf"))),
            usage_event(3, 2),
            DONE,
        ),
        tokens=2,
        top_logprobs=2,
    )
    assert record.logprobs == [{"1": -0.1, "22": -2.5}, {"2": -0.2}]
    assert record.anomalies == ["a log probability is no finite number"]
    assert exchange.json["logprobs"] == 2
    assert exchange.json["return_tokens_as_token_ids"] is True


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_proxy_variables_have_no_effect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with ScriptedServer(stream(b"")) as proxy:
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        record, _ = one(stream(*FULL))
    assert record.status == "ok"
    assert proxy.connections == 0
