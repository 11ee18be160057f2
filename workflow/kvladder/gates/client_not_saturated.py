"""The client had time to spare: it read what had arrived in time, and it did not eat a whole core.

Protects from a load generator that measures itself (client queueing left out: vllm#54101; a read buffer that collapses
at long contexts: vllm#39963). Evidence: how long chunks lay in the kernel until the client read them, and its CPU time
of each pass. A chunk has the kernel's stamp, so a late read falsifies no TTFT by itself; but behind a late first token
the next chunks hide, behind a late end a slot stays empty, and behind many late reads gaps get lost. So the latest read
of those two kinds counts, and the 99th percentile of all. Where the kernel gave no stamps, every time is the moment of
a read, and the longest delay of the client's event loop counts. Tolerance: 20 ms or 10 % of the pass's median TTFT,
whichever is more; 90 % of one core, for the busiest of several client processes.
"""

from __future__ import annotations

from statistics import median

from kvladder.config.records import GateResult, PassRecord
from kvladder.gates.base import Evidence, Findings, short_label

REQUIRED = True

LATE_NS = 20_000_000
LATE_SHARE = 0.10
CPU_SHARE = 0.90


def check(evidence: Evidence) -> list[GateResult]:
    """One result a workload."""
    source = "trial.json: passes[].edge_late_max_ns, read_late_p99_ns, else loop_lag_max_ns; client_cpu_ns"
    found = Findings(__name__, REQUIRED, source)
    expected = f"client late by {LATE_NS // 10**6} ms or {LATE_SHARE:.0%} of TTFT at most, {CPU_SHARE:.0%} of a core"
    for workload in evidence.workloads:
        passes = [item for item in evidence.trial.passes if item.workload == workload]
        faults = [fault for item in passes for fault in _faults(evidence, item)]
        late = [late for item in passes if (late := _late(item)) is not None]
        if faults:
            found.decide(False, expected, "; ".join(faults), workload)
        elif len(late) < len(passes) or not late or any(item.client_cpu_ns is None for item in passes):
            found.skip(expected, "the client's lateness or CPU time was not recorded", workload)
        else:
            worst, what = max(late)
            found.decide(True, expected, f"{what} late by {worst / 1e6:.1f} ms at most", workload)
    return found.results


def _late(item: PassRecord) -> tuple[int, str] | None:
    """The pass's lateness in ns and whose it is; None where it wasn't recorded."""
    kinds = ((item.edge_late_max_ns, "first tokens and ends"), (item.read_late_p99_ns, "99 % of reads"))
    stamped = [(value, what) for value, what in kinds if value is not None]
    if stamped:
        return max(stamped)
    return None if item.loop_lag_max_ns is None else (item.loop_lag_max_ns, "event loop")


def _faults(evidence: Evidence, item: PassRecord) -> list[str]:
    times = [
        request.first_token_ns - request.send_ns
        for request in evidence.sent(item)
        if request.first_token_ns is not None and request.send_ns is not None
    ]
    limit = max(LATE_NS, LATE_SHARE * median(times)) if times else LATE_NS
    faults = []
    late = _late(item)
    if late is not None and late[0] > limit:
        faults.append(f"{short_label(item)}: {late[1]} late by {late[0] / 1e6:.0f} ms, limit {limit / 1e6:.0f} ms")
    lasted = max(item.end_ns - item.start_ns, 1)
    busiest = max(item.client_process_cpu_ns) if item.client_process_cpu_ns else item.client_cpu_ns
    if busiest is not None and busiest > CPU_SHARE * lasted:
        faults.append(f"{short_label(item)}: client took {busiest / lasted:.0%} of a core")
    return faults
