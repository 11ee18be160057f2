"""The hit oracle: which tokens of a request sequence tiers of known capacity must serve, and which none can.

`replay` sends accesses, in order, through a model of vLLM's device prefix cache, of the tier that a connector keeps in
host memory, and of a store below that. The model is what the engines' source says (vLLM 0.32.0: ``v1/core/
block_pool.py``, ``v1/kv_offload/cpu``, ``v1/kv_offload/tiering``, ``v1/simple_kv_offload``, the offloading connector's
scheduler):

- A block's id stands for its tokens and all before them. A lookup stops at the first block that no tier has, and never
  covers the last token of a prompt, which is always computed.
- The host tier's unit is a chunk of one or more device blocks, named by its last block. It is looked up from the chunk
  in which the device's hit ends; less than one chunk beyond that is no hit.
- Everything computed goes to the host tier as prefill steps finish it, whether the device keeps it or not, and from
  there to the store below, which evicts nothing. A request that loaded a prefix offers only what follows it; one that
  didn't offers all of it, also what the device had.
- Storing evicts what is least recent among chunks that are neither being loaded nor part of the same offer. An offer
  for which too little can be evicted is refused whole, and made again, longer, with the next step.
- A request's chunks become the most recent ones when it ends. Within a request the last chunk goes first (`tail-first`:
  native in vLLM 0.32, the device pool), the first one does (`head-first`: SimpleCPUOffloadConnector), or nobody can
  know (`any`: native in vLLM 0.26 notes finished copies in the order of a set).
- A device block is in use from admission to the request's end; a prompt's unfinished block takes room, but is no hit.
  A block that is computed again although it is cached (the last of a prompt of whole blocks) counts once.
- A chunk that only the store below has is brought into the host tier first, which evicts as any storing does.

Copies are instant here, and decoding is one step. Where that matters (an offer while copies are on their way, a lookup
while another request's blocks are computed), the engine may decide otherwise; `Replay.certain` says until where nothing
of the kind can have played a part.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Policy = Literal["lru", "arc"]
Order = Literal["tail-first", "head-first", "any"]
Clears = Literal["device", "host", "nothing"]

_PROMOTIONS = 4
"""Lookups after which a prompt that doesn't fit into the host tier is given what is there: an engine may go on for
ever, each promotion evicting the one before."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier: ``capacity`` in chunks (None: evicts nothing) of ``chunk`` device blocks.

    ``sure`` is the share of the capacity up to which nothing is evicted (engines with a watermark begin earlier);
    ``whole`` is whether a prompt of whole chunks is hit whole, and all of it but the last token counts; ``known`` is
    whether policy and order are the engine's own, read in its source, and not merely likely.
    """

    name: str
    capacity: int | None
    chunk: int = 1
    policy: Policy = "lru"
    order: Order = "tail-first"
    sure: float = 1.0
    whole: bool = False
    known: bool = True


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Tiers in the order of lookup; ``block`` is the tokens of a device block, ``step`` those of a prefill step (None:
    a prompt is computed at once). ``below`` needs ``host``: all that goes there passes through it."""

    block: int
    device: Tier | None = None
    host: Tier | None = None
    below: str | None = None
    step: int | None = None

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Those that can evict."""
        return tuple(tier for tier in (self.device, self.host) if tier is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tiers in the order of lookup."""
        return (*(tier.name for tier in self.tiers), *([self.below] if self.below else []))

    @property
    def known(self) -> bool:
        """Whether evictions can be predicted at all."""
        return all(tier.known for tier in self.tiers)

    def resized(self, **capacity: int | None) -> Hierarchy:
        """The same with other capacities, in chunks by tier name."""

        def sized(tier: Tier | None) -> Tier | None:
            return tier if tier is None or tier.name not in capacity else replace(tier, capacity=capacity[tier.name])

        return replace(self, device=sized(self.device), host=sized(self.host))

    def stepped(self, step: int) -> Hierarchy:
        """The same with this many tokens in a prefill step."""
        return replace(self, step=step)

    def unbounded(self) -> Hierarchy:
        """The same with no capacity at all: the ceiling."""
        return self.resized(**dict.fromkeys(self.names))


@dataclass(frozen=True, slots=True)
class Access:
    """One request: ``blocks`` are ids of the full device blocks of its prompt of ``tokens`` tokens, ``output`` those
    of blocks that its output completes. Times order it among others: sent, first token, end (any unit)."""

    blocks: Sequence[int]
    tokens: int
    output: Sequence[int] = ()
    sent: int = 0
    first: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Reset:
    """All that was sent before is over. Empties the device cache, or that and the host tier, or nothing; the store
    below keeps what it has."""

    what: Clears


@dataclass(slots=True)
class Replay:
    """``hits``: tokens by tier name, one map an access, in the order given. ``certain``: number of leading entries of
    the sequence (accesses and resets) after which the first eviction or refusal happened; all of them where none did.
    ``evicted`` and ``refused`` count chunks by tier."""

    hits: list[dict[str, int]] = field(default_factory=list)
    certain: int = 0
    evicted: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)


def replay(sequence: Sequence[Access | Reset], hierarchy: Hierarchy, *, overlapping: bool = False) -> Replay:
    """Hit tokens by tier of each access.

    Between two resets, accesses go one after the other in the order of their first tokens; ``overlapping``: each is
    looked up when it is sent, and stored at its first token. An engine with requests in flight does something between
    the two.
    """
    model = _Model(hierarchy)
    result = Replay(hits=[{} for item in sequence if isinstance(item, Access)])
    pending: list[tuple[int, int, Access]] = []
    place = 0
    disturbed: list[int] = []
    for number, item in enumerate(sequence):
        if isinstance(item, Reset):
            _play(model, pending, result.hits, disturbed, overlapping)
            pending = []
            model.reset(item.what)
        else:
            pending.append((number, place, item))
            place += 1
    _play(model, pending, result.hits, disturbed, overlapping)
    result.certain = min(disturbed, default=len(sequence))
    for tier in model.caches:
        result.evicted[tier.tier.name], result.refused[tier.tier.name] = tier.evicted, tier.refused
    return result


def ceiling(accesses: Sequence[Access], block: int) -> float:
    """Share of prompt tokens that an infinite cache of this granularity serves; ``blocks`` have ``block`` tokens each.

    0.0 for no tokens at all.
    """
    hierarchy = Hierarchy(block, host=Tier("any", None))
    total = sum(access.tokens for access in accesses)
    return sum(hit["any"] for hit in replay(accesses, hierarchy).hits) / total if total else 0.0


def working_set(accesses: Iterable[Access], block: int) -> int:
    """Tokens in different full blocks that these accesses compute or hit."""
    seen: set[int] = set()
    for access in accesses:
        seen.update(access.blocks)
        seen.update(access.output)
    return len(seen) * block


def better_capacity(
    sequence: Sequence[Access | Reset], hierarchy: Hierarchy, name: str, groups: Sequence[int], measured: Sequence[int]
) -> int | None:
    """Capacity of the tier ``name``, in chunks, that explains measured hits at least twice as well as the given one.

    ``groups`` gives the group (a pass) of each access, -1 for one that nobody measured; ``measured`` the hit tokens of
    each group in all tiers together. The error is the sum of absolute differences. None where no capacity explains them
    as much better.
    """
    tier = next(tier for tier in hierarchy.tiers if tier.name == name)
    accesses = [item for item in sequence if isinstance(item, Access)]
    most = working_set(accesses, 1) // tier.chunk + 1
    effort = sum(len(access.blocks) for access in accesses)
    points = max(6, min(16, 5_000_000 // max(effort, 1)))

    def error(capacity: int | None) -> int:
        found = [0] * len(measured)
        for group, hits in zip(groups, replay(sequence, hierarchy.resized(**{name: capacity})).hits, strict=True):
            if group >= 0:
                found[group] += sum(hits.values())
        return sum(abs(got - wanted) for got, wanted in zip(found, measured, strict=True))

    own = error(tier.capacity)
    errors = {size: error(size) for size in {max(1, round(most * point / points)) for point in range(1, points + 1)}}
    best = min(errors, key=lambda size: (errors[size], size))
    step = most // (2 * points)
    while step:
        for size in (best - step, best + step):
            if size >= 1 and size not in errors:
                errors[size] = error(size)
        best = min(errors, key=lambda size: (errors[size], size))
        step //= 2
    return best if 2 * errors[best] <= own and own > 0 else None


def _play(
    model: _Model,
    pending: Sequence[tuple[int, int, Access]],
    hits: list[dict[str, int]],
    disturbed: list[int],
    overlapping: bool,
) -> None:
    """Run accesses that no reset separates; the first one at which something was evicted goes to ``disturbed``."""
    jobs = {place: _Job(access) for _, place, access in pending}
    if overlapping:
        # At equal times a request is stored before the next is looked up, and ends last.
        events = []
        for number, place, access in pending:
            first = max(access.first, access.sent + 1)
            events += [(access.sent, 1, number, place), (first, 0, number, place)]
            events.append((max(access.end, first), 2, number, place))
        events.sort()
    else:
        order = sorted(pending, key=lambda item: (item[2].first, item[0]))
        events = [(turn, kind, number, place) for turn, (number, place, _) in enumerate(order) for kind in (1, 0, 2)]
    for _, kind, number, place in events:
        job = jobs[place]
        if kind == 1:
            hits[place] = model.admit(job)
        elif kind == 0:
            model.compute(job)
        else:
            model.finish(job)
        if model.disturbed and not disturbed:
            disturbed.append(number)


@dataclass(slots=True)
class _Job:
    """A request on its way: which of its chunks were loaded, offered, inserted."""

    access: Access
    loaded: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    inserted: set[int] = field(default_factory=set)
    reused: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)
    cursor: int = 0
    hit_tokens: int = 0


class _Model:
    """State of all tiers."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self.hierarchy = hierarchy
        self.device = _cache(hierarchy.device) if hierarchy.device else None
        self.host = _cache(hierarchy.host) if hierarchy.host else None
        self.below: set[int] = set()
        self.caches = [cache for cache in (self.device, self.host) if cache is not None]

    @property
    def disturbed(self) -> bool:
        """Whether anything was evicted, refused, or filled beyond what is sure."""
        return any(cache.disturbed for cache in self.caches)

    def reset(self, what: Clears) -> None:
        """Forget what a reset empties."""
        if self.device is not None and what != "nothing":
            self.device.clear()
        if self.host is not None and what == "host":
            self.host.clear()

    def admit(self, job: _Job) -> dict[str, int]:
        """Look the prompt up, take its device blocks, pin what is loaded. Returns hit tokens by tier."""
        access, block = job.access, self.hierarchy.block
        hits = dict.fromkeys(self.hierarchy.names, 0)
        local = 0
        if self.device is not None:
            local = self.device.prefix(access.blocks, 0, (access.tokens - 1) // block)
            hits[self.device.tier.name] = local * block
        job.hit_tokens = local * block
        if self.host is not None:
            self._admit_host(job, local, hits)
        if self.device is not None:
            loose = int(access.tokens % block > 0)
            self.device.hold(access.blocks, local, loose)
        return hits

    def _admit_host(self, job: _Job, local: int, hits: dict[str, int]) -> None:
        assert self.host is not None  # noqa: S101 (its caller's condition)
        access, block, tier = job.access, self.hierarchy.block, self.host.tier
        keys = access.blocks[tier.chunk - 1 :: tier.chunk]
        start, unit = local // tier.chunk, tier.chunk * block
        limit = (access.tokens - (not tier.whole)) // unit
        end, promoted = self._resident(job, keys, start, limit)
        if end <= start or end * unit - local * block < unit:
            return
        job.loaded = list(keys[start:end])
        job.reused.update(key for key in job.loaded if key not in job.inserted)
        job.cursor = end
        job.hit_tokens = end * unit
        self.host.pin(job.loaded)
        slow = sum(key in promoted for key in job.loaded)
        external = min(end * unit, access.tokens - 1) - local * block
        if self.hierarchy.below is not None:
            hits[self.hierarchy.below] = min(slow * unit, external)
            external -= hits[self.hierarchy.below]
        hits[tier.name] = external

    def _resident(self, job: _Job, keys: Sequence[int], start: int, limit: int) -> tuple[int, set[int]]:
        """End of the prefix that is in the host tier after promotions, and the keys that were promoted for it."""
        assert self.host is not None  # noqa: S101 (its caller's condition)
        promoted: set[int] = set()
        end = self.host.prefix(keys, start, limit)
        if self.hierarchy.below is None:
            return end, promoted
        for _ in range(_PROMOTIONS):
            arriving: list[int] = []
            for place in range(start, limit):
                key = keys[place]
                if self.host.has(key):
                    continue
                if key not in self.below or not self.host.store([key], job.missed):
                    break
                # A chunk on its way can't be evicted.
                self.host.pin([key])
                job.inserted.add(key)
                promoted.add(key)
                arriving.append(key)
            self.host.unpin(arriving)
            end = self.host.prefix(keys, start, limit)
            if not arriving:
                break
        return end, promoted

    def compute(self, job: _Job) -> None:
        """Prefill, step by step: loads are over, and finished chunks are offered to the host tier."""
        if self.host is None:
            return
        self.host.unpin(job.loaded)
        access, step = job.access, self.hierarchy.step or job.access.tokens
        keys = access.blocks[self.host.tier.chunk - 1 :: self.host.tier.chunk]
        unit = self.host.tier.chunk * self.hierarchy.block
        done = job.hit_tokens
        while done < access.tokens:
            done = min(done + step, access.tokens)
            self._offer(job, keys, done // unit)

    def _offer(self, job: _Job, keys: Sequence[int], end: int) -> None:
        """Offer chunks up to ``end``; one that is refused is offered again with the next step."""
        assert self.host is not None  # noqa: S101 (its caller's condition)
        offer = list(keys[job.cursor : end])
        if not offer:
            return
        present = [key for key in offer if self.host.has(key)]
        job.reused.update(key for key in present if key not in job.inserted)
        job.offered += offer
        new = [key for key in offer if not self.host.has(key)]
        if new and not self.host.store(new, job.missed, protected=set(present)):
            return
        job.inserted.update(new)
        if self.hierarchy.below is not None:
            self.below.update(new)
        job.cursor = end

    def finish(self, job: _Job) -> None:
        """The output's chunks are offered, recency is noted, device blocks are free to be evicted."""
        access = job.access
        blocks = [*access.blocks, *access.output] if access.output else access.blocks
        if self.host is not None:
            keys = blocks[self.host.tier.chunk - 1 :: self.host.tier.chunk]
            self._offer(job, keys, len(keys))
            seen = list(dict.fromkeys((*job.loaded, *job.offered)))
            self.host.touch(seen, job.inserted, job.reused)
        if self.device is not None:
            self.device.release(access.blocks, access.output, int(access.tokens % self.hierarchy.block > 0))


class _Lru:
    """Chunks from the least to the most recent; pinned ones keep their place, but can't be evicted."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.chunks: OrderedDict[int, None] = OrderedDict()
        self.pinned: dict[int, int] = {}
        self.loose = 0
        self.evicted = self.refused = 0
        self._random = random.Random(0)  # noqa: S311 (an order, no secret)

    @property
    def disturbed(self) -> bool:
        full = self.tier.capacity is not None and len(self) + self.loose > self.tier.sure * self.tier.capacity
        return full or self.evicted > 0 or self.refused > 0

    def __len__(self) -> int:
        return len(self.chunks)

    def has(self, key: int) -> bool:
        return key in self.chunks

    def prefix(self, keys: Sequence[int], start: int, limit: int) -> int:
        """End of the run of resident chunks from ``start``, at most ``limit``."""
        place = start
        for key in keys[start:limit]:
            if not self.has(key):
                break
            place += 1
        return place

    def pin(self, keys: Iterable[int]) -> None:
        for key in keys:
            self.pinned[key] = self.pinned.get(key, 0) + 1

    def unpin(self, keys: Iterable[int]) -> None:
        for key in keys:
            left = self.pinned.get(key, 0) - 1
            if left > 0:
                self.pinned[key] = left
            else:
                self.pinned.pop(key, None)

    def store(self, keys: Sequence[int], missed: set[int], protected: Iterable[int] = ()) -> bool:
        """Insert new chunks, all or none. ``missed`` holds the keys that the request has missed here before."""
        self.miss(keys, missed)
        if self.tier.capacity is not None:
            surplus = len(self) + self.loose + len(keys) - self.tier.capacity
            if surplus > 0 and not self.evict(surplus, protected):
                self.refused += len(keys)
                return False
        for key in keys:
            self.insert(key)
        return True

    def insert(self, key: int) -> None:
        self.chunks[key] = None

    def miss(self, keys: Sequence[int], missed: set[int]) -> None:
        """Nothing is learned from a miss."""

    def evict(self, count: int, protected: Iterable[int]) -> bool:
        """Evict ``count`` chunks, least recent first; nothing where there aren't as many to be had."""
        guarded = self.pinned.keys() | set(protected)
        victims: list[int] = []
        for key in self.chunks:
            if len(victims) == count:
                break
            if key not in guarded:
                victims.append(key)
        if len(victims) < count:
            return False
        for key in victims:
            del self.chunks[key]
        self.evicted += count
        return True

    def touch(self, keys: Sequence[int], inserted: set[int], reused: set[int]) -> None:
        """A request that had to do with these chunks, given from head to tail, is over."""
        chunks = self.chunks
        ordered: Iterable[int]
        if self.tier.order == "tail-first":
            ordered = reversed(keys)
        elif self.tier.order == "head-first":
            ordered = keys
        else:
            ordered = self._random.sample(keys, len(keys))
        for key in ordered:
            if key in chunks:
                chunks.move_to_end(key)

    # The device pool: blocks are taken at admission and given back at the end.

    def hold(self, blocks: Sequence[int], local: int, loose: int) -> None:
        """A request takes its hit blocks, new ones for the rest, and ``loose`` that are never full."""
        self.pin(blocks[:local])
        self.loose += loose
        new = [key for key in blocks[local:] if not self.has(key)]
        self._make_room(len(new))
        for key in new:
            self.insert(key)
        self.pin(blocks[local:])

    def release(self, blocks: Sequence[int], output: Sequence[int], loose: int) -> None:
        """A request gives its blocks back; those that its output filled stay as well."""
        new = [key for key in output if not self.has(key)]
        self.loose -= loose
        self._make_room(len(new))
        for key in new:
            self.insert(key)
        self.unpin(blocks)
        self.touch([*blocks, *output], set(), set())

    def _make_room(self, count: int) -> None:
        """Evict as far as there is something to evict: an engine would let a request wait that has no room."""
        if self.tier.capacity is None:
            return
        surplus = len(self) + self.loose + count - self.tier.capacity
        if surplus > 0:
            idle = len(self) - len(self.pinned)
            self.evict(min(surplus, max(idle, 0)), ())

    def clear(self) -> None:
        self.chunks.clear()
        self.pinned.clear()


class _Arc(_Lru):
    """Adaptive replacement (Megiddo and Modha, FAST 2003) as vLLM's ``ARCCachePolicy`` does it.

    ``chunks`` is T1 (seen once); ``often`` T2; ``ghosts`` are B1 and B2, keys that were evicted from them; ``target``
    the size that T1 should have. It differs from the paper: a chunk stored again after a ghost hit begins in T1, and
    eviction takes from T1 as soon as it has reached its target.
    """

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.often: OrderedDict[int, None] = OrderedDict()
        self.ghosts: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (OrderedDict(), OrderedDict())
        self.target = 0.0

    def __len__(self) -> int:
        return len(self.chunks) + len(self.often)

    def has(self, key: int) -> bool:
        return key in self.chunks or key in self.often

    def insert(self, key: int) -> None:
        self.chunks[key] = None
        for ghost in self.ghosts:
            ghost.pop(key, None)

    def miss(self, keys: Sequence[int], missed: set[int]) -> None:
        """A ghost that is asked for shifts the target; once a request and key."""
        once, again = self.ghosts
        for key in reversed(keys):
            if key in missed:
                continue
            if key in once:
                self.target = min(self.target + max(1, len(again) / len(once)), self.tier.capacity or 0)
                once.move_to_end(key)
            elif key in again:
                self.target = max(self.target - max(1, len(once) / len(again)), 0)
                again.move_to_end(key)
        missed.update(keys)

    def evict(self, count: int, protected: Iterable[int]) -> bool:
        guarded = self.pinned.keys() | set(protected)
        first = (key for key in self.chunks if key not in guarded)
        second = (key for key in self.often if key not in guarded)
        victims: list[tuple[int, bool]] = []
        size = len(self.chunks)
        for _ in range(count):
            key = next(first, None) if size >= int(self.target) else None
            recent = key is not None
            if key is None:
                key = next(second, None)
            if key is None:
                key, recent = next(first, None), True
            if key is None:
                return False
            size -= recent
            victims.append((key, recent))
        for key, recent in victims:
            del (self.chunks if recent else self.often)[key]
            self.ghosts[0 if recent else 1][key] = None
        for ghost in self.ghosts:
            while len(ghost) > (self.tier.capacity or 0):
                ghost.popitem(last=False)
        self.evicted += count
        return True

    def touch(self, keys: Sequence[int], inserted: set[int], reused: set[int]) -> None:
        """A chunk that was only stored stays where it is, as the most recent; one that was reused goes to T2."""
        for key in reversed(keys):
            if key in reused:
                if key in self.chunks:
                    del self.chunks[key]
                    self.often[key] = None
                elif key in self.often:
                    self.often.move_to_end(key)
            elif key in inserted:
                if key in self.chunks:
                    self.chunks.move_to_end(key)
                elif key in self.often:
                    self.often.move_to_end(key)

    def clear(self) -> None:
        super().clear()
        self.often.clear()
        for ghost in self.ghosts:
            ghost.clear()
        self.target = 0.0


def _cache(tier: Tier) -> _Lru:
    return _Arc(tier) if tier.policy == "arc" else _Lru(tier)
