"""LMCache inside the engine's own process, reached through LMCacheConnectorV1.

It stores and loads within the engine's steps, and what it can't do it silently computes again: as it always does on a
CPU. Its counters come through Prometheus' multiprocess files, so the engine's page has neither ``_created`` series nor
a process start time.
"""

from __future__ import annotations

import ast
import contextlib
import re
from typing import Any, ClassVar, Literal

import yaml
from pydantic import Field, field_validator

from kvladder.config.base import TierBytes
from kvladder.counters.lmcache import v1_reading, v1_store_activity
from kvladder.counters.reading import Delta, Pages, Reading
from kvladder.setups.base import COUNTER_FILES, SetupConfig, SetupContext

GIB = 2**30

OTHER_TIERS = ("local_disk", "remote_url", "gds_path", "storage_plugins", "enable_p2p", "extra_config")
"""Keys of LMCache's configuration with which KV may also come from elsewhere than host memory."""

OWN_SETTINGS = {"chunk_size": "chunk_tokens", "max_local_cpu_size": "cpu_bytes", "cache_policy": "eviction"}
"""Keys of LMCache's configuration → the setup's settings for them."""

STATS_S = 0.1
"""Seconds between LMCache's updates of its counters. With its own 10, a pass would end before its numbers are there."""

_CONFIGURATION = re.compile(r"Creating LMCacheEngine with config: (\{.*\})")
_POOL = re.compile(r"Adjusted CPU memory size from ([\d.]+) GB to ([\d.]+) GB")


class LmcacheV1(SetupConfig):
    """LMCacheConnectorV1 with a pool of `cpu_bytes` in the engine's process; for GPUs only: on a CPU it gives up, and
    everything is computed.
    """

    kind: Literal["lmcache-v1"]
    cpu_bytes: TierBytes = Field(description="Host memory of the pool.")
    chunk_tokens: int = Field(default=256, ge=1, description="Tokens that are stored, looked up and loaded together.")
    eviction: Literal["LRU", "LFU", "FIFO", "MRU"] = Field(default="LRU", description="Eviction policy of the pool.")
    lmcache: dict[str, Any] = Field(default_factory=dict, description="Any other key of LMCache's configuration file.")
    tier: ClassVar[str | None] = "cpu"

    @field_validator("lmcache")
    @classmethod
    def _others_only(cls, given: dict[str, Any]) -> dict[str, Any]:
        """What has a setting here is expected of the tier, and must not become something else in the file."""
        for key, setting in OWN_SETTINGS.items():
            if key in given:
                raise ValueError(f"{key} is set by the setup's own '{setting}'")
        return given

    def connector(self, context: SetupContext) -> dict[str, Any]:
        """The connector alone: everything else is in LMCache's own file."""
        return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}

    def settings(self) -> dict[str, Any]:
        """LMCache's configuration file (keys as in 0.5.3 and 0.5.6); it ignores keys that it doesn't know."""
        return {
            "chunk_size": self.chunk_tokens,
            "local_cpu": True,
            "max_local_cpu_size": self.cpu_bytes / GIB,
            "cache_policy": self.eviction,
            "save_decode_cache": False,
            "save_unfull_chunk": False,
            **self.lmcache,
        }

    def settings_read(self, log: str) -> dict[str, Any] | None:
        """The configuration that LMCache says it makes its engine with, and the pool that it then found memory for."""
        said = _CONFIGURATION.findall(log)
        if not said:
            return None
        settings = _literals(said[-1])
        for asked, given in _POOL.findall(log):
            if asked != given:
                settings["max_local_cpu_size"] = float(given)
        return settings

    def engine_env(self, context: SetupContext) -> dict[str, str]:
        """Writes LMCache's configuration file and makes the folder of its counters' files; no usage statistics."""
        path, counters = context.folder / "lmcache.yaml", context.folder / COUNTER_FILES
        path.write_text(yaml.safe_dump(self.settings(), sort_keys=False), encoding="utf-8")
        counters.mkdir(exist_ok=True)
        return {
            "LMCACHE_CONFIG_FILE": str(path),
            "LMCACHE_TRACK_USAGE": "false",
            # LMCache counts in the engine's process, and the API server's page only has what is in these files. Unset,
            # LMCache takes a folder in /tmp, where counters of earlier servers are added to.
            "PROMETHEUS_MULTIPROC_DIR": str(counters),
            "KVLADDER_LMCACHE_STATS_S": str(STATS_S),
        }

    def granularity(self, block_size: int) -> int:
        """Chunks are what is looked up."""
        return self.chunk_tokens

    def expected_hit(self, prompt_tokens: int, block_size: int) -> int:
        """Whole chunks; where they are the whole prompt, all but the token that is always computed."""
        return min(prompt_tokens // self.chunk_tokens * self.chunk_tokens, prompt_tokens - 1)

    def capacity_bytes(self) -> dict[str, int]:
        """The pool."""
        return {"cpu": self.cpu_bytes}

    def native_modules(self) -> list[str]:
        """LMCache falls back to slow Python with only a warning."""
        return ["engine", "lmcache"]

    def read(self, delta: Delta) -> Reading:
        """The engine's counters, with bytes from LMCache's own."""
        known = not any(self.settings().get(key) for key in OTHER_TIERS)
        return v1_reading(delta, self.chunk_tokens, "cpu" if known else None)

    def store_activity(self, pages: Pages) -> dict[str, float] | None:
        """LMCache's counters of stores."""
        return v1_store_activity(pages)


def _literals(text: str) -> dict[str, Any]:
    """The entries of a printed dictionary whose values are literals; ``inf``, for one, isn't."""
    found: dict[str, Any] = {}
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return found
    if isinstance(tree, ast.Dict):
        for key, value in zip(tree.keys, tree.values, strict=True):
            with contextlib.suppress(ValueError):
                found[ast.literal_eval(key or "")] = ast.literal_eval(value)
    return found


CONFIG = LmcacheV1
