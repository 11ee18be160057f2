"""Nothing else on this machine took CPU time while a pass ran.

Protects from noisy neighbours. Advisory: a shared machine is often all there is, and blocks and repeats are there to
see through it. Evidence: the share of all cores that other processes took, averaged over each pass. Tolerance: 10 %.
"""

from __future__ import annotations

from statistics import fmean

from kvladder.config.records import GateResult
from kvladder.gates.base import Evidence, Findings, short_label

REQUIRED = False

LIMIT = 0.10


def check(evidence: Evidence) -> list[GateResult]:
    """One result a workload: its noisiest pass, of those that were long enough for a sample."""
    found = Findings(__name__, REQUIRED, "probes.jsonl: cpu_other")
    expected = f"other processes take {LIMIT:.0%} of the CPU at most"
    for workload in evidence.workloads:
        shares = []
        passes = [item for item in evidence.trial.passes if item.workload == workload]
        for item in passes:
            samples = [
                sample.cpu_other
                for sample in evidence.probes
                if item.start_ns <= sample.t_ns <= item.end_ns
                if sample.cpu_other is not None
            ]
            if samples:
                shares.append((fmean(samples), short_label(item)))
        if shares:
            share, where = max(shares)
            seen = f"{share:.1%} in {where}; {len(shares)} of {len(passes)} passes had a sample"
            found.decide(share <= LIMIT, expected, seen, workload)
        elif not evidence.probes:
            found.unreadable(expected, "the sampler left no samples", workload)
        else:
            found.skip(expected, "no sample fell into a pass", workload)
    return found.results
