"""The compiled extensions that the stack lists are mapped into the servers.

Protects from a silent fallback to slow Python: LMCache builds for another torch import with only a warning and then run
without their compiled operations. Evidence: the servers' mapped files against the stack's patterns; a pattern of which
nothing is known, because a server's maps couldn't be read, is no pass. Tolerance: none.
"""

from __future__ import annotations

from kvladder.config.records import GateResult
from kvladder.gates.base import Evidence, Findings

REQUIRED = True


def check(evidence: Evidence) -> list[GateResult]:
    """One result on what the stack lists, and one on users of compiled code for which it lists nothing."""
    found = Findings(__name__, REQUIRED, "trial.json: effective.modules (the servers' /proc/<pid>/maps)")
    asked, modules = evidence.trial.expected, evidence.trial.effective.modules
    # Trials of before these keys say only what was seen.
    wanted: list[str] = list(asked.get("native_patterns", modules))
    unlisted: list[str] = list(asked.get("native_unlisted", ()))
    missing = [name for name in wanted if modules.get(name) is False]
    unknown = [name for name in wanted if name not in modules]
    expected = f"loaded: {', '.join(wanted)}"
    if missing:
        found.decide(False, expected, f"not loaded: {', '.join(missing)}")
    elif unknown:
        found.unreadable(expected, f"the servers' maps don't tell about {', '.join(unknown)}")
    elif wanted:
        found.decide(True, expected, f"{len(wanted)} loaded")
    if unlisted:
        found.skip("compiled extensions loaded", f"the stack lists none for {', '.join(unlisted)}")
    elif not wanted:
        found.skip("compiled extensions loaded", "the stack lists none for this setup")
    return found.results
