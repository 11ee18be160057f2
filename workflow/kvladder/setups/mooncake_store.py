"""Mooncake store: a distributed pool with a master process, reached through MooncakeStoreConnector."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from kvladder.config.base import Bytes, TierBytes
from kvladder.counters.mooncake import store_activity, store_reading
from kvladder.counters.reading import Delta, Pages, Reading
from kvladder.serving.process import ProcessSpec, Readiness
from kvladder.setups.base import HASH_SEED, SetupConfig, SetupContext
from kvladder.stats.oracle import Tier

_MEMCPY = re.compile(r"\bmemcpy (enabled|disabled)\b")
_NOT_PINNED = "segment pinned memory is disabled"

_WATERMARK = 0.95
"""Share of the pool at which the master begins to evict (its ``eviction_high_watermark_ratio``)."""


class MooncakeStore(SetupConfig):
    """MooncakeStoreConnector in embedded mode: the engine itself contributes the pool's memory."""

    kind: Literal["mooncake-store"]
    segment_bytes: TierBytes = Field(
        description="Host memory of the pool, which the engine contributes; where a trial has several, each its share."
    )
    buffer_bytes: Bytes = Field(description="Host memory of the transfer buffers.")
    protocol: Literal["tcp", "rdma"] = Field(default="tcp", description="Transport of the transfer engine.")
    device: str = Field(default="", description="RDMA device; empty: tcp, or the transfer engine's own choice.")
    tier: ClassVar[str | None] = "remote"
    shares_pool: ClassVar[bool] = True

    def connector(self, context: SetupContext) -> dict[str, Any]:
        """The connector alone: the pool lives and dies with the trial's own master, without other trials' keys.

        An engine's scheduler looks keys up through a socket that is called alike in all engines of a host unless this
        number differs: the one that starts last would take it over.
        """
        config: dict[str, Any] = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
        return config | ({"kv_connector_extra_config": {"lookup_rpc_port": context.number}} if context.number else {})

    def engine_env(self, context: SetupContext) -> dict[str, str]:
        """Writes the connector's own config file and points at it; and has the engine announce itself on loopback."""
        config = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{context.port('mooncake')}",
            "protocol": self.protocol,
            "device_name": self.device,
            "mode": "embedded",
            "global_segment_size": self.segment_bytes // context.engines,
            "local_buffer_size": self.buffer_bytes,
        }
        path = context.folder / "mooncake.json"
        path.write_text(json.dumps(config, indent=1), encoding="utf-8")
        env = {"MOONCAKE_CONFIG_PATH": str(path)}
        if self.protocol == "tcp":
            # Otherwise the transfer engine listens on the address of a network card, and its copies go there.
            env["VLLM_HOST_IP"] = "127.0.0.1"
        return env

    def side_processes(self, context: SetupContext) -> list[ProcessSpec]:
        """The master, which keeps the directory of the pool."""
        port, metrics = context.port("mooncake"), context.port("mooncake-metrics")
        argv = [context.program("mooncake_master"), "--rpc_address=127.0.0.1", f"--rpc_port={port}"]
        argv += ["--metrics_host=127.0.0.1", f"--metrics_port={metrics}"]
        return [
            ProcessSpec(
                name="mooncake",
                argv=argv,
                env={**HASH_SEED, **context.engine.env, **self.env},
                cwd=context.folder,
                log=context.folder / "logs" / "mooncake.log",
                ready=Readiness(port=metrics, http_path="/metrics", deadline_s=context.engine.ready_s),
                metrics_url=f"http://127.0.0.1:{metrics}/metrics",
            )
        ]

    def host_tier(self, block_size: int, capacity_tokens: Mapping[str, int], version: str | None) -> Tier:
        """The master evicts from a watermark on, sparing what it has just leased: nobody outside knows which keys."""
        return replace(super().host_tier(block_size, capacity_tokens, version), sure=_WATERMARK)

    def capacity_bytes(self) -> dict[str, int]:
        """The pool: the segments of all engines."""
        return {"remote": self.segment_bytes}

    def native_modules(self) -> list[str]:
        """The store's client is a compiled extension."""
        return ["engine", "mooncake"]

    def links(self, tier: str, *, gpu: bool, log: str, engines: int = 1) -> tuple[str, ...]:
        """A memory copy from the engine's own segment where the transfer engine says so, its transport from another
        engine's; else its transport.

        That segment isn't pinned unless configured, and both are in the transfer engine's log lines.
        """
        if tier != "remote":
            return super().links(tier, gpu=gpu, log=log, engines=engines)
        copied = "host_memcpy" if not gpu else "pageable" if _NOT_PINNED in log else "pinned"
        network = ("tcp_loopback",) if self.protocol == "tcp" else ()
        said = _MEMCPY.search(log)
        if said is None or (engines > 1 and said[1] == "enabled"):
            return (*network, copied) if network else ()
        return (copied,) if said[1] == "enabled" else network

    def links_beside(self, links: tuple[str, ...]) -> tuple[str, ...]:
        """The transfer engine by itself, where KV moves over TCP: what it does with other buffers is no limit."""
        return ("transfer_engine",) if "tcp_loopback" in links else ()

    def object_tokens(self, block_size: int) -> int:
        """One object a block."""
        return self.granularity(block_size)

    def read(self, delta: Delta) -> Reading:
        """The engine's counters, with bytes from the connector's operation counters."""
        return store_reading(delta)

    def store_activity(self, pages: Pages) -> dict[str, float] | None:
        """Keys and bytes of the pool."""
        return store_activity(pages)


CONFIG = MooncakeStore
