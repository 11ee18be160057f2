"""The compiled extensions that the stack lists are mapped into the servers.

Protects from a silent fallback to slow Python: LMCache builds for another torch import with only a warning and then run
without their compiled operations. Evidence: the servers' mapped files against the stack's patterns; a pattern of which
nothing is known, because a server's maps couldn't be read, is no pass. Tolerance: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvladder.config.records import EffectiveConfig, GateResult
from kvladder.counters.reading import ENGINE
from kvladder.gates.base import Evidence, Findings

REQUIRED = True


def check(evidence: Evidence) -> list[GateResult]:
    """One result on what the stack lists, and one on users of compiled code for which it lists nothing."""
    found = Findings(__name__, REQUIRED, "trial.json: effective.modules (the servers' /proc/<pid>/maps)")
    asked, trial = evidence.trial.expected, evidence.trial
    engines = {ENGINE: trial.effective} | {name: each.effective for name, each in trial.further_engines.items()}
    # Trials of before these keys say only what was seen.
    wanted: list[str] = list(asked.get("native_patterns", trial.effective.modules))
    unlisted: list[str] = list(asked.get("native_unlisted", ()))
    missing = _seen(engines, wanted, False)
    unknown = _seen(engines, wanted, None)
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


def _seen(engines: Mapping[str, EffectiveConfig], wanted: Iterable[str], what: bool | None) -> list[str]:
    """Extensions by what an engine's maps say of them: True, False, or nothing (None)."""
    return [
        name if server == ENGINE else f"{name} ({server})"
        for server, each in engines.items()
        for name in wanted
        if each.modules.get(name) is what
    ]
