"""Request bytes, made before the clock starts."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence

from kvladder.config.traffic import Request
from kvladder.load.target import Target


def request_bytes(target: Target, requests: Sequence[Request], top_logprobs: int | None = None) -> list[bytes]:
    """The HTTP request (head and JSON body) of every request, in order.

    Requests with the same prompt object and output length share one bytes object. Tokens are counted by a usage that
    runs along: asked for the ids of its tokens, vLLM also sends the whole prompt back, in the chunk whose arrival is
    the TTFT. With ``top_logprobs`` the server is asked for that many log probabilities a position, keyed by token id,
    and for the ids all the same.
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
    made: dict[tuple[int, int], bytes] = {}
    wire: list[bytes] = []
    for request in requests:
        shape = (id(request.prompt), request.output_tokens)
        if shape not in made:
            body = _body(target.model, request.prompt, request.output_tokens, top_logprobs)
            made[shape] = b"%b%d\r\n\r\n%b" % (head, len(body), body)
        wire.append(made[shape])
    return wire


def _body(model: str, prompt: array[int], output_tokens: int, top_logprobs: int | None) -> bytes:
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
    rest = json.dumps(fields, separators=(",", ":"))
    ids = str(prompt.tolist()).replace(" ", "")
    return f'{{"model":{json.dumps(model)},"prompt":{ids},{rest[1:]}'.encode()
