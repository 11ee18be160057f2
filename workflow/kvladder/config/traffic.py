"""What a workload hands to the load client: requests as token ids, grouped into passes.

These types stand here because workloads and the client don't know each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

PassName = Literal["cold", "first-hit", "warm", "mixed"]
"""``cold`` stores, ``first-hit`` is the first load of what was stored, ``warm`` are the later ones. ``mixed``: prompts
that are new, that are hit and that were evicted meanwhile, all in one pass."""

RIGHT_KV = "right-kv"
"""Name of the passes that check what a tier gives back: sent after everything timed, and timed by nobody."""


OrderPolicy = Literal["round-barrier", "fifo", "random", "zipf"]
"""Which conversation of a pool comes next. ``round-barrier``: every one takes its next turn once all have had their
last. ``fifo``: the one that has waited longest. ``random``: any that may. ``zipf``: some places of the pool are more
popular than others."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first ``tokens`` ids of ``text``: the turns of a conversation share one array."""

    text: array[int]
    tokens: int

    def __len__(self) -> int:
        """Tokens."""
        return self.tokens

    def __iter__(self) -> Iterator[int]:
        """The ids."""
        return iter(self.text[: self.tokens])


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    ``index`` numbers the request inside its workload's pass; ``key`` names the prompt, so that a warm request can be
    paired with the cold one of the same prompt. ``after`` is the index of the request that has to finish first (a
    conversation's previous turn), None when the request is eligible at once.
    """

    index: int
    key: str
    prompt: array[int] | Prefix
    output_tokens: int
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """Conversations that are open at a time: requests chained by ``after``. One that ends gives its place to the next.

    ``tokens`` are those of a whole conversation, so ``size`` times that is the working set. ``lots`` (``random`` and
    ``zipf``) is one draw of an exponential distribution a request, and ``weights`` how popular each place is, empty for
    equally: a conversation whose turn may be sent is the next one with a probability proportional to the weight of its
    place.
    """

    size: int
    order: OrderPolicy
    tokens: int
    lots: Sequence[float] = ()
    weights: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One round of requests: sent with at most ``concurrency`` in flight, refilled on completion, in order.

    ``pool`` is set where conversations take turns. The number in flight grows to ``concurrency`` over ``ramp_s``
    seconds. After ``deadline_s`` seconds nothing more is sent; what was left is recorded as not sent. ``engine`` is the
    number of the trial's engine that it is sent to, from 0; most trials have one.
    """

    workload: str
    name: PassName
    round: int
    concurrency: int
    requests: Sequence[Request]
    pool: Pool | None = None
    ramp_s: float = 0.0
    deadline_s: float | None = None
    engine: int = 0

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
