"""vLLM's own OffloadingConnector: KV goes to host memory, and from there to a tier on disk where one is configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from kvladder.config.base import TierBytes
from kvladder.config.traffic import PassName
from kvladder.counters.reading import Delta, Reading, engine_reading
from kvladder.setups.base import FileAccess, FileTier, Reset, SetupConfig, SetupContext
from kvladder.stats.oracle import Hierarchy, Tier

HOST_COPIER_MODULE = "kvladder_engine_plugin.host_copier"

ORDER_KNOWN_IN = "0.32."
"""vLLM versions whose eviction order was read in the source and checked against a run."""


class NativeFiles(FileTier):
    """Files of vLLM's own tier on disk."""

    read_threads: int = Field(default=16, ge=1, description="Threads that read files.")
    write_threads: int = Field(default=16, ge=1, description="Threads that write files.")


class Native(SetupConfig):
    """OffloadingConnector; with `files` or the host copier as TieringOffloadingSpec, else as its plain CPU spec."""

    kind: Literal["native"]
    cpu_bytes: TierBytes = Field(description="Host memory for KV, over all ranks.")
    chunk_tokens: int | None = Field(
        default=None, ge=1, description="Tokens that are stored and loaded together; unset: one device block."
    )
    eviction: Literal["lru", "arc"] = Field(default="lru", description="Eviction policy of the host tier.")
    copier: Literal["device", "host"] = Field(
        default="device",
        description="device: the engine's own copy between GPU and host. host: kvladder's memory copy for engines "
        "without a GPU; scheduler, eviction, files and metrics stay the engine's.",
    )
    files: NativeFiles | None = Field(default=None, description="A tier on disk below host memory; unset: none.")

    tier: ClassVar[str | None] = "cpu"

    @property
    def _tiering(self) -> bool:
        return self.files is not None or self.copier == "host"

    def connector(self, context: SetupContext) -> dict[str, Any]:
        """OffloadingConnector with the host tier's bytes, and its tiers below."""
        extra: dict[str, Any] = {"cpu_bytes_to_use": self.cpu_bytes, "eviction_policy": self.eviction}
        if self.chunk_tokens is not None:
            extra["block_size"] = self.chunk_tokens
        if self._tiering:
            extra["spec_name"] = "TieringOffloadingSpec"
        if self.copier == "host":
            extra |= {"spec_name": "HostTieringOffloadingSpec", "spec_module_path": HOST_COPIER_MODULE}
        if self.files is not None:
            tier: dict[str, Any] = {"type": "fs", "root_dir": str(self.disk_folder(context))}
            tier |= {"n_read_threads": self.files.read_threads, "n_write_threads": self.files.write_threads}
            extra["secondary_tiers"] = [tier]
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            # Names the shared memory segment, so that what a killed server leaves is known as this trial's.
            "engine_id": context.namespace,
            "kv_connector_extra_config": extra,
        }

    def disk_folder(self, context: SetupContext) -> Path | None:
        """The files' root, made by the engine."""
        return None if self.files is None else self.files.folder(context)

    def file_access(self, block_size: int) -> FileAccess | None:
        """One file a chunk; either kind of thread also takes the other's work."""
        if self.files is None:
            return None
        threads = self.files.read_threads + self.files.write_threads
        return FileAccess(self.files.path, self.granularity(block_size), threads)

    def reset_before(self, name: PassName) -> Reset | None:
        """Host memory, where the first hit is to come from disk."""
        return "host" if self.hit_tier(name) == "nvme" else super().reset_before(name)

    def hit_tier(self, name: PassName) -> str | None:
        """Disk for the first hit where asked for, host memory otherwise."""
        return "nvme" if self.files is not None and self.files.serve(name) else self.tier

    def granularity(self, block_size: int) -> int:
        """Chunks are what is looked up: a hit is a whole number of them."""
        return self.chunk_tokens or block_size

    def capacity_bytes(self) -> dict[str, int]:
        """The host tier; the disk is as large as its free space."""
        return {"cpu": self.cpu_bytes}

    def hierarchy(self, block_size: int, capacity_tokens: Mapping[str, int], version: str | None) -> Hierarchy:
        """Files, where there are any, lie below host memory."""
        tiers = super().hierarchy(block_size, capacity_tokens, version)
        return replace(tiers, below="nvme") if self.files is not None else tiers

    def host_tier(self, block_size: int, capacity_tokens: Mapping[str, int], version: str | None) -> Tier:
        """Policy and order of vLLM 0.32; before that, finished copies are noted in the order of a set, which nobody
        knows."""
        tier = super().host_tier(block_size, capacity_tokens, version)
        known = (version or "").startswith(ORDER_KNOWN_IN)
        return replace(tier, policy=self.eviction, order="tail-first" if known else "any", known=known)

    def shared_memory_bytes(self) -> int:
        """The host tier is one file there, mapped by scheduler and workers."""
        return self.cpu_bytes if self._tiering else 0

    def read(self, delta: Delta) -> Reading:
        """The engine's counters. Only from vLLM 0.32 on they tell host memory from disk; before, with both, nobody
        knows which of them a hit came from."""
        return engine_reading(delta, self.tier if self.files is None else None)

    @property
    def ours_in_path(self) -> str | None:
        """The host copier is kvladder's own."""
        if self.copier == "device":
            return None
        return (
            "KV is copied by kvladder's own host copier (a memory copy), because the engine has none for a CPU; "
            "scheduler, eviction, files and metrics are the engine's."
        )


CONFIG = Native
