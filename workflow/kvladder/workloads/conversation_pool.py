"""``conversation-pool``: many conversations that take turns. Which working set does each tier still hold?"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvladder.config.traffic import OrderPolicy, PassPlan, Pool, Prefix, Request, TrafficContext
from kvladder.workloads.base import Prompts, WorkloadConfig

Multiple = Annotated[dict[Literal["gpu", "cpu"], Annotated[float, Field(gt=0)]], Field(min_length=1, max_length=1)]
"""One tier, and how many times its capacity."""


class ConversationPoolConfig(WorkloadConfig):
    """``pool`` conversations are open at a time. Each turn's prompt is the whole conversation so far: the turn before
    it, as many canned ids as that one generated, and new ids. One that has had all its turns gives its place to the
    next, and only whole conversations are sent.

    A request that fails changes no other: the later turns of its conversation are sent as they were drawn.
    """

    kind: Literal["conversation-pool"]
    pool: Annotated[int, Field(ge=1)] | Multiple = Field(
        description="Conversations open at a time; or `{gpu: 2.0}`, `{cpu: 0.5}`: as many as fill so many times the "
        "device pool or the tier in host memory, at least 1, resolved once the capacity is known."
    )
    turns: int = Field(default=8, ge=1, description="Turns of each conversation.")
    first_tokens: int = Field(ge=1, description="Prompt tokens of the first turn.")
    next_tokens: int = Field(ge=1, description="Tokens that each later turn adds to what was said before it.")
    concurrency: int = Field(ge=1, description="Requests in flight at most.")
    max_requests: int = Field(
        ge=1,
        description="Upper bound: floor(max_requests ÷ (pool × turns)) conversations run in each place, whole ones. "
        "Where a pool that follows from a capacity is too large for it, each place still has one.",
    )
    order: OrderPolicy = Field(
        default="round-barrier",
        description="round-barrier: turn n is sent once all open conversations have had turn n - 1. fifo: the one that "
        "has waited longest is next. random: any of those that wait. zipf: the k-th place of the pool is drawn "
        "k^-zipf_exponent times as often as the first.",
    )
    zipf_exponent: float = Field(default=1.0, gt=0, le=10, description="How unequal `order: zipf` is.")
    staggered: bool = Field(
        default=False,
        description="Conversations first open in each place begin at different turns, so that they don't all end at "
        "once and the working set stays level; those are sent from there on, and whole ones follow.",
    )
    ramp_s: float = Field(default=0, ge=0, description="Seconds over which requests in flight grow to `concurrency`.")
    deadline_s: float = Field(
        default=14_400,
        gt=0,
        description="Backstop: nothing more is sent after so many seconds, and the trial is invalid.",
    )

    @model_validator(mode="after")
    def _whole_conversations(self) -> ConversationPoolConfig:
        if isinstance(self.pool, int) and self.max_requests < self.pool * self.turns:
            raise ValueError(
                f"max_requests: {self.max_requests}, at least {self.pool * self.turns}: {self.pool} conversations of "
                f"{self.turns} turns"
            )
        return self

    @property
    def conversation_tokens(self) -> int:
        """Prompt tokens of the last turn: what a conversation adds to the working set."""
        return self.prompt_tokens(self.turns - 1)

    @property
    def sized_by(self) -> Collection[str]:
        """The tier that `pool` is a multiple of."""
        return () if isinstance(self.pool, int) else self.pool.keys()

    def prompt_tokens(self, turn: int) -> int:
        """Prompt tokens of a turn, from 0."""
        return self.first_tokens + turn * (self.output_tokens + self.next_tokens)

    def longest_prompt(self) -> int:
        """Prompt and output tokens of the last turn."""
        return self.conversation_tokens + self.output_tokens

    def pool_size(self, context: TrafficContext) -> int:
        """Conversations open at a time. Raises ValueError where the capacity that it follows from isn't known."""
        if isinstance(self.pool, int):
            return self.pool
        [(tier, times)] = self.pool.items()
        if tier not in context.capacity_tokens:
            raise ValueError(f"pool: {times:g} times the capacity of {tier}, which isn't known")
        return max(1, round(times * context.capacity_tokens[tier] / self.conversation_tokens))

    def passes(self, name: str, context: TrafficContext) -> list[PassPlan]:
        """One pass; index and key (``c<conversation>-t<turn>``) run conversation by conversation."""
        size = self.pool_size(context)
        prompts = Prompts(name, context)
        requests: list[Request] = []
        for number, first_turn in enumerate(self._first_turns(size)):
            text = prompts.draw(f"c{number}", self.conversation_tokens)
            requests += self._conversation(number, text, first_turn, len(requests))
        identity = json.dumps([context.seed, context.namespace, name, self.order])
        drawn = random.Random(identity)  # noqa: S311 (an order, no secret)
        weights = [(place + 1) ** -self.zipf_exponent for place in range(size)] if self.order == "zipf" else []
        lots = [drawn.expovariate(1.0) for _ in requests] if self.order in ("random", "zipf") else []
        pool = Pool(size, self.order, self.conversation_tokens, lots, weights)
        return [
            PassPlan(
                workload=name,
                name="mixed",
                round=0,
                concurrency=self.concurrency,
                requests=requests,
                pool=pool,
                ramp_s=self.ramp_s,
                deadline_s=self.deadline_s,
            )
        ]

    def _first_turns(self, size: int) -> list[int]:
        """The turn at which each conversation begins, in the order in which they are opened."""
        if not self.staggered:
            return [0] * (size * max(1, self.max_requests // (size * self.turns)))
        begun = [place * self.turns // size for place in range(size)]
        left = self.max_requests - sum(self.turns - turn for turn in begun)
        return begun + [0] * max(0, left // self.turns)

    def _conversation(self, number: int, text: array[int], first_turn: int, index: int) -> list[Request]:
        return [
            Request(
                index=index + place,
                key=f"c{number}-t{turn}",
                prompt=Prefix(text, self.prompt_tokens(turn)),
                output_tokens=self.output_tokens,
                after=index + place - 1 if place else None,
            )
            for place, turn in enumerate(range(first_turn, self.turns))
        ]

    @staticmethod
    def stream(key: str) -> str:
        """The conversation that a turn belongs to."""
        return key.partition("-")[0]


CONFIG = ConversationPoolConfig
