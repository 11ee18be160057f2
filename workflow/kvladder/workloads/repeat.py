"""``repeat``: the same long prompts again, one at a time. The simplest question: what does a hit cost?"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvladder.config.traffic import PassPlan, TrafficContext
from kvladder.workloads.base import OneLengthWorkload, Prompts, rounds


class RepeatConfig(OneLengthWorkload):
    """Prompts one after the other, then the same ones again."""

    kind: Literal["repeat"]
    prompts: int = Field(default=1, ge=1, description="Prompts, sent one after the other.")
    warm_passes: int = Field(
        default=2, ge=2, description="Passes after the cold one: the first hit, then at least one later hit."
    )

    def passes(self, name: str, context: TrafficContext) -> list[PassPlan]:
        """Cold, first hit, warm; one request in flight."""
        requests = Prompts(name, context).requests(self.prompts, self.prompt_tokens, self.output_tokens)
        return rounds(name, requests, concurrency=1, warm_passes=self.warm_passes)


CONFIG = RepeatConfig
