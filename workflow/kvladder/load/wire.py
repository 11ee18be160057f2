"""Request bytes, made before the clock starts."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvladder.config.traffic import Prefix, Request
from kvladder.load.target import Target


@dataclass(frozen=True, slots=True)
class Wire:
    """An HTTP request of ``size`` bytes, in the pieces that it is written from: none is copied on the clock."""

    pieces: tuple[bytes | memoryview, ...]
    size: int


def request_bytes(target: Target, requests: Sequence[Request], top_logprobs: int | None = None) -> list[Wire]:
    """The HTTP request (head and JSON body) of every request, in order.

    Requests with the same prompt object and output length share one, and the turns of a conversation (`Prefix`) share
    the digits of its ids. Tokens are counted by a usage that runs along: asked for the ids of its tokens, vLLM also
    sends the whole prompt back, in the chunk whose arrival is the TTFT. With ``top_logprobs`` the server is asked for
    that many log probabilities a position, keyed by token id, and for the ids all the same.
    """
    host = f"[{target.host}]" if ":" in target.host else target.host
    key = "" if target.api_key is None else f"Authorization: Bearer {target.api_key}\r\n"
    head = (
        f"POST {target.path} HTTP/1.1\r\n"
        f"Host: {host}:{target.port}\r\n"
        f"{key}"
        "Content-Type: application/json\r\n"
        "Accept: text/event-stream\r\n"
        "Content-Length: "
    ).encode("ascii")
    before = f'{{"model":{json.dumps(target.model)},"prompt":['.encode()
    shared = _shared_digits(requests)
    made: dict[tuple[int, int], Wire] = {}
    wires: list[Wire] = []
    for request in requests:
        prompt, shape = request.prompt, (id(request.prompt), request.output_tokens)
        if shape not in made:
            after = _options(request.output_tokens, top_logprobs)
            digits = shared[id(prompt.text)][prompt.tokens] if isinstance(prompt, Prefix) else _digits(prompt)
            start = b"%b%d\r\n\r\n%b" % (head, len(before) + len(digits) + len(after), before)
            pieces = (start, digits, after)
            # What nobody shares is one piece: the fewer, the quicker the kernel takes them.
            whole = pieces if isinstance(prompt, Prefix) else (b"".join(pieces),)
            made[shape] = Wire(whole, sum(map(len, pieces)))
        wires.append(made[shape])
    return wires


def _shared_digits(requests: Sequence[Request]) -> dict[int, dict[int, memoryview]]:
    """The ids of each text that prompts begin with, as JSON: by the text's ``id()``, then by number of tokens.

    All lengths of a text are views of one bytes object.
    """
    texts: dict[int, tuple[array[int], set[int]]] = {}
    for request in requests:
        if isinstance(request.prompt, Prefix):
            texts.setdefault(id(request.prompt.text), (request.prompt.text, set()))[1].add(request.prompt.tokens)
    return {identity: _prefixes(text, sorted(lengths)) for identity, (text, lengths) in texts.items()}


def _prefixes(text: array[int], lengths: Sequence[int]) -> dict[int, memoryview]:
    parts = [_digits(text[start:end]) for start, end in pairwise((0, *lengths))]
    whole = memoryview(b",".join(parts))
    views, end = {}, -1
    for length, part in zip(lengths, parts, strict=True):
        end += 1 + len(part)
        views[length] = whole[:end]
    return views


def _digits(ids: array[int]) -> bytes:
    return str(ids.tolist())[1:-1].replace(" ", "").encode("ascii")


def _options(output_tokens: int, top_logprobs: int | None) -> bytes:
    """What follows the prompt's ids: how to answer."""
    fields: dict[str, object] = {
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if top_logprobs is not None:
        fields |= {"logprobs": top_logprobs, "return_tokens_as_token_ids": True, "return_token_ids": True}
    return f"],{json.dumps(fields, separators=(',', ':'))[1:]}".encode()
