"""vLLM's own prefix cache on the device: the fastest hit there can be, as long as the device pool holds the prompts."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from kvladder.setups.base import SetupConfig


class PrefixCacheConfig(SetupConfig):
    """vLLM with prefix caching on and no connector."""

    kind: Literal["prefix-cache"]

    prefix_caching: Literal[True] = Field(default=True, description="Always on.")
    tier: ClassVar[str | None] = "gpu"


CONFIG = PrefixCacheConfig
