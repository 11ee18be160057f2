"""What a workload hands to the load client: requests as token ids, grouped into passes.

These types stand here because workloads and the client don't know each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

PassName = Literal["cold", "first-hit", "warm"]
"""``cold`` stores, ``first-hit`` is the first load of what was stored, ``warm`` are the later ones."""

RIGHT_KV = "right-kv"
"""Name of the passes that check what a tier gives back: sent after everything timed, and timed by nobody."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    ``index`` numbers the request inside its workload's pass; ``key`` names the prompt, so that a warm request can be
    paired with the cold one of the same prompt. ``after`` is the index of the request that has to finish first (a
    conversation's previous turn), None when the request is eligible at once.
    """

    index: int
    key: str
    prompt: array[int]
    output_tokens: int
    after: int | None = None


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One round of requests: sent with at most ``concurrency`` in flight, refilled on completion, in order."""

    workload: str
    name: PassName
    round: int
    concurrency: int
    requests: Sequence[Request]

    @property
    def label(self) -> str:
        """``workload/pass/round``, the phase mark that counters and probes carry."""
        return f"{self.workload}/{self.name}/{self.round}"


@dataclass(frozen=True, slots=True)
class TrafficContext:
    """What a workload may depend on besides its own configuration.

    ``seed`` is the experiment's; ``namespace`` separates repeats (equal over setups, so that every setup of a block
    gets the same prompts). ``vocab_size`` and ``reserved_ids`` bound the draw. ``capacity_tokens`` is the measured
    capacity of each tier in tokens, for pools sized as multiples of it; a tier that isn't there is missing.
    """

    seed: int
    namespace: str
    vocab_size: int
    block_size: int
    reserved_ids: frozenset[int] = frozenset()
    capacity_tokens: Mapping[str, int] = field(default_factory=dict)
