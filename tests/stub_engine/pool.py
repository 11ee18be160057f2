"""Stand-ins for ``lmcache server`` and ``mooncake_master``, FOR TESTS ONLY: a pool of block hashes, and a metrics page.

The first argument says which of the two it is: ``lmcache`` or ``mooncake``. The stand-in engine talks to it on the
port that real engines use, in JSON lines; kvladder on the HTTP port, as with the real ones. Several engines share what
it holds; LMCache's keeps files below that where it's told to (``--l2-adapter``). It knows three faults (see
``faults.py`` for how they are asked for): ``side-process-dies``, ``hash-seed-differs`` and ``pool-not-shared``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

from faults import Faults, map_as_compiled
from http_server import Answer, Request, serve
from pages import render
from tiers import Files, Levels

GIB = 2**30
VERSION = os.environ.get("KVLADDER_STUB_VERSION", "0.32.0")


class Pool:
    """What the side process holds, and what it counts; ``chunk`` is None where the engine's blocks are the unit."""

    def __init__(self, kind: str, options: argparse.Namespace, faults: Faults) -> None:
        self.kind, self.options, self.faults = kind, options, faults
        self.chunk: int | None = options.chunk_size if kind == "lmcache" else None
        # A process that Python salts by itself hashes equal tokens to other keys than its peer.
        fixed = os.environ.get("PYTHONHASHSEED")
        self.seed = secrets.token_hex(4) if fixed is None or "hash-seed-differs" in faults else fixed
        self.engines = 0
        self.held: dict[int, Levels] = {}
        self.block_bytes = 0
        self.asked = self.stores = self.written = self.read = self.from_disk = 0
        self.adapter: dict[str, Any] | None = json.loads(options.l2_adapter) if options.l2_adapter else None
        if self.adapter is not None:
            told = f"base_path={self.adapter['base_path']}, use_odirect={self.adapter['use_odirect']}"
            print(f"INFO Initialized FSL2Adapter with {told}", flush=True)

    def join(self) -> int:
        """Number of the part of the pool that one more engine gets: the same for all, unless a fault says otherwise."""
        self.engines += 1
        return self.engines if "pool-not-shared" in self.faults else 0

    def answer(self, message: dict[str, Any], part: int) -> dict[str, Any]:
        """Answer one of an engine's questions: hello, lookup, store."""
        if message["ask"] == "hello":
            self.block_bytes = message["block_bytes"] * (self.chunk or 1)
            held = self.held.setdefault(part, Levels(0, self._files()))
            # Mooncake's engines bring the memory of the pool, each its own; LMCache's server has it.
            if self.chunk:
                held.host.blocks = int(self.options.l1_size_gb * GIB) // self.block_bytes
            else:
                held.host.blocks += message["blocks"]
            return {"chunk": self.chunk, "seed": self.seed}
        held = self.held[part]
        if message["ask"] == "lookup":
            found = held.lookup(message["keys"])
            self.asked += len(message["keys"])
            self.read += sum(found.values())
            self.from_disk += found["nvme"]
            return found
        self.stores += 1
        if self.faults.hits("side-process-dies", self.stores):
            self._die()
        count = held.store(message["keys"])
        self.written += count
        return {"count": count}

    def _files(self) -> Files | None:
        if self.adapter is None:
            return None
        return Files(Path(self.adapter["base_path"]), self.block_bytes, lambda _: False)

    def clear(self) -> None:
        """Empty memory; files stay."""
        for each in self.held.values():
            each.host.clear()

    def _die(self) -> None:
        """Each in the way it is seen to: one with a trace-back, the other by the kernel's hand."""
        if self.kind == "mooncake":
            os.kill(os.getpid(), signal.SIGKILL)
        print("Traceback (most recent call last):\n  ...\nMemoryError: stand-in: asked to die", flush=True)
        os._exit(1)

    def metrics(self) -> str:
        """The recorded /metrics page of the real side process, with this one's numbers."""
        held = sum(len(each.host) for each in self.held.values())
        used = held * self.block_bytes
        if self.chunk is not None:
            filed = sum(each.files.written for each in self.held.values() if each.files is not None)
            # What comes from disk is written to memory and read there, what goes to disk is read there.
            written = self.written + self.from_disk
            state = {
                "l1_written_chunks": written,
                "l1_read_chunks": self.read + filed,
                "l1_evicted_chunks": written - held,
                "l1_used_bytes": used,
                "requested_tokens": self.asked * self.chunk,
                "l1_hit_tokens": (self.read - self.from_disk) * self.chunk,
                "l2_hit_tokens": self.from_disk * self.chunk,
                "l2_stores": filed,
                "l2_written_chunks": filed,
                "l2_read_chunks": self.from_disk,
                "l2_used_bytes": filed * self.block_bytes,
            }
            return render(VERSION, "lmcache-server" if self.adapter is None else "lmcache-server-files", state)
        return render(
            VERSION,
            "mooncake-master",
            {
                "keys": held,
                "allocated_bytes": used,
                "capacity_bytes": sum(part.host.blocks for part in self.held.values()) * self.block_bytes,
                "puts_started": self.stores,
                "puts_ended": self.stores,
            },
        )


def parse(arguments: list[str]) -> tuple[str, argparse.Namespace]:
    """Which of the two it is, and the options that matter here; others are taken and ignored."""
    kind, *rest = arguments
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for names, kind_of in (
        (("--port", "--rpc_port"), int),
        (("--http-port", "--metrics_port"), int),
        (("--chunk-size",), int),
        (("--l1-size-gb",), float),
        (("--l2-adapter",), str),
    ):
        parser.add_argument(*names, type=kind_of)
    return kind, parser.parse_known_args(rest)[0]


async def run(kind: str, options: argparse.Namespace, faults: Faults) -> None:
    """Serve until a signal comes."""
    pool = Pool(kind, options, faults)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        part = pool.join()
        while line := await reader.readline():
            writer.write(json.dumps(pool.answer(json.loads(line), part)).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def page(request: Request, _writer: asyncio.StreamWriter) -> Answer:
        if (request.method, request.path) == ("POST", "/cache/clear"):
            pool.clear()
            return Answer(200, {"status": "ok", "cleared": {"tier": "l1"}})
        return Answer(200, pool.metrics() if request.path == "/metrics" else None)

    listeners = [
        await asyncio.start_server(talk, "127.0.0.1", options.port, limit=2**24),
        await serve(page, "127.0.0.1", options.http_port),
    ]
    print(f"INFO stand-in for {kind}, for tests only: no KV is kept here", flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    for listener in listeners:
        listener.close()


def main() -> None:
    """Entry point of the script."""
    faults = Faults.asked()
    _mapped = map_as_compiled(__file__, faults)
    asyncio.run(run(*parse(sys.argv[1:]), faults))


if __name__ == "__main__":
    main()
