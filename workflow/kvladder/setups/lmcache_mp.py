"""LMCache's multiprocess server: a process of its own holds the pool, engines reach it through LMCacheMPConnector."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from kvladder.config.base import TierBytes
from kvladder.config.traffic import PassName
from kvladder.counters.lmcache import mp_reading, mp_store_activity
from kvladder.counters.reading import Delta, Pages, Reading
from kvladder.serving.process import ProcessSpec, Readiness
from kvladder.setups.base import HASH_SEED, FileAccess, FileTier, Reset, SetupConfig, SetupContext
from kvladder.stats.oracle import Hierarchy, Tier

GIB = 2**30

_SEGMENT_PREFIX = "lmcache_l1_pool_"
"""What LMCache puts before the name that it is given."""

_WATERMARK = 0.8
"""Share of the pool at which LMCache begins to evict unless told otherwise (``EvictionConfig.trigger_watermark``)."""

_LONGEST_NAME = 255
"""Of a file, and so of a POSIX shared memory segment."""

_LOADS_AT_ONCE = 8
"""Requests for which the server loads files at a time (``--l2-prefetch-max-in-flight``), each file after file."""

_SET_BY_FILES = ("l2-adapter", "l2-prefetch-policy", "l2-store-policy")

_MADE = {
    "fs": re.compile(r"Initialized FSL2Adapter with .*use_odirect=(True|False)"),
    "fs_native": re.compile(r"Created FS native L2 adapter: .*odirect=(True|False)"),
}
"""What the server logs of the adapter that it has made."""


class ServerFiles(FileTier):
    """Files of LMCache's server (its L2). What is loaded from them stays in the pool, as in vLLM's own tiering."""

    adapter: Literal["fs", "fs_native"] = Field(
        default="fs", description="LMCache's adapter: fs is Python, fs_native C++ with threads of its own."
    )
    workers: int = Field(default=4, ge=1, description="Threads of fs_native; fs takes Python's own.")
    direct_io: bool = Field(
        default=True,
        description="Read and write past the page cache (O_DIRECT). LMCache stores nothing on a file system that "
        "refuses it, and goes through the page cache where a chunk isn't a multiple of the file system's block.",
    )

    def spec(self, folder: Path) -> dict[str, Any]:
        """The value of ``--l2-adapter``."""
        spec: dict[str, Any] = {"type": self.adapter, "base_path": str(folder), "use_odirect": self.direct_io}
        return spec | ({"num_workers": self.workers} if self.adapter == "fs_native" else {})


class LmcacheMp(SetupConfig):
    """LMCacheMPConnector and its server."""

    kind: Literal["lmcache-mp"]
    cpu_bytes: TierBytes = Field(description="Host memory of the server's pool (its L1).")
    chunk_tokens: int = Field(default=256, ge=1, description="Tokens that are stored, looked up and loaded together.")
    transfer: Literal["auto", "lmcache_driven", "engine_driven"] | None = Field(
        default=None,
        description="Who copies between engine and server; unset: the server's default on a GPU, "
        "engine_driven on a CPU (the default hangs the engine's start there).",
    )
    shared_memory: bool = Field(default=False, description="Pass KV through a shared memory segment (faster on a CPU).")
    workers: int | None = Field(default=None, ge=1, description="Worker threads of the server; unset: its default.")
    files: ServerFiles | None = Field(default=None, description="A tier on disk below the pool; unset: none.")
    server_args: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="Any argument of `lmcache server`; true = a bare flag."
    )
    tier: ClassVar[str | None] = "cpu"
    device_side_processes: ClassVar[tuple[str, ...]] = ("lmcache",)
    shares_pool: ClassVar[bool] = True

    @model_validator(mode="after")
    def _files_alone_say_how(self) -> Self:
        """What is expected of the tier on disk must not become something else in the server's arguments."""
        for name in _SET_BY_FILES if self.files is not None else ():
            if name in self.server_args:
                raise ValueError(f"server_args: {name} is set by the setup's own 'files'")
        return self

    def connector(self, context: SetupContext) -> dict[str, Any]:
        """Connector that points at this trial's server."""
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": context.port("lmcache")}
        return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}

    def settings(self) -> dict[str, Any]:
        """The adapter of the tier on disk."""
        return {} if self.files is None else {"adapter": self.files.adapter, "direct_io": self.files.direct_io}

    def settings_read(self, log: str) -> dict[str, Any] | None:
        """The adapter that the server says it made."""
        for name, line in _MADE.items():
            if said := line.search(log):
                return {"adapter": name, "direct_io": said[1] == "True"}
        return None

    def engine_env(self, context: SetupContext) -> dict[str, str]:
        """LMCache's client side sends usage statistics unless told not to."""
        return {"LMCACHE_TRACK_USAGE": "false"}

    def side_processes(self, context: SetupContext) -> list[ProcessSpec]:
        """The LMCache server."""
        port, http, otel = context.port("lmcache"), context.port("lmcache-http"), context.port("lmcache-prometheus")
        argv = [context.program("lmcache"), "server", "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--http-host", "127.0.0.1", "--http-port", str(http), "--prometheus-port", str(otel)]
        argv += ["--l1-size-gb", f"{self.cpu_bytes / GIB:g}", "--eviction-policy", "LRU"]
        argv += ["--chunk-size", str(self.chunk_tokens)]
        transfer = self.transfer or ("engine_driven" if context.stack.device == "cpu" else None)
        if transfer is not None:
            argv += ["--supported-transfer-mode", transfer]
        if self.shared_memory:
            argv += ["--shm-name", _segment(context.namespace)]
        if self.workers is not None:
            argv += ["--max-workers", str(self.workers)]
        if self.files is not None:
            argv += ["--l2-adapter", json.dumps(self.files.spec(self.files.folder(context)))]
            argv += ["--l2-prefetch-policy", "retain"]
        for name, value in self.server_args.items():
            argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return [
            ProcessSpec(
                name="lmcache",
                argv=argv,
                env={**HASH_SEED, "LMCACHE_TRACK_USAGE": "false", **context.engine.env, **self.env},
                cwd=context.folder,
                log=context.folder / "logs" / "lmcache.log",
                ready=Readiness(port=http, http_path="/healthcheck", deadline_s=context.engine.ready_s),
                metrics_url=f"http://127.0.0.1:{http}/metrics",
            )
        ]

    def disk_folder(self, context: SetupContext) -> Path | None:
        """The files' root, made by the server: one for all engines of a trial, under the first one's name."""
        return None if self.files is None or context.number else self.files.folder(context)

    def file_access(self, block_size: int) -> FileAccess | None:
        """One file a chunk."""
        if self.files is None:
            return None
        threads = self.files.workers if self.files.adapter == "fs_native" else _LOADS_AT_ONCE
        return FileAccess(self.files.path, self.granularity(block_size), threads, self.files.direct_io)

    def reset_before(self, name: PassName) -> Reset | None:
        """The pool, where the first hit is to come from disk."""
        return "host" if self.hit_tier(name) == "nvme" else super().reset_before(name)

    def host_reset(self, context: SetupContext) -> tuple[int, str]:
        """The server's own way: vLLM's connector has none. Files stay."""
        return context.port("lmcache-http"), "/cache/clear"

    def hit_tier(self, name: PassName) -> str | None:
        """Disk for the first hit where asked for, the pool otherwise."""
        return "nvme" if self.files is not None and self.files.serve(name) else self.tier

    def hierarchy(self, block_size: int, capacity_tokens: Mapping[str, int], version: str | None) -> Hierarchy:
        """Files, where there are any, lie below the pool."""
        tiers = super().hierarchy(block_size, capacity_tokens, version)
        return replace(tiers, below="nvme") if self.files is not None else tiers

    def granularity(self, block_size: int) -> int:
        """Chunks are what is looked up."""
        return self.chunk_tokens

    def host_tier(self, block_size: int, capacity_tokens: Mapping[str, int], version: str | None) -> Tier:
        """A thread of the server evicts a share of what is least recent from a watermark on, when it gets to it: nobody
        outside knows what is lost then."""
        tier = super().host_tier(block_size, capacity_tokens, version)
        return replace(tier, sure=float(self.server_args.get("eviction-trigger-watermark", _WATERMARK)))

    def capacity_bytes(self) -> dict[str, int]:
        """The server's pool."""
        return {"cpu": self.cpu_bytes}

    def shared_memory_bytes(self) -> int:
        """The pool, where it's passed through a shared segment."""
        return self.cpu_bytes if self.shared_memory else 0

    def native_modules(self) -> list[str]:
        """LMCache falls back to slow Python with only a warning."""
        return ["engine", "lmcache", "lmcache-server"]

    def read(self, delta: Delta) -> Reading:
        """The engine's counters, split by the server's."""
        return mp_reading(delta)

    def store_activity(self, pages: Pages) -> dict[str, float] | None:
        """The server's write counters."""
        return mp_store_activity(pages)


def _segment(namespace: str) -> str:
    """Name of the pool's segment, with the whole namespace: by it, what a killed attempt left is known for ours.

    Raises ValueError when that is longer than a segment's name may be.
    """
    name = f"kvladder-{namespace}"
    room = _LONGEST_NAME - len(_SEGMENT_PREFIX)
    if len(name) > room:
        raise ValueError(
            f"shared memory segment {name}: {len(name)} characters where {room} fit; shorten the names of the "
            "experiment, the setup or the suite"
        )
    return name


CONFIG = LmcacheMp
