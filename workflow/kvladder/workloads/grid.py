"""``grid``: batch size × prompt length. From which length, and up to which batch, does loading beat computing?"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from kvladder.config.traffic import PassPlan, TrafficContext
from kvladder.workloads.base import Prompts, WorkloadConfig, rounds


class GridConfig(WorkloadConfig):
    """Each cell (batch, length) has fresh prompts, all sent at the same moment: cold, then again."""

    kind: Literal["grid"]
    batches: list[Annotated[int, Field(ge=1)]] = Field(min_length=1, description="Requests sent at once, a row each.")
    lengths: list[Annotated[int, Field(ge=1)]] = Field(
        min_length=1, description="Prompt lengths in tokens, a column each."
    )
    warm_passes: int = Field(
        default=2, ge=1, description="Passes after the cold one of each cell; the first of them is the first hit."
    )

    @field_validator("batches", "lengths")
    @classmethod
    def _each_once(cls, values: list[int]) -> list[int]:
        if len(set(values)) < len(values):
            raise ValueError("each value may stand once: cells are told apart by them")
        return values

    def longest_prompt(self) -> int:
        """Prompt and output tokens of a request of the longest column."""
        return max(self.lengths) + self.output_tokens

    def passes(self, name: str, context: TrafficContext) -> list[PassPlan]:
        """Cold, first hit, warm, cell by cell: all batches of a length, then the next length; rounds numbered on."""
        prompts = Prompts(name, context)
        plans: list[PassPlan] = []
        for length in self.lengths:
            for batch in self.batches:
                requests = prompts.requests(batch, length, self.output_tokens, prefix=f"b{batch}-l{length}-p")
                plans += rounds(name, requests, batch, self.warm_passes, first_round=len(plans))
        return plans


CONFIG = GridConfig
