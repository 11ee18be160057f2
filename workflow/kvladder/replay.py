"""A trial's requests as the hit oracle takes them, and what it predicts for every pass.

Prompts aren't stored, but which blocks they share is known: a request's ``key`` names its prompt, and a workload says
which prompts begin alike (`WorkloadConfig.stream`). Everything that went through the servers counts, for it takes room
in the tiers: the unmeasured warm-up prompt, every pass of every workload, the passes of `right_kv`, and what requests
generated. What a setup empties before a pass is emptied here. Engines of one trial have one tier together where their
setup shares its pool, else each its own, in which what another one stored can't be hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvladder.config import registry
from kvladder.config.records import PassRecord, RequestRecord, TrialRecord
from kvladder.setups.base import SetupConfig
from kvladder.stats.oracle import (
    Access,
    Hierarchy,
    Replay,
    Reset,
    better_capacity,
    replay,
    working_set,
)

TOLERANCE = 0.10
"""Of a pass's prompt tokens: how far hits may lie from the prediction where evictions depend on what happened at the
same time. Seen: 4.1 % on vLLM 0.32 with four requests in flight and a tier of 92 chunks for a working set of 96."""

THRASH = 0.1
"""Share of the hits that an infinite cache would give, below which a tier is said to thrash."""

_ID_BITS = 32

_WARM_UP = "warm-up"
"""The stream of the unmeasured prompt; no workload may share its blocks, whatever it is called."""


@dataclass(frozen=True, slots=True)
class PassPrediction:
    """What one pass must hit. Tokens of its requests that came through.

    ``hits`` by tier, with requests one after the other; ``overlapping``, with each looked up as it is sent. ``ceiling``
    is what tiers without limits would give. ``working_set`` is the tokens in different blocks that the pass asks for,
    of a pool those of the conversations open at a time.
    ``exact``: whether there is one possible answer, because nothing was evicted until its end, or the order of
    everything is known. ``known``: whether the policy of what was evicted is.
    """

    hits: dict[str, int]
    overlapping: dict[str, int]
    ceiling: dict[str, int]
    prompt_tokens: int
    working_set: int
    exact: bool
    known: bool

    @property
    def total(self) -> int:
        """Hit tokens in all tiers."""
        return sum(self.hits.values())

    @property
    def ceiling_total(self) -> int:
        """Hit tokens of tiers without limits."""
        return sum(self.ceiling.values())

    @property
    def thrashes(self) -> bool:
        """Nearly everything that could be hit is evicted before it is."""
        return self.total < THRASH * self.ceiling_total

    def allowed(self, tier: str | None = None) -> tuple[int, int]:
        """Least and most hit tokens of a tier, or of all together, that agree with the prediction."""
        both = (self.hits, self.overlapping)
        values = [sum(hits.values()) if tier is None else hits.get(tier, 0) for hits in both]
        if self.exact:
            return values[0], values[0]
        margin = round(TOLERANCE * self.prompt_tokens)
        return max(0, min(values) - margin), max(values) + margin


@dataclass(frozen=True, slots=True)
class Prediction:
    """A trial's passes as the oracle sees them, in the order of ``trial.passes``.

    ``sequence`` is what went through the first engine, or all that share its tier, ``groups`` the pass of each access.
    """

    hierarchy: Hierarchy
    passes: list[PassPrediction]
    sequence: list[Access | Reset]
    groups: list[int]

    def capacity_tokens(self) -> dict[str, int | None]:
        """Capacity by tier; None is unlimited."""
        return {
            tier.name: None if tier.capacity is None else tier.capacity * tier.chunk * self.hierarchy.block
            for tier in self.hierarchy.tiers
        } | ({self.hierarchy.below: None} if self.hierarchy.below else {})

    def fitting_capacity(self, measured: Sequence[int]) -> dict[str, int]:
        """Tokens of the capacity that explains the measured hits of all passes better than the configured one, by tier.

        Empty where none does.
        """
        found = {}
        mine = set(self.groups)
        hits = [value if number in mine else 0 for number, value in enumerate(measured)]
        for tier in self.hierarchy.tiers:
            chunks = better_capacity(self.sequence, self.hierarchy, tier.name, self.groups, hits)
            if chunks is not None:
                found[tier.name] = chunks * tier.chunk * self.hierarchy.block
        return found


def predict(trial: TrialRecord, setup: SetupConfig, sent: Mapping[int, Sequence[RequestRecord]]) -> Prediction | None:
    """Replay a trial; ``sent`` are the requests of each pass by its place in ``trial.passes``.

    None where the engine didn't report its block size. Raises ValueError for a workload of an unknown kind.
    """
    block = trial.effective.block_size
    if block is None:
        return None
    hierarchy = setup.hierarchy(block, capacities(trial, setup), trial.effective.engine_version)
    step = trial.effective.details.get("max_num_batched_tokens")
    if isinstance(step, int) and step > 0:
        hierarchy = hierarchy.stepped(step)
    engines = range(max((item.engine for item in trial.passes), default=0) + 1)
    parts = [
        _sequence(trial, setup, sent, block, together)
        for together in ([list(engines)] if setup.shares_pool else [[engine] for engine in engines])
    ]
    found = {number: each for part in parts for number, each in _predicted(trial, hierarchy, part).items()}
    passes = [found[number] for number in range(len(trial.passes))]
    return Prediction(hierarchy, passes, parts[0].items, parts[0].groups)


def _predicted(trial: TrialRecord, hierarchy: Hierarchy, part: _Sequence) -> dict[int, PassPrediction]:
    """The passes of a sequence by their place in ``trial.passes``."""
    mine = [trial.passes[number] for number in part.numbers]
    serial = replay(part.items, hierarchy)
    # A replay takes seconds for a million blocks: where two must be alike, one is made.
    overlapping = serial if _one_by_one(mine) else replay(part.items, hierarchy, overlapping=True)
    lost = any(serial.evicted.values()) or any(serial.refused.values())
    ceiling = replay(part.items, hierarchy.unbounded()) if lost else serial
    accesses = [item for item in part.items if isinstance(item, Access)]
    passes = {}
    for place, (number, places, end) in enumerate(zip(part.numbers, part.counted, part.ends, strict=True)):
        hits, other = (_sum(hierarchy, result, places) for result in (serial, overlapping))
        untouched = min(serial.certain, overlapping.certain) >= end
        passes[number] = PassPrediction(
            hits=hits,
            overlapping=other,
            ceiling=_sum(hierarchy, ceiling, places),
            prompt_tokens=sum(accesses[each].tokens for each in places),
            working_set=_working_set(mine[place], (accesses[each] for each in places), hierarchy.block),
            exact=hits == other and (untouched or (hierarchy.known and _one_by_one(mine[: place + 1]))),
            known=untouched or hierarchy.known,
        )
    return passes


@dataclass(frozen=True, slots=True)
class _Sequence:
    """All that went through engines with one tier. ``numbers`` are their passes' places in ``trial.passes``; ``groups``
    is the pass of each access, -1 for the warm-up's; ``counted`` are the accesses of each pass that came through;
    ``ends`` the number of items up to each pass's end."""

    items: list[Access | Reset]
    groups: list[int]
    numbers: list[int]
    counted: list[list[int]]
    ends: list[int]


def _sequence(
    trial: TrialRecord,
    setup: SetupConfig,
    sent: Mapping[int, Sequence[RequestRecord]],
    block: int,
    engines: Sequence[int],
) -> _Sequence:
    blocks = _Blocks(trial, block)
    items = [item for engine in engines for item in _warm_up(trial, setup, sent, blocks, engine)]
    groups = [-1 for item in items if isinstance(item, Access)]
    numbers = [number for number, item in enumerate(trial.passes) if item.engine in engines]
    counted: list[list[int]] = []
    ends = []
    for number in numbers:
        # Also where nothing is emptied: a pass begins when the one before it is over.
        items.append(Reset(setup.reset_before(trial.passes[number].name) or "nothing"))
        counted.append([])
        for request in sent.get(number, []):
            if request.send_ns is None:
                continue
            if request.status == "ok":
                counted[-1].append(len(groups))
            items.append(blocks.access(request))
            groups.append(number)
        ends.append(len(items))
    return _Sequence(items, groups, numbers, counted, ends)


def capacities(trial: TrialRecord, setup: SetupConfig) -> dict[str, int]:
    """Capacity by tier in tokens: as read back, else as configured where the bytes of a token are known."""
    found = dict(trial.effective.capacity_tokens)
    if trial.effective.kv_pool_tokens is not None:
        found.setdefault("gpu", trial.effective.kv_pool_tokens)
    per_token = trial.expected.get("kv_bytes_per_token")
    if per_token:
        for tier, size in setup.capacity_bytes().items():
            found.setdefault(tier, size // per_token)
    return found


class _Blocks:
    """Numbers the blocks of prompts, so that prompts of one stream have the same where they are the same."""

    def __init__(self, trial: TrialRecord, block: int) -> None:
        self.block = block
        self._streams: dict[tuple[str, str], int] = {}
        kinds = {name: str(entry.get("kind")) for name, entry in trial.config.get("workloads", {}).items()}
        self._stream = {name: registry.load("workloads", kind).CONFIG.stream for name, kind in kinds.items()}

    def chain(self, workload: str, stream: str, tokens: int) -> range:
        """Ids of the full blocks of the first ``tokens`` tokens of a stream."""
        first = self._streams.setdefault((workload, stream), len(self._streams)) << _ID_BITS
        return range(first, first + tokens // self.block)

    def output(self, workload: str, key: str, prompt_tokens: int, tokens: int) -> range:
        """Ids of the blocks that ``tokens`` of output fill after a prompt; the last one's KV is never computed."""
        filled = (prompt_tokens + max(tokens, 1) - 1) // self.block - prompt_tokens // self.block
        return self.chain(f"output of {workload}", key, filled * self.block)

    def access(self, request: RequestRecord) -> Access:
        """A request as the oracle takes it. Greedy output of one prompt is one text, and nobody else's."""
        name = self._stream.get(request.workload)
        stream = request.key if name is None else name(request.key)
        length = request.prompt_tokens
        sent = request.send_ns or 0
        end = request.end_ns or sent
        return Access(
            blocks=self.chain(request.workload, stream, length),
            tokens=length,
            output=self.output(request.workload, request.key, length, request.output_tokens or 0),
            sent=sent,
            first=request.first_token_ns or end,
            end=end,
        )


def _warm_up(
    trial: TrialRecord, setup: SetupConfig, sent: Mapping[int, Sequence[RequestRecord]], blocks: _Blocks, engine: int
) -> Iterator[Access | Reset]:
    """The prompt that every engine gets twice before anything is measured, as long as the longest of the workloads'."""
    workloads = trial.config.get("workloads", {})
    lengths = [
        (request.prompt_tokens + request.asked_tokens, request.prompt_tokens)
        for requests in sent.values()
        for request in requests
        if request.workload in workloads
    ]
    if not lengths:
        return
    whole, tokens = max(lengths)
    key = f"p{engine}"
    output = blocks.output(_WARM_UP, key, tokens, whole - tokens)
    for time in (0, 1):
        what = setup.reset_before("first-hit" if time else "cold")
        yield Reset(what or "nothing")
        yield Access(blocks.chain(_WARM_UP, key, tokens), tokens, output=output, sent=time, first=time, end=time)


def _working_set(item: PassRecord, accesses: Iterable[Access], block: int) -> int:
    """Conversations that are over aren't asked for again: what counts are those open at a time."""
    return working_set(accesses, block) if item.pool is None else item.pool.size * item.pool.tokens


def _one_by_one(passes: Sequence[PassRecord]) -> bool:
    """Whether requests never met: then their order is known, and what each evicted."""
    return all(item.concurrency == 1 for item in passes)


def _sum(hierarchy: Hierarchy, result: Replay, places: Sequence[int]) -> dict[str, int]:
    return {name: sum(result.hits[place][name] for place in places) for name in hierarchy.names}
