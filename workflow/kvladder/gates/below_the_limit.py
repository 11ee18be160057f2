"""No claimed transfer rate is above what the link was measured to do.

Protects from numbers that time something else than the copy: LMCache's log line "Retrieved 17408 tokens in 0.008
seconds" is 285 GB/s over a link of 55, because it times the enqueue; and from hits that the counters report but nobody
loaded. Evidence: of each pass, the engine's bytes over the engine's own transfer time, and the bytes loaded over the
time from the first request sent to the last first token, which no load can have outlasted; against the rooflines that
were measured on the same host since it booted, with nothing beside them (``snakemake probe``). The link is that of the
setup's tier: pinned copies for host memory on a GPU, memory copies without one, the disk at the tier's file size, and
for a pool the way that its transfer engine logs; what the transfer engine itself did when measured is shown beside, and
decides nothing. Without a roofline nothing is checked: what is unknown isn't compared with 0.
Tolerance: ``gates.roofline_tolerance``, by default 5 % above the fastest repeat, for the noise of both clocks; half as
much again for disks, which may be virtual and shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from kvladder.config.records import GateResult, PassRecord, RateClaim, WindowTokens
from kvladder.config.rooflines import allowed
from kvladder.gates.base import Evidence, Findings, short_label

REQUIRED = True

Direction = Literal["load", "store"]

_ENDINGS: dict[str, tuple[str, str]] = {
    "pinned": ("pinned_h2d", "pinned_d2h"),
    "pageable": ("pageable_h2d", "pageable_d2h"),
    "host_memcpy": ("host_memcpy", "host_memcpy"),
    "tcp_loopback": ("tcp_loopback", "tcp_loopback"),
    "transfer_engine": ("transfer_engine_read", "transfer_engine_write"),
    "disk": ("disk_read_direct", "disk_write_direct"),
    "page cache": ("disk_read_cached", "disk_write_cached"),
}
"""Rooflines of a link: for loads, for stores."""


def check(evidence: Evidence) -> list[GateResult]:
    """A workload has a result for each direction and link, about its fastest pass."""
    found = Findings(__name__, REQUIRED, "counters.jsonl, requests; rooflines of the same host")
    expected = "no rate above the link's roofline"
    all_claims = claims(evidence)
    for workload in evidence.workloads:
        groups: dict[tuple[str, str | None], list[RateClaim]] = {}
        for claim in all_claims:
            if claim.workload == workload and claim.bounds:
                groups.setdefault((claim.direction, claim.link), []).append(claim)
        if not groups:
            none = evidence.setup.tier in (None, "gpu")
            why = "nothing moves between the device and a tier" if none else "no counter says how much moved, or when"
            found.skip(expected, why, workload)
        for group in groups.values():
            _decide(found, evidence, max(group, key=_share), workload, expected)
    return found.results


def _share(claim: RateClaim) -> float:
    return claim.rate / claim.ceiling if claim.ceiling else claim.rate


def _decide(found: Findings, evidence: Evidence, claim: RateClaim, workload: str, expected: str) -> None:
    tolerance = allowed(claim.link, evidence.config.roofline_tolerance)
    how = "by the engine's own time" if claim.basis == "engine" else "at least, by TTFT"
    rate = f"{claim.rate / 1e9:.3g} GB/s" if claim.time_ns else f"{claim.bytes} B in no time"
    seen = f"{claim.direction} at {rate} {how} in {short_label(claim)}"
    if claim.ceiling is not None:
        seen += f", {_share(claim):.0%} of {claim.link}"
    if claim.why is not None or claim.ceiling is None:
        found.skip(expected, f"{claim.why}; {seen}", workload)
        return
    limit = f"at most {claim.ceiling / 1e9:.3g} GB/s, as {claim.link} was measured, + {tolerance:.0%}"
    found.decide(claim.rate <= claim.ceiling * (1 + tolerance), limit, seen, workload)


def claims(evidence: Evidence) -> list[RateClaim]:
    """Every rate that a trial's counters and times claim, with the ceiling of its link, in the order of its passes."""
    pairs = zip(evidence.trial.passes, evidence.windows, strict=True)
    return [claim for item, window in pairs for claim in _of_pass(evidence, item, window)]


def _of_pass(evidence: Evidence, item: PassRecord, window: WindowTokens) -> Iterator[RateClaim]:
    setup = evidence.setup
    tier = setup.hit_tier(item.name)
    if setup.tier in (None, "gpu") or tier is None:
        return
    claim = _Claims(evidence, item)
    yield from claim.engine("load", setup.tier, window.loaded_bytes, window.load_time_ns)
    yield from claim.engine("store", setup.tier, window.stored_bytes, window.store_time_ns)
    # The times of a disk are summed over its threads, so a rate of them is one thread's.
    yield from claim.engine("load", "nvme", window.disk_read_bytes, window.disk_read_time_ns)
    yield from claim.engine("store", "nvme", window.disk_write_bytes, window.disk_write_time_ns)
    loaded = window.loaded_bytes if tier == setup.tier else window.disk_read_bytes
    per_token, tokens = evidence.trial.expected.get("kv_bytes_per_token"), window.by_source.get(tier)
    if loaded is None and per_token and tokens is not None:
        # No counter of bytes: the tokens that the engine says it loaded have a size.
        loaded = tokens * per_token
    yield from claim.floor(tier, loaded)


class _Claims:
    """Makes the claims of one pass."""

    def __init__(self, evidence: Evidence, item: PassRecord) -> None:
        self._evidence, self._item = evidence, item

    def engine(self, direction: Direction, tier: str, moved: int | None, time_ns: int | None) -> Iterator[RateClaim]:
        """The engine's bytes over the engine's time; nothing where it doesn't say both, or nothing moved."""
        if moved and time_ns is not None:
            yield from self._claims(direction, "engine", tier, moved, time_ns)

    def floor(self, tier: str, loaded: int | None) -> Iterator[RateClaim]:
        """What was loaded over the time in which it must have been: first request sent to last first token."""
        times = [
            (request.send_ns, request.first_token_ns)
            for request in self._evidence.sent(self._item)
            if request.send_ns is not None and request.first_token_ns is not None
        ]
        if loaded and times:
            span = max(first for _, first in times) - min(sent for sent, _ in times)
            yield from self._claims("load", "ttft", tier, loaded, span)

    def _claims(
        self, direction: Direction, basis: Literal["engine", "ttft"], tier: str, moved: int, time_ns: int
    ) -> Iterator[RateClaim]:
        evidence, item = self._evidence, self._item
        links = evidence.setup.links(
            tier,
            gpu=bool(evidence.trial.host.gpus),
            log=evidence.engine_logs[item.engine],
            engines=evidence.engines,
        )
        if links == ("disk",) and evidence.page_cache:
            links = ("page cache",)
        names = [_ENDINGS[link][direction == "store"] for link in links]
        rooflines, doubt = evidence.rooflines
        known = [rooflines.ceiling(name, moved) for name in names] if rooflines is not None else []
        # Where it isn't known which of several links it was, the fastest bounds them all.
        best = max((each for each in known if each is not None), key=lambda each: each.max, default=None)
        link = best.link if best is not None else names[0] if names else None
        why = doubt
        if not names:
            why = "no roofline: it isn't known what this tier's KV moves over"
        elif best is None or None in known:
            best, why = None, doubt or f"no roofline of {' and '.join(names)}"
        claim = RateClaim(
            workload=item.workload,
            name=item.name,
            round=item.round,
            direction=direction,
            basis=basis,
            bytes=moved,
            time_ns=max(time_ns, 0),
            link=link,
            ceiling=None if best is None else best.max,
            why=why,
        )
        yield claim
        for beside in evidence.setup.links_beside(links):
            name = _ENDINGS[beside][direction == "store"]
            roofline = rooflines.ceiling(name, moved) if rooflines is not None else None
            # One that wasn't measured is no news: older rooflines don't have it.
            if roofline is not None:
                yield claim.model_copy(update={"link": name, "ceiling": roofline.max, "bounds": False, "why": doubt})
