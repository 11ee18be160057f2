"""LMCache's multiprocess server: a process of its own holds the pool, engines reach it through LMCacheMPConnector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from kvladder.config.base import TierBytes
from kvladder.counters.lmcache import mp_reading, mp_store_activity
from kvladder.counters.reading import Delta, Pages, Reading
from kvladder.serving.process import ProcessSpec, Readiness
from kvladder.setups.base import HASH_SEED, SetupConfig, SetupContext
from kvladder.stats.oracle import Tier

GIB = 2**30

_SEGMENT_PREFIX = "lmcache_l1_pool_"
"""What LMCache puts before the name that it is given."""

_WATERMARK = 0.8
"""Share of the pool at which LMCache begins to evict unless told otherwise (``EvictionConfig.trigger_watermark``)."""

_LONGEST_NAME = 255
"""Of a file, and so of a POSIX shared memory segment."""


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
    server_args: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="Any argument of `lmcache server`; true = a bare flag."
    )
    tier: ClassVar[str | None] = "cpu"
    device_side_processes: ClassVar[tuple[str, ...]] = ("lmcache",)
    shares_pool: ClassVar[bool] = True

    def connector(self, context: SetupContext) -> dict[str, Any]:
        """Connector that points at this trial's server."""
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": context.port("lmcache")}
        return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}

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
