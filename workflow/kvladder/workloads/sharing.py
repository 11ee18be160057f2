"""``sharing``: what one engine stored, asked of a second one. Does it find it, and how fast does it load it?"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from kvladder.config.traffic import PassPlan, TrafficContext
from kvladder.workloads.base import OneLengthWorkload, Prompts, rounds


class SharingConfig(OneLengthWorkload):
    """Prompts cold through the first of two engines, then through the second, then through the first again."""

    engines: ClassVar[int] = 2

    kind: Literal["sharing"]
    prompts: int = Field(default=4, ge=1, description="Prompts, all of one length.")
    concurrency: int = Field(default=1, ge=1, description="Requests in flight, refilled on completion.")
    warm_passes: int = Field(
        default=2,
        ge=2,
        description="Passes after the cold one: the first hit, sent to the second engine, then at least one later hit, "
        "sent to the first.",
    )

    def passes(self, name: str, context: TrafficContext) -> list[PassPlan]:
        """Cold and warm through the engine that stored, the first hit through the one that did not."""
        requests = Prompts(name, context).requests(self.prompts, self.prompt_tokens, self.output_tokens)
        plans = rounds(name, requests, self.concurrency, self.warm_passes)
        return [replace(plan, engine=1) if plan.name == "first-hit" else plan for plan in plans]


CONFIG = SharingConfig
