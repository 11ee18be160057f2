"""A stand-in for a vLLM server, FOR TESTS ONLY: it computes nothing, and its times are sleeps.

It understands vLLM's command line as far as kvladder's setups use it, answers the same endpoints with the same metric
names as vLLM 0.32, and simulates a device prefix cache and a host tier as LRUs over blocks of token ids. It says what
it is in ``/version``, in the ``Server`` header and in its log. No number of it may ever stand beside a real engine's.

Environment: ``KVLADDER_STUB_US_PER_TOKEN`` (microseconds a computed prompt token takes, 20),
``KVLADDER_STUB_START_S`` (seconds until it listens, 0), ``KVLADDER_STUB_FAULT`` (see `FAULTS`; several with commas;
``name:n`` where a request number is meant).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvladder.config.experiment import kv_bytes_per_token

VERSION = "0.32.0+stub"
NAME = "kvladder-stub-engine (not vLLM, tests only)"
DEFAULT_BLOCK = 128
HIT_SPEED_UP = 20
DECODE_S = 0.0005
STORE_BYTES_PER_S = 20e9

FAULTS = {
    "crash-at-start": "ends with a traceback before it listens",
    "crash-mid-pass": "ends in the middle of request n (5)",
    "tier-ignored": "takes the connector's configuration and stores nothing",
    "warm-in-cold": "claims hits for prompts it has never seen",
    "http-500": "answers 500 from request n (3) on",
    "short-output": "closes after half of the output tokens, from request n (3) on",
    "stall": "sends headers and then nothing, from request n (3) on",
    "hang-at-stop": "ignores SIGTERM and SIGINT",
}


class Faults:
    """Which faults are asked for, and at which request they begin."""

    def __init__(self, text: str) -> None:
        self._from: dict[str, int | None] = {}
        for entry in filter(None, text.split(",")):
            name, _, number = entry.partition(":")
            if name not in FAULTS:
                sys.exit(f"unknown fault {name!r}; faults are: {', '.join(FAULTS)}")
            self._from[name] = int(number) if number else None

    def __contains__(self, name: str) -> bool:
        return name in self._from

    def begins(self, name: str, default: int) -> int | None:
        """Number of the first request it applies to, from 1; None where it isn't asked for."""
        return (self._from[name] or default) if name in self._from else None

    def hits(self, name: str, request: int, default: int = 3) -> bool:
        """Whether it applies to this request."""
        first = self.begins(name, default)
        return first is not None and request >= first


class Lru:
    """Block hashes up to a capacity, the least recently used leaves first."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self._held = blocks, OrderedDict[bytes, None]()

    def prefix(self, keys: list[bytes]) -> int:
        """How many of the first blocks are held."""
        count = 0
        for key in keys:
            if key not in self._held:
                break
            self._held.move_to_end(key)
            count += 1
        return count

    def add(self, keys: list[bytes]) -> int:
        """Hold these blocks; returns how many are new."""
        new = 0
        for key in keys:
            new += key not in self._held
            self._held[key] = None
            self._held.move_to_end(key)
            while len(self._held) > self.blocks:
                self._held.popitem(last=False)
        return new

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()


def block_keys(prompt: array[int], size: int) -> list[bytes]:
    """A chained hash for every whole block, so that equal blocks at other places are others."""
    keys, parent = [], b""
    for start in range(0, len(prompt) - size + 1, size):
        parent = hashlib.blake2b(parent + prompt[start : start + size].tobytes(), digest_size=16).digest()
        keys.append(parent)
    return keys


class Engine:
    """State and arithmetic of the stand-in: caches, counters, the time things take."""

    def __init__(self, options: argparse.Namespace, faults: Faults) -> None:
        self.options, self.faults = options, faults
        shape = json.loads((Path(options.model) / "config.json").read_text(encoding="utf-8"))
        self.vocab = int(shape.get("vocab_size", 32000))
        self.per_token = kv_bytes_per_token(shape, options.dtype) or 1
        self.block = options.block_size or DEFAULT_BLOCK
        pool = options.num_gpu_blocks_override or (options.kv_cache_memory_bytes or 0) // (self.per_token * self.block)
        self.device = Lru(max(pool, 1))
        self.transfer = json.loads(options.kv_transfer_config) if options.kv_transfer_config else None
        extra = (self.transfer or {}).get("kv_connector_extra_config", {})
        self.host = Lru(int(extra.get("cpu_bytes_to_use", 0)) // (self.per_token * self.block))
        self.has_tier = self.transfer is not None and "tier-ignored" not in faults
        self.us_per_token = float(os.environ.get("KVLADDER_STUB_US_PER_TOKEN", "20"))
        self.compute = asyncio.Lock()
        self.requests = 0
        self.running = 0
        self.count: dict[str, float] = dict.fromkeys(
            ("computed", "device", "host", "output", "stored", "loaded", "store_s", "load_s", "finished", "queries"),
            0.0,
        )

    async def prefill(self, prompt: array[int]) -> int:
        """Take the time a prompt takes and move the counters. Returns how many tokens were hits."""
        keys = block_keys(prompt, self.block)
        usable = keys[: (len(prompt) - 1) // self.block]
        async with self.compute:
            device = self.device.prefix(usable) if self.options.enable_prefix_caching else 0
            host = max(self.host.prefix(usable) - device, 0) if self.has_tier else 0
            if "warm-in-cold" in self.faults:
                device, host = (0, len(usable)) if self.transfer else (len(usable), 0)
            device_tokens, host_tokens = device * self.block, host * self.block
            computed = len(prompt) - device_tokens - host_tokens
            await asyncio.sleep((computed + (device_tokens + host_tokens) / HIT_SPEED_UP) * self.us_per_token / 1e6)
        for name, tokens in (("computed", computed), ("device", device_tokens), ("host", host_tokens)):
            self.count[name] += tokens
        self.count["queries"] += len(prompt)
        self.device.add(keys)
        if self.has_tier:
            self._moved("loaded", "load_s", host_tokens)
            self._moved("stored", "store_s", self.host.add(keys) * self.block)
        return device_tokens + host_tokens

    def _moved(self, size: str, seconds: str, tokens: int) -> None:
        self.count[size] += tokens * self.per_token
        self.count[seconds] += tokens * self.per_token / STORE_BYTES_PER_S

    def token(self, prompt: array[int], place: int) -> int:
        """An output token that depends on the prompt alone, so that a hit gives what computing gives."""
        digest = hashlib.blake2b(prompt.tobytes() + place.to_bytes(4, "little"), digest_size=4).digest()
        return int.from_bytes(digest, "little") % self.vocab

    def metrics(self) -> str:
        """The /metrics page, with vLLM 0.32's names."""
        count, model = self.count, self.options.served_model_name
        lines: list[str] = []

        def family(name: str, kind: str, *series: tuple[dict[str, str], float], suffix: str = "") -> None:
            lines.append(f"# HELP {name} Stand-in.")
            lines.append(f"# TYPE {name} {kind}")
            for labels, value in series:
                text = ",".join(f'{key}="{item}"' for key, item in labels.items())
                lines.append(f"{name}{suffix}{{{text}}} {value}" if text else f"{name}{suffix} {value}")

        def counter(name: str, *series: tuple[dict[str, str], float]) -> None:
            family(name, "counter", *((base | labels, value) for labels, value in series), suffix="_total")
            family(f"{name}_created", "gauge", (base, STARTED))

        base = {"engine": "0", "model_name": model}
        hits = count["device"] + count["host"]
        family("process_start_time_seconds", "gauge", ({}, STARTED))
        family("vllm:num_requests_running", "gauge", (base, self.running))
        family("vllm:num_requests_waiting", "gauge", (base, 0))
        counter("vllm:prefix_cache_queries", ({}, count["queries"] if self.options.enable_prefix_caching else 0))
        counter("vllm:prefix_cache_hits", ({}, count["device"]))
        counter("vllm:external_prefix_cache_queries", ({}, count["queries"] if self.transfer else 0))
        counter("vllm:external_prefix_cache_hits", ({}, count["host"]))
        counter("vllm:num_preemptions", ({}, 0))
        counter("vllm:prompt_tokens", ({}, count["computed"] + hits))
        counter(
            "vllm:prompt_tokens_by_source",
            ({"source": "local_compute"}, count["computed"]),
            ({"source": "local_cache_hit"}, count["device"]),
            ({"source": "external_kv_transfer"}, count["host"]),
        )
        counter("vllm:prompt_tokens_cached", ({}, hits))
        counter(
            "vllm:prompt_tokens_cached_by_source",
            ({"source": "device"}, count["device"]),
            ({"source": "host"}, count["host"]),
            ({"source": "p2p"}, 0),
            ({"source": "disk"}, 0),
            ({"source": "external_unspecified"}, 0),
        )
        counter("vllm:generation_tokens", ({}, count["output"]))
        counter("vllm:request_success", ({"finished_reason": "length"}, count["finished"]))
        if self.transfer is not None:
            # In vLLM these two families are there from the start, the finer ones from their first event on.
            counter(
                "vllm:kv_offload_total_bytes",
                ({"transfer_type": "CPU_to_GPU"}, count["loaded"]),
                ({"transfer_type": "GPU_to_CPU"}, count["stored"]),
            )
            counter(
                "vllm:kv_offload_total_time",
                ({"transfer_type": "CPU_to_GPU"}, count["load_s"]),
                ({"transfer_type": "GPU_to_CPU"}, count["store_s"]),
            )
            for way, size, seconds in (("load", "loaded", "load_s"), ("store", "stored", "store_s")):
                if count[size]:
                    counter(f"vllm:kv_offload_{way}_bytes", ({}, count[size]))
                    counter(f"vllm:kv_offload_{way}_time", ({}, count[seconds]))
        return "\n".join(lines) + "\n"

    def server_info(self) -> dict[str, Any]:
        """The development endpoint's JSON, as far as kvladder reads it."""
        options = self.options
        return {
            "vllm_config": {
                "model_config": {"max_model_len": options.max_model_len, "dtype": options.dtype},
                "cache_config": {
                    "block_size": self.block,
                    "num_gpu_blocks": self.device.blocks,
                    "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
                    "enable_prefix_caching": options.enable_prefix_caching,
                },
                "scheduler_config": {
                    "max_num_seqs": options.max_num_seqs,
                    "max_num_batched_tokens": options.max_num_batched_tokens,
                },
                "load_config": {"load_format": options.load_format},
                "kv_transfer_config": self.transfer,
            },
            "vllm_env": {},
            "system_env": {"stand-in": NAME},
        }


STARTED = time.time()


class Http:
    """Just enough of HTTP/1.1: keep-alive requests with a length, chunked streams back."""

    def __init__(self, engine: Engine, key: str | None) -> None:
        self.engine, self.key = engine, key

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ", 2)
        fields = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
        headers = {key: value.strip() for key, value in fields.items()}
        authorization = next(
            (line.split(": ", 1)[1] for line in head[1:] if line.lower().startswith("authorization:")), ""
        )
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = target.partition("?")[0]
        if path.startswith("/v1/") and self.key is not None and authorization != f"Bearer {self.key}":
            self._answer(writer, 401, {"error": "Unauthorized"})
        elif (method, path) == ("POST", "/v1/completions"):
            return await self._complete(writer, json.loads(body))
        elif path in ("/health", "/ping"):
            self._answer(writer, 200, None)
        elif path == "/version":
            self._answer(writer, 200, {"version": VERSION, "engine": NAME})
        elif path == "/v1/models":
            self._answer(writer, 200, {"object": "list", "data": [{"id": self.engine.options.served_model_name}]})
        elif path == "/metrics":
            self._answer(writer, 200, self.engine.metrics())
        elif path == "/server_info":
            self._answer(writer, 200, self.engine.server_info())
        elif (method, path) == ("POST", "/reset_prefix_cache"):
            self.engine.device.clear()
            if "reset_external=true" in target:
                self.engine.host.clear()
            self._answer(writer, 200, {"success": True})
        else:
            self._answer(writer, 404, {"error": {"message": f"{method} {path}: not in the stand-in"}})
        await writer.drain()
        return True

    def _answer(self, writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        data = b"" if body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
        kind = "text/plain" if isinstance(body, str) else "application/json"
        head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\nserver: {NAME}\r\n"
        writer.write(f"{head}content-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> bool:
        """One streamed completion. Returns whether the connection stays usable."""
        engine, faults = self.engine, self.engine.faults
        engine.requests += 1
        number = engine.requests
        if faults.hits("http-500", number):
            self._answer(writer, 500, {"error": {"message": "stand-in: asked to fail"}})
            await writer.drain()
            return True
        prompt = array("q", body["prompt"])
        if len(prompt) + int(body["max_tokens"]) > engine.options.max_model_len:
            self._answer(writer, 400, {"error": {"message": "maximum context length exceeded"}})
            await writer.drain()
            return True
        kind = "content-type: text/event-stream\r\ntransfer-encoding: chunked"
        writer.write(f"HTTP/1.1 200 OK\r\nserver: {NAME}\r\n{kind}\r\n\r\n".encode())
        await writer.drain()
        if faults.hits("stall", number):
            await asyncio.sleep(3600)
        engine.running += 1
        try:
            async for event in self._events(prompt, body, number):
                data = f"data: {event}\n\n".encode()
                writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                await writer.drain()
        finally:
            engine.running -= 1
        if faults.hits("short-output", number):
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _events(self, prompt: array[int], body: dict[str, Any], number: int) -> AsyncIterator[str]:
        engine = self.engine
        hits = await engine.prefill(prompt)
        asked = int(body["max_tokens"])
        short = engine.faults.hits("short-output", number)
        base = {"id": f"cmpl-{number}", "object": "text_completion", "model": body["model"]}
        for place in range(asked // 2 if short else asked):
            if place:
                await asyncio.sleep(DECODE_S)
            if number == engine.faults.begins("crash-mid-pass", 5):
                print("RuntimeError: stand-in: asked to crash in the middle of a pass", flush=True)
                os._exit(1)
            engine.count["output"] += 1
            token = engine.token(prompt, place)
            yield json.dumps({**base, "choices": [self._choice(token, place, asked, body.get("logprobs"))]})
        if short:
            return
        engine.count["finished"] += 1
        usage = {"prompt_tokens": len(prompt), "completion_tokens": asked, "total_tokens": len(prompt) + asked}
        usage["prompt_tokens_details"] = {"cached_tokens": hits}  # type: ignore[assignment]
        yield json.dumps({**base, "choices": [], "usage": usage})
        yield "[DONE]"

    @staticmethod
    def _choice(token: int, place: int, asked: int, top: int | None) -> dict[str, Any]:
        logprobs = None
        if top:
            ranked = {f"token_id:{token + rank}": -0.1 - rank for rank in range(top)}
            logprobs = {"tokens": [f"token_id:{token}"], "token_logprobs": [-0.1], "top_logprobs": [ranked]}
        reason = "length" if place == asked - 1 else None
        return {"index": 0, "text": "", "token_ids": [token], "logprobs": logprobs, "finish_reason": reason}


def parse(arguments: list[str]) -> argparse.Namespace:
    """vLLM's options as far as they matter here; others are taken and ignored."""
    parser = argparse.ArgumentParser(prog=NAME, allow_abbrev=False)
    for name in ("model", "kv-transfer-config", "api-key"):
        parser.add_argument(f"--{name}")
    for name, default in (
        ("host", "127.0.0.1"),
        ("served-model-name", "stub"),
        ("dtype", "bfloat16"),
        ("load-format", "auto"),
    ):
        parser.add_argument(f"--{name}", default=default)
    for name in ("kv-cache-memory-bytes", "num-gpu-blocks-override", "block-size", "max-num-batched-tokens"):
        parser.add_argument(f"--{name}", type=int)
    for name, default in (("port", 8000), ("max-model-len", 4096), ("max-num-seqs", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_known_args(arguments)[0]


async def run(options: argparse.Namespace, faults: Faults) -> None:
    """Serve until a signal comes."""
    engine = Engine(options, faults)
    print(f"INFO {NAME}: this is a stand-in for tests, not vLLM", flush=True)
    print(f"INFO Initializing a V1 LLM engine (v{VERSION}) with config: model='{options.model}'", flush=True)
    print(f"INFO GPU KV cache size: {engine.device.blocks * engine.block:,} tokens", flush=True)
    await asyncio.sleep(float(os.environ.get("KVLADDER_STUB_START_S", "0")))
    key = options.api_key or os.environ.get("VLLM_API_KEY")
    server = await asyncio.start_server(Http(engine, key).serve, options.host, options.port, limit=2**24)
    print("INFO Application startup complete.", flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, (lambda: None) if "hang-at-stop" in faults else stop.set)
    await stop.wait()
    server.close()


def main() -> None:
    """Entry point of the script."""
    faults = Faults(os.environ.get("KVLADDER_STUB_FAULT", ""))
    options = parse(sys.argv[1:])
    if "crash-at-start" in faults:
        print(f"INFO {NAME}", flush=True)
        raise ValueError("stand-in: asked to crash at start")
    asyncio.run(run(options, faults))


if __name__ == "__main__":
    main()
