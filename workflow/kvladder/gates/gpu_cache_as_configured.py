"""Hits on the device happen where the setup wants them, and nowhere else.

Protects from a device prefix cache that serves the hits credited to the tier under test, and from a reset that answers
200 and clears nothing (vllm#57727). A plain server must have no hit of any kind. In a mixed pass a setup with the
device cache above its tier may hit in both. Evidence: prompt tokens by source of every pass. Tolerance: none.
"""

from __future__ import annotations

from kvladder.config.records import GateResult, PassRecord
from kvladder.gates.base import HITS, Evidence, Findings, short_label, tokens

REQUIRED = True


def check(evidence: Evidence) -> list[GateResult]:
    """One result a workload."""
    found = Findings(__name__, REQUIRED, "counters.jsonl: prompt tokens by source of every pass")
    tier = evidence.setup.tier
    expected = {"gpu": "hits on the device only", None: "no hit in any pass"}.get(tier, "no hit on the device")
    for workload in evidence.served:
        pairs = [(_barred(evidence, item), window) for item, window in evidence.passes(workload)]
        bad = [
            f"{short_label(window)}: {tokens(window.by_source, barred)}"
            for barred, window in pairs
            if any(window.by_source.get(name) for name in barred)
        ]
        if bad:
            found.decide(False, expected, "; ".join(bad), workload)
        elif pairs and not any(barred for barred, _ in pairs):
            found.skip(expected, "the device cache is on above the tier, and may hit", workload)
        elif not pairs or any(window.by_source.get(name) is None for barred, window in pairs for name in barred):
            found.skip(expected, "the engine's token counters are missing", workload)
        else:
            found.decide(True, expected, f"as expected, over {len(pairs)} passes", workload)
    return found.results


def _barred(evidence: Evidence, item: PassRecord) -> list[str]:
    """Sources that a pass must have no hit from: any but the device for a setup that lives there, the device for one
    with another tier."""
    setup = evidence.setup
    if setup.tier == "gpu":
        return [name for name in HITS if name != "gpu"]
    if setup.tier is None:
        return list(HITS)
    return [] if setup.prefix_caching and item.name == "mixed" else ["gpu"]
