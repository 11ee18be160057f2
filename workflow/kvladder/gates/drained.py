"""Store traffic was flat before the next pass began.

Protects from a warm pass that shares the link with the stores of the cold one, or that misses what isn't stored yet:
fixed sleeps instead of a drain. Evidence: the drain after each pass. Tolerance: the quiet time and the deadline of
``load``.
"""

from __future__ import annotations

from kvladder.config.records import GateResult
from kvladder.gates.base import Evidence, Findings, short_label

REQUIRED = True


def check(evidence: Evidence) -> list[GateResult]:
    """One result a workload; the last pass counts too, the next workload follows it."""
    found = Findings(__name__, REQUIRED, "trial.json: passes[].drained")
    expected = "store counters flat after every pass"
    for workload in evidence.served:
        passes = [item for item in evidence.trial.passes if item.workload == workload]
        busy = [short_label(item) for item in passes if item.drained is False]
        if evidence.setup.tier in (None, "gpu"):
            found.skip(expected, "nothing is stored outside the device", workload)
        elif busy:
            found.decide(False, expected, f"still storing at the deadline after {', '.join(busy)}", workload)
        elif not passes or any(item.drained is None for item in passes):
            found.skip(expected, "no counter of store traffic", workload)
        else:
            durable = max((item.durable_ns or 0 for item in passes), default=0)
            found.decide(True, expected, f"flat, {durable / 1e9:.2f} s after the pass at most", workload)
    return found.results
