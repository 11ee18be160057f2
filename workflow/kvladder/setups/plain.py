"""A server without any KV tier: every prompt is computed. The baseline."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvladder.setups.base import SetupConfig


class PlainConfig(SetupConfig):
    """vLLM with prefix caching off and no connector."""

    kind: Literal["plain"]
    prefix_caching: Literal[False] = Field(default=False, description="Always off: with it on this is `prefix-cache`.")


CONFIG = PlainConfig
