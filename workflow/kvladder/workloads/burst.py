"""``burst``: many prompts at once. What does a tier do when loads compete?"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvladder.config.traffic import PassPlan, TrafficContext
from kvladder.workloads.base import OneLengthWorkload, Prompts, rounds


class BurstConfig(OneLengthWorkload):
    """All requests of a pass at the same moment."""

    kind: Literal["burst"]
    requests: int = Field(ge=1, description="Requests, all sent at once.")

    def passes(self, name: str, context: TrafficContext) -> list[PassPlan]:
        """Cold, first hit, warm; every request in flight."""
        requests = Prompts(name, context).requests(self.requests, self.prompt_tokens, self.output_tokens)
        return rounds(name, requests, concurrency=self.requests, warm_passes=self.warm_passes)


CONFIG = BurstConfig
