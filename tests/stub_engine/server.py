"""A stand-in for a vLLM server, FOR TESTS ONLY: it computes nothing, and its times are sleeps.

It understands vLLM's command line as far as kvladder's setups use it, answers the same endpoints, and shows the
recorded /metrics pages of the version it plays (``pages.py``). It simulates the device prefix cache and the tiers below
it as LRUs over blocks of token ids (``tiers.py``); the pools of LMCache and Mooncake are side processes (``pool.py``).
It says what it is in ``/version``, in the ``Server`` header and in its log. No number of it may ever stand beside a
real engine's.

Environment: ``KVLADDER_STUB_VERSION`` (0.26.0 or 0.32.0, the default), ``KVLADDER_STUB_US_PER_TOKEN`` (microseconds a
computed prompt token takes, 20), ``KVLADDER_STUB_START_S`` (seconds until it listens, 0), ``KVLADDER_STUB_FAULT`` (see
``faults.py``), ``KVLADDER_STUB_TIER`` (a folder, see there).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from faults import Faults, map_as_compiled
from http_server import NAME, Answer, Hangup, Request, serve
from pages import engine_page, render
from tiers import Files, HostTier, Lru, PoolTier, Tier, block_keys

from kvladder.config.experiment import kv_bytes_per_token
from kvladder.stack.variants import WATCHED

VERSION = os.environ.get("KVLADDER_STUB_VERSION", "0.32.0")
STARTED = time.time()
DEFAULT_BLOCK = 128
HIT_SPEED_UP = 20
DECODE_S = 0.0005
BYTES_PER_S = 20e9
HIT_NOISE = 0.04
"""Largest difference of a log probability between computing a prompt and hitting it: less than any rank's distance."""
FROZEN_S = 0.35


class Engine:
    """State and arithmetic of the stand-in: caches, counters, the time things take."""

    def __init__(self, options: argparse.Namespace, faults: Faults) -> None:
        self.options, self.faults = options, faults
        shape = _read_json(f"{options.model}/config.json")
        self.vocab = int(shape.get("vocab_size", 32000))
        self.per_token = kv_bytes_per_token(shape, options.dtype) or 1
        self.block = options.block_size or DEFAULT_BLOCK
        pool = options.num_gpu_blocks_override or (options.kv_cache_memory_bytes or 0) // (self.per_token * self.block)
        self.device = Lru(max(pool // (2 if "pool-differs" in faults else 1), 1))
        self.caching = options.enable_prefix_caching or "prefix-caching-ignored" in faults
        self.transfer: dict[str, Any] | None = (
            json.loads(options.kv_transfer_config) if options.kv_transfer_config else None
        )
        if "key-ignored" in faults and self.transfer is not None:
            self.transfer["kv_connector_extra_config"]["cpu_bytes_to_use"] = 2**30
        self.page = engine_page(self.transfer, prefix_caching=self.caching)
        self.tier: Tier | None = None
        self.us_per_token = float(os.environ.get("KVLADDER_STUB_US_PER_TOKEN", "20"))
        self.compute = asyncio.Lock()
        self.requests = 0
        self.running = 0
        self.hit_before: set[str] = set()
        self.count: dict[str, float] = {}

    async def open_tier(self) -> None:
        """Make the tier that the connector's configuration asks for; none where there is no connector."""
        if self.transfer is None or "tier-ignored" in self.faults:
            return
        extra = self.transfer.get("kv_connector_extra_config", {})
        connector = self.transfer["kv_connector"]
        if connector == "LMCacheMPConnector":
            self.tier = pool = PoolTier("cpu", extra["lmcache.mp.port"], 0, self.per_token)
            await pool.connect(self.block)
        elif connector == "MooncakeStoreConnector":
            config = _read_json(os.environ["MOONCAKE_CONFIG_PATH"])
            port = int(config["master_server_address"].rpartition(":")[2])
            size = self.per_token * self.block
            self.tier = pool = PoolTier("remote", port, config["global_segment_size"] // size, size)
            await pool.connect(self.block)
        else:
            unit = extra.get("block_size", self.block)
            files = next((self._files(tier, unit) for tier in extra.get("secondary_tiers", [])), None)
            blocks = extra["cpu_bytes_to_use"] // (self.per_token * unit)
            self.tier = HostTier(unit, blocks, files)
            self.add(capacity_blocks=blocks)

    def _files(self, tier: dict[str, Any], unit: int) -> Files:
        folder = os.environ["KVLADDER_STUB_TIER"] if "tier-not-cleared" in self.faults else tier["root_dir"]
        return Files(Path(folder), unit * self.per_token, lambda block: self.faults.hits("disk-full", block, 1))

    async def prefill(self, prompt: array[int]) -> int:
        """Take the time a prompt takes and move the counters. Returns how many tokens were hits."""
        keys = block_keys(prompt, self.block)
        # At least one token is always computed.
        usable = keys[: (len(prompt) - 1) // self.block]
        async with self.compute:
            found = {"gpu": self.device.prefix(usable) * self.block if self.caching else 0}
            if self.tier is not None:
                found |= await self._below(self.tier, prompt, found["gpu"])
            if "warm-in-cold" in self.faults:
                found = {"gpu": 0, "cpu": 0} | {"cpu" if self.transfer else "gpu": len(usable) * self.block}
            hits = sum(found.values())
            self.add(**found, computed=len(prompt) - hits)
            self.add(device_queries=len(prompt) if self.caching else 0)
            self.add(external_queries=len(prompt) if self.transfer else 0)
            await asyncio.sleep((len(prompt) - hits + hits / HIT_SPEED_UP) * self.us_per_token / 1e6)
            self.device.add(keys)
            if self.tier is not None:
                stored = await self.tier.store(block_keys(prompt, self.tier.unit, self._seed()))
                self._moved("stored", self._place(), stored * self.tier.unit)
        return hits

    async def _below(self, tier: Tier, prompt: array[int], device: int) -> dict[str, int]:
        """Tokens by source that are found in the tier beyond those found on the device."""
        keys = block_keys(prompt, tier.unit, os.environ.get("PYTHONHASHSEED", ""))
        blocks = await tier.lookup(keys[: (len(prompt) - 1) // tier.unit])
        found, skip = {}, device
        for source, count in blocks.items():
            found[source] = max(count * tier.unit - skip, 0)
            skip = max(skip - count * tier.unit, 0)
        if found.get("nvme"):
            self._moved("loaded", "nvme", found["nvme"])
        self._moved("loaded", self._place(), sum(found.values()))
        return found

    def _seed(self) -> str:
        """With which seed stored blocks are hashed: the side process's own where there is one."""
        own = os.environ.get("PYTHONHASHSEED", "")
        return self.tier.seed if isinstance(self.tier, PoolTier) else own

    def _place(self) -> str:
        return "remote" if self.page == "mooncake-store" else "cpu"

    def add(self, **gains: float) -> None:
        """Add to counters by the names of `pages.KEYS`."""
        for key, value in gains.items():
            self.count[key] = self.count.get(key, 0.0) + value

    def _moved(self, way: str, place: str, tokens: int) -> None:
        size = tokens * self.per_token
        verb = {"stored": "store", "loaded": "load"}[way]
        self.add(**{f"{way}_{place}": size, f"{verb}_{place}_s": size / BYTES_PER_S})
        if way == "stored" and place == "cpu" and self.page == "native-files":
            self._moved(way, "nvme", tokens)
        if way == "loaded":
            self.add(loaded_blocks=tokens // self.block)

    def count_request(self) -> int:
        """Number a request, and do what faults do at its begin."""
        self.requests += 1
        if self.faults.hits("preemptions", self.requests):
            self.add(preemptions=1)
        if self.faults.at("counters-reset", self.requests, 5):
            self.count.clear()
        if self.faults.at("client-frozen", self.requests, 5):
            _freeze_client()
        return self.requests

    def token(self, prompt: array[int], place: int) -> int:
        """An output token that depends on the prompt alone, so that a hit gives what computing gives."""
        digest = hashlib.blake2b(prompt.tobytes() + place.to_bytes(4, "little"), digest_size=4).digest()
        return int.from_bytes(digest, "little") % self.vocab

    def logprobs(self, prompt: array[int], place: int, top: int, *, hit: bool) -> dict[str, float]:
        """The ``top`` log probabilities of a position by ``token_id:<id>``, the greedy token's first.

        They depend on the prompt alone, but for what a hit shows on a real engine (its tail is computed in another
        batch shape): the same small difference at every hit.
        """
        first = self.token(prompt, place)
        value, ranked = 0.0, {}
        for rank in range(top):
            token = (first + rank) % self.vocab
            digest = hashlib.blake2b(prompt.tobytes() + f"{place} {token}".encode(), digest_size=2).digest()
            value -= 0.1 + digest[0] / 512
            ranked[f"token_id:{token}"] = round(value + (HIT_NOISE * (digest[1] / 127.5 - 1) if hit else 0.0), 6)
        return ranked

    def attended(self, prompt: array[int], hits: int) -> array[int]:
        """The prompt whose KV the output is made from: this one's, unless a fault says another's."""
        name = block_keys(prompt, len(prompt))[0]
        first = hits > 0 and name not in self.hit_before
        if hits:
            self.hit_before.add(name)
        wrong = "wrong-kv" in self.faults or ("wrong-kv-at-first-hit" in self.faults and first)
        return array("q", reversed(prompt)) if wrong and hits else prompt

    def metrics(self) -> str:
        """The /metrics page of the version that is played."""
        absent = dict.fromkeys(("computed", "gpu", "cpu", "nvme", "remote")) if "counters-absent" in self.faults else {}
        return render(VERSION, self.page, {**self.count, "started": STARTED, "running": self.running, **absent})

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
                    "enable_prefix_caching": self.caching,
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


def _read_json(path: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return content


def _freeze_client() -> None:
    """Stop the job that drives this server for a moment; kvladder marks its servers with the job's pid.

    Answers go on meanwhile, and wait for their reader.
    """
    job = int(os.environ["KVLADDER_JOB"].split(":")[1])
    os.kill(job, signal.SIGSTOP)
    threading.Timer(FROZEN_S, os.kill, (job, signal.SIGCONT)).start()


class Api:
    """vLLM's endpoints, as far as kvladder asks them."""

    def __init__(self, engine: Engine, key: str | None) -> None:
        self.engine, self.faults, self.key = engine, engine.faults, key

    async def answer(self, request: Request, writer: asyncio.StreamWriter) -> Answer | None:
        """Answer one request; a completion is streamed into ``writer``."""
        asked = (request.method, request.path)
        if request.path.startswith("/v1/") and self.key not in (
            None,
            request.headers.get("authorization", "").removeprefix("Bearer "),
        ):
            return Answer(401, {"error": "Unauthorized"})
        if asked == ("POST", "/v1/completions"):
            return await self._complete(json.loads(request.body), writer)
        if asked == ("POST", "/reset_prefix_cache"):
            return self._reset(request.query)
        bodies = {
            "/health": lambda: None,
            "/ping": lambda: None,
            "/version": lambda: {"version": f"{VERSION}+stub", "engine": NAME},
            "/v1/models": lambda: {"object": "list", "data": [{"id": self.engine.options.served_model_name}]},
            "/metrics": self.engine.metrics,
            "/server_info": self.engine.server_info,
        }
        if request.path in bodies:
            return Answer(200, bodies[request.path]())
        return Answer(404, {"error": {"message": f"{' '.join(asked)}: not in the stand-in"}})

    def _reset(self, query: str) -> Answer:
        if "reset-refused" in self.faults:
            return Answer(200, {"success": False})
        if "reset-does-nothing" not in self.faults:
            self.engine.device.clear()
            if "reset_external=true" in query and self.engine.tier is not None:
                self.engine.tier.reset()
        return Answer(200, {"success": True})

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> Answer | None:
        engine, faults = self.engine, self.faults
        number = engine.count_request()
        if faults.hits("http-500", number):
            return Answer(500, {"error": {"message": "stand-in: asked to fail"}})
        prompt = array("q", body["prompt"])
        if len(prompt) + int(body["max_tokens"]) > engine.options.max_model_len:
            return Answer(400, {"error": {"message": "maximum context length exceeded"}})
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
        writer.write(b"0\r\n\r\n")
        return None

    async def _events(self, prompt: array[int], body: dict[str, Any], number: int) -> AsyncIterator[str]:
        engine, faults = self.engine, self.faults
        base = {"id": f"cmpl-{number}", "object": "text_completion", "model": body["model"]}
        if "role-chunk" in faults:
            role = {"index": 0, "delta": {"role": "assistant"}, "text": "", "finish_reason": None}
            yield json.dumps({**base, "choices": [role]})
        hits = await engine.prefill(prompt)
        source = engine.attended(prompt, hits)
        asked = int(body["max_tokens"])
        cut = faults.hits("cut-stream", number)
        given = asked // 2 if cut or faults.hits("short-output", number) else asked
        given = 0 if faults.hits("no-text", number) else given
        for place in range(given):
            if place:
                await asyncio.sleep(DECODE_S)
            if faults.hits("crash-mid-pass", number, 5):
                print("RuntimeError: stand-in: asked to crash in the middle of a pass", flush=True)
                os._exit(1)
            engine.add(output=1)
            ranked = engine.logprobs(source, place, body["logprobs"], hit=hits > 0) if body.get("logprobs") else None
            choice = _choice(engine.token(source, place), ranked, last=place == asked - 1)
            if body.get("return_token_ids") and not place:
                choice["prompt_token_ids"] = prompt.tolist()
            chunk = {**base, "choices": [choice if body.get("return_token_ids") else {**choice, "token_ids": None}]}
            if (body.get("stream_options") or {}).get("continuous_usage_stats"):
                chunk["usage"] = _usage(len(prompt), place + 1)
            yield json.dumps(chunk)
        if cut:
            raise Hangup
        engine.add(finished=1)
        usage = {**_usage(len(prompt), given), "prompt_tokens_details": {"cached_tokens": hits}}
        yield json.dumps({**base, "choices": [], "usage": usage})
        yield "[DONE]"


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _choice(token: int, ranked: dict[str, float] | None, *, last: bool) -> dict[str, Any]:
    logprobs = None
    if ranked is not None:
        name = f"token_id:{token}"
        logprobs = {"tokens": [name], "token_logprobs": [ranked[name]], "top_logprobs": [ranked]}
    reason = "length" if last else None
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
    print(f"INFO Initializing a V1 LLM engine (v{VERSION}+stub) with config: model='{options.model}'", flush=True)
    print(f"INFO GPU KV cache size: {engine.device.blocks * engine.block:,} tokens", flush=True)
    await engine.open_tier()
    await asyncio.sleep(float(os.environ.get("KVLADDER_STUB_START_S", "0")))
    key = options.api_key or os.environ.get("VLLM_API_KEY")
    server = await serve(Api(engine, key).answer, options.host, options.port)
    print("INFO Application startup complete.", flush=True)
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, (lambda: None) if "hang-at-stop" in faults else stop.set)
    await stop.wait()
    server.close()


def import_patched() -> None:
    """Import the modules that the stack's patches touch, watched by the engine plugin, as engines do at their start."""
    names = os.environ.get(WATCHED)
    if names:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "envs" / "plugin"))
        importlib.import_module("kvladder_engine_plugin.sources").watch_sources()
        for name in names.split(","):
            importlib.import_module(name)


def main() -> None:
    """Entry point of the script."""
    faults = Faults.asked()
    _mapped = map_as_compiled(__file__, faults)
    import_patched()
    options = parse(sys.argv[1:])
    if "crash-at-start" in faults:
        print(f"INFO {NAME}", flush=True)
        raise ValueError("stand-in: asked to crash at start")
    asyncio.run(run(options, faults))


if __name__ == "__main__":
    main()
