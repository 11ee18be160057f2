"""The client had time to spare: its event loop was not late, and it did not eat a whole core.

Protects from a load generator that measures itself (client queueing left out: vllm#54101; a read buffer that collapses
at long contexts: vllm#39963). Evidence: the longest delay of the client's event loop and its CPU time of each pass.
Tolerance: a delay of 20 ms or 10 % of the pass's median TTFT, whichever is more; 90 % of one core.
"""

from __future__ import annotations

from statistics import median

from kvladder.config.records import GateResult, PassRecord
from kvladder.gates.base import Evidence, Findings, short_label

REQUIRED = True

LAG_NS = 20_000_000
LAG_SHARE = 0.10
CPU_SHARE = 0.90


def check(evidence: Evidence) -> list[GateResult]:
    """One result a workload."""
    found = Findings(__name__, REQUIRED, "trial.json: passes[].loop_lag_max_ns, client_cpu_ns")
    expected = f"event loop late by {LAG_NS // 10**6} ms or {LAG_SHARE:.0%} of TTFT at most, {CPU_SHARE:.0%} of a core"
    for workload in evidence.workloads:
        passes = [item for item in evidence.trial.passes if item.workload == workload]
        faults = [fault for item in passes for fault in _faults(evidence, item)]
        lags = [item.loop_lag_max_ns for item in passes if item.loop_lag_max_ns is not None]
        if faults:
            found.decide(False, expected, "; ".join(faults), workload)
        elif len(lags) < len(passes) or not lags or any(item.client_cpu_ns is None for item in passes):
            found.skip(expected, "the client's lag or CPU time was not recorded", workload)
        else:
            found.decide(True, expected, f"late by {max(lags) / 1e6:.1f} ms at most", workload)
    return found.results


def _faults(evidence: Evidence, item: PassRecord) -> list[str]:
    times = [
        request.first_token_ns - request.send_ns
        for request in evidence.sent(item)
        if request.first_token_ns is not None and request.send_ns is not None
    ]
    limit = max(LAG_NS, LAG_SHARE * median(times)) if times else LAG_NS
    faults = []
    if item.loop_lag_max_ns is not None and item.loop_lag_max_ns > limit:
        faults.append(
            f"{short_label(item)}: loop late by {item.loop_lag_max_ns / 1e6:.0f} ms, limit {limit / 1e6:.0f} ms"
        )
    if item.client_cpu_ns is not None and item.client_cpu_ns > CPU_SHARE * (item.end_ns - item.start_ns):
        share = item.client_cpu_ns / (item.end_ns - item.start_ns)
        faults.append(f"{short_label(item)}: client took {share:.0%} of a core")
    return faults
