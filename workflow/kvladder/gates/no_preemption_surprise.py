"""The scheduler preempted nothing: no request was thrown out of the device pool and computed again.

Protects from numbers that show a pool too small for the concurrency instead of the tier, and from connectors whose hit
counters go wrong after a preemption (LMCache#2912, vllm-ascend#8664). Evidence: the engine's preemption counter.
Tolerance: none.
"""

from __future__ import annotations

from kvladder.config.records import GateResult
from kvladder.gates.base import Evidence, Findings, short_label

REQUIRED = True


def check(evidence: Evidence) -> list[GateResult]:
    """One result a workload."""
    found = Findings(__name__, REQUIRED, "counters.jsonl: vllm:num_preemptions_total")
    for workload in evidence.workloads:
        windows = [window for _, window in evidence.passes(workload)]
        hit = [f"{window.preemptions} in {short_label(window)}" for window in windows if window.preemptions]
        if hit:
            found.decide(False, "0 preemptions", ", ".join(hit), workload)
        elif not windows or any(window.preemptions is None for window in windows):
            found.skip("0 preemptions", "the engine's preemption counter is missing", workload)
        else:
            found.decide(True, "0 preemptions", f"0 in {len(windows)} passes", workload)
    return found.results
