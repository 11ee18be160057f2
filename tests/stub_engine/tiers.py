"""The stand-in engine's tiers, FOR TESTS ONLY: which blocks of KV are where. No KV exists; sizes are arithmetic.

Blocks are known by the hash of their prefix (`block_keys`). A tier below the device answers two questions: how many of
a prompt's first blocks it holds, and by which source (`lookup`), and what of them is new to it (`store`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol


def block_keys(prompt: array[int], size: int, seed: str = "") -> list[str]:
    """A chained hash for every whole block, so that equal blocks at other places are others."""
    keys, parent = [], seed.encode()
    for start in range(0, len(prompt) - size + 1, size):
        parent = hashlib.blake2b(parent + prompt[start : start + size].tobytes(), digest_size=16).digest()
        keys.append(parent.hex())
    return keys


class Lru:
    """Block hashes up to a capacity, the least recently used leaves first."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self._held = blocks, OrderedDict[str, None]()

    def __len__(self) -> int:
        """How many are held."""
        return len(self._held)

    def __contains__(self, key: str) -> bool:
        """Whether it is held; held ones count as used."""
        held = key in self._held
        if held:
            self._held.move_to_end(key)
        return held

    def prefix(self, keys: Sequence[str]) -> int:
        """How many of the first blocks are held."""
        return next((place for place, key in enumerate(keys) if key not in self), len(keys))

    def add(self, keys: Sequence[str]) -> int:
        """Hold these blocks; returns how many are new."""
        new = sum(key not in self for key in keys)
        for key in keys:
            self._held[key] = None
            self._held.move_to_end(key)
            while len(self._held) > self.blocks:
                self._held.popitem(last=False)
        return new

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()


class Files:
    """A tier on disk: one real file of ``block_bytes`` zeros a block, never evicted; what lies there already is hit.

    ``full(n)`` says whether there is no room for the n-th block: it gets the kernel's own ENOSPC, from /dev/full.
    """

    def __init__(self, folder: Path, block_bytes: int, full: Callable[[int], bool]) -> None:
        self.folder, self.block_bytes, self.full, self.written = folder, block_bytes, full, 0
        folder.mkdir(parents=True, exist_ok=True)

    def __contains__(self, key: str) -> bool:
        """Whether its file is there."""
        return (self.folder / key).is_file()

    def add(self, keys: Sequence[str]) -> None:
        """Write the blocks that are missing. Raises OSError at the first that can't be written."""
        for key in (key for key in keys if key not in self):
            self.written += 1
            partial = self.folder / f".{key}"
            (Path("/dev/full") if self.full(self.written) else partial).write_bytes(bytes(self.block_bytes))
            partial.rename(self.folder / key)


class Tier(Protocol):
    """What lies below the device. ``unit`` is the number of tokens that are looked up together."""

    unit: int

    async def lookup(self, keys: Sequence[str]) -> dict[str, int]:
        """How many of the first blocks are held, by source; they are loaded then, which counts as use."""

    async def store(self, keys: Sequence[str]) -> int:
        """Hold these blocks; returns how many are new."""

    def reset(self) -> None:
        """Forget what lies in host memory."""


class Levels:
    """Host memory, and files below it where there are any: a block from a file is in host memory afterwards."""

    def __init__(self, blocks: int, files: Files | None = None) -> None:
        self.host, self.files = Lru(blocks), files

    def lookup(self, keys: Sequence[str]) -> dict[str, int]:
        """How many of the first blocks are held, by level."""
        found = {"cpu": 0, "nvme": 0}
        for key in keys:
            source = "cpu" if key in self.host else "nvme" if self.files is not None and key in self.files else None
            if source is None:
                break
            found[source] += 1
            self.host.add([key])
        return found

    def store(self, keys: Sequence[str]) -> int:
        """Hold these blocks; returns how many are new. What the disk refuses is logged, as an engine does, and all goes
        on."""
        new = self.host.add(keys)
        if self.files is not None:
            try:
                self.files.add(keys)
            except OSError as error:
                print(f"ERROR stand-in: storing to the tier on disk failed: {error}", flush=True)
        return new


class HostTier:
    """An engine's own levels."""

    def __init__(self, unit: int, blocks: int, files: Files | None = None) -> None:
        self.unit, self.levels = unit, Levels(blocks, files)

    async def lookup(self, keys: Sequence[str]) -> dict[str, int]:
        """See `Tier`."""
        return self.levels.lookup(keys)

    async def store(self, keys: Sequence[str]) -> int:
        """See `Tier`."""
        return self.levels.store(keys)

    def reset(self) -> None:
        """See `Tier`; files stay."""
        self.levels.host.clear()


class PoolTier:
    """The pool of a side process (``pool.py``), reached over one connection; once that breaks there is no tier."""

    def __init__(self, source: str, port: int, blocks: int, block_bytes: int) -> None:
        self.source, self.port, self.blocks, self.block_bytes = source, port, blocks, block_bytes
        self.unit, self.seed = 1, ""
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self, unit: int) -> None:
        """Introduce the engine. ``unit``: tokens a block, where the pool has no chunks of its own."""
        self._streams = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        answer = await self._ask("hello", blocks=self.blocks, block_bytes=self.block_bytes)
        self.unit, self.seed = answer.get("chunk") or unit, answer.get("seed", "")

    async def lookup(self, keys: Sequence[str]) -> dict[str, int]:
        """See `Tier`."""
        found = await self._ask("lookup", keys=list(keys))
        return {self.source: found.get("cpu", 0), "nvme": found.get("nvme", 0)}

    async def store(self, keys: Sequence[str]) -> int:
        """See `Tier`."""
        return int((await self._ask("store", keys=list(keys))).get("count", 0))

    def reset(self) -> None:
        """See `Tier`; the pool isn't the engine's to empty."""

    async def _ask(self, what: str, **fields: Any) -> dict[str, Any]:
        if self._streams is None:
            return {}
        reader, writer = self._streams
        try:
            writer.write(json.dumps({"ask": what, **fields}).encode() + b"\n")
            await writer.drain()
            answer: dict[str, Any] = json.loads(await reader.readuntil(b"\n"))
        except (OSError, asyncio.IncompleteReadError):
            print(f"ERROR stand-in: the pool on port {self.port} is gone; computing from now on", flush=True)
            self._streams = None
            return {}
        return answer
