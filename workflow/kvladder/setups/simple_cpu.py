"""vLLM's SimpleCPUOffloadConnector: device blocks are copied to host memory as the prefix cache hashes them.

It works on the hashes of the device prefix cache and is silently never used with that cache off; so it runs with it on,
and the device cache is emptied before every warm pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from kvladder.config.base import TierBytes
from kvladder.counters.reading import Delta, Reading, simple_cpu_reading
from kvladder.setups.base import SetupConfig, SetupContext
from kvladder.stats.oracle import Tier


class SimpleCpu(SetupConfig):
    """SimpleCPUOffloadConnector with `cpu_bytes` of host memory over all ranks."""

    kind: Literal["simple-cpu"]
    cpu_bytes: TierBytes = Field(description="Host memory for KV, over all ranks.")
    prefix_caching: Literal[True] = Field(default=True, description="Always on: without it the tier is never used.")
    tier: ClassVar[str | None] = "cpu"

    def connector(self, context: SetupContext) -> dict[str, Any]:
        """Connector with its capacity."""
        extra = {"cpu_bytes_to_use": self.cpu_bytes}
        return {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}

    def host_tier(self, block_size: int, capacity_tokens: Mapping[str, int], version: str | None) -> Tier:
        """A pool like the device's, whose free queue takes finished copies in the order of the prompt: the beginning is
        evicted first. Of a request for which there is no room, a part is stored, which the model doesn't follow."""
        return replace(super().host_tier(block_size, capacity_tokens, version), order="head-first")

    def capacity_bytes(self) -> dict[str, int]:
        """The host tier."""
        return {"cpu": self.cpu_bytes}

    def read(self, delta: Delta) -> Reading:
        """The engine's counters, with bytes from the connector's count of loaded blocks."""
        return simple_cpu_reading(delta, self.cpu_bytes)


CONFIG = SimpleCpu
