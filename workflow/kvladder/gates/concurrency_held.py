"""The client kept as many requests in flight as was asked, or as the order of requests allowed.

Protects from generators that do less than they say: a worker that builds prompts in the request loop, more slots than
conversations (inference-perf#540), a semaphore of 1 that inverted a conclusion (marin#4357). Evidence: the series of
requests in flight and eligible of each pass, weighted by time. Tolerance: ``gates.min_concurrency_held``, by default
95 %.
"""

from __future__ import annotations

from itertools import pairwise

from kvladder.config.records import GateResult, PassRecord
from kvladder.gates.base import Evidence, Findings, short_label

REQUIRED = True


def check(evidence: Evidence) -> list[GateResult]:
    """One result a workload: its worst pass."""
    found = Findings(__name__, REQUIRED, "trial.json: passes[].in_flight")
    least = evidence.config.min_concurrency_held
    for workload in evidence.workloads:
        expected = f"at least {least:.0%} of the asked or possible requests in flight"
        shares = [
            (share, item)
            for item in evidence.trial.passes
            if item.workload == workload and (share := held(item)) is not None
        ]
        if not shares:
            found.skip(expected, "no series of requests in flight", workload)
            continue
        share, worst = min(shares, key=lambda pair: pair[0])
        seen = f"{share:.1%} of {worst.concurrency} in {short_label(worst)}"
        found.decide(share >= least, expected, seen, workload)
    return found.results


def held(item: PassRecord) -> float | None:
    """Requests in flight ÷ min(asked, eligible), both integrated over the pass; None without a series."""
    if not item.in_flight:
        return None
    series = [*item.in_flight, (item.end_ns, 0, 0)]
    flown = possible = 0
    for (begin, flying, eligible), (end, _, _) in pairwise(series):
        flown += flying * (end - begin)
        possible += min(item.concurrency, eligible) * (end - begin)
    return flown / possible if possible > 0 else None
