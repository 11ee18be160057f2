"""The compiled extensions that the stack lists are mapped into the servers.

Protects from a silent fallback to slow Python: LMCache builds for another torch import with only a warning and then run
without their compiled operations. Evidence: the servers' mapped files against the stack's patterns. Tolerance: none.
"""

from __future__ import annotations

from kvladder.config.records import GateResult
from kvladder.gates.base import Evidence, Findings

REQUIRED = True


def check(evidence: Evidence) -> list[GateResult]:
    """One result a trial."""
    found = Findings(__name__, REQUIRED, "trial.json: effective.modules (the servers' /proc/<pid>/maps)")
    modules = evidence.trial.effective.modules
    missing = [name for name, loaded in modules.items() if not loaded]
    if not modules:
        found.skip("compiled extensions loaded", "the stack lists none for this setup")
    else:
        seen = f"not loaded: {', '.join(missing)}" if missing else f"{len(modules)} loaded"
        found.decide(not missing, f"loaded: {', '.join(modules)}", seen)
    return found.results
