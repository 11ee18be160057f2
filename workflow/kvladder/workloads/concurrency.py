"""``concurrency``: a ladder of in-flight levels at one length. Up to which load does a tier hold?"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from kvladder.config.traffic import PassPlan, TrafficContext
from kvladder.workloads.base import OneLengthWorkload, Prompts, rounds


class ConcurrencyConfig(OneLengthWorkload):
    """Each level has fresh prompts, sent cold and then again; a pass's level is its ``concurrency``."""

    kind: Literal["concurrency"]
    levels: list[Annotated[int, Field(ge=1)]] = Field(min_length=1, description="Requests in flight, one level each.")
    requests_per_slot: int = Field(
        default=2, ge=1, description="Requests of a pass for each one in flight; more keep the level up for longer."
    )
    warm_passes: int = Field(default=1, ge=1, description="Passes after the cold one of each level.")

    @field_validator("levels")
    @classmethod
    def _each_level_once(cls, levels: list[int]) -> list[int]:
        if len(set(levels)) < len(levels):
            raise ValueError("each level may stand once: passes are told apart by it")
        return levels

    def passes(self, name: str, context: TrafficContext) -> list[PassPlan]:
        """Cold and hit passes level by level; rounds are numbered on over the levels."""
        prompts = Prompts(name, context)
        plans: list[PassPlan] = []
        for level in self.levels:
            requests = prompts.requests(
                level * self.requests_per_slot, self.prompt_tokens, self.output_tokens, prefix=f"c{level}-p"
            )
            plans += rounds(name, requests, level, self.warm_passes, first_round=len(plans))
        return plans


CONFIG = ConcurrencyConfig
