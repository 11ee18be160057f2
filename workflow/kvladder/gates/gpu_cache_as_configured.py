"""Hits on the device happen where the setup wants them, and nowhere else.

Protects from a device prefix cache that serves the hits credited to the tier under test, and from a reset that answers
200 and clears nothing (vllm#57727). A plain server must have no hit of any kind. Evidence: prompt tokens by source of
every pass. Tolerance: none.
"""

from __future__ import annotations

from kvladder.config.records import GateResult
from kvladder.gates.base import HITS, Evidence, Findings, short_label, tokens

REQUIRED = True


def check(evidence: Evidence) -> list[GateResult]:
    """One result a workload."""
    found = Findings(__name__, REQUIRED, "counters.jsonl: prompt tokens by source of every pass")
    tier = evidence.setup.tier
    # A setup that lives on the device must have no external hit; one with another tier no hit on the device.
    barred = [name for name in HITS if name != "gpu"] if tier == "gpu" else list(HITS) if tier is None else ["gpu"]
    expected = {"gpu": "hits on the device only", None: "no hit in any pass"}.get(tier, "no hit on the device")
    for workload in evidence.served:
        pairs = evidence.passes(workload)
        bad = [
            f"{short_label(window)}: {tokens(window.by_source, barred)}"
            for _, window in pairs
            if any(window.by_source.get(name) for name in barred)
        ]
        if bad:
            found.decide(False, expected, "; ".join(bad), workload)
        elif not pairs or any(window.by_source.get(name) is None for _, window in pairs for name in barred):
            found.skip(expected, "the engine's token counters are missing", workload)
        else:
            found.decide(True, expected, f"as expected, over {len(pairs)} passes", workload)
    return found.results
