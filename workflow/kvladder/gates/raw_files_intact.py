"""Raw files are what the trial wrote: same size, same hash.

Protects from a truncated or edited file that still parses, e.g. after a full disk or a broken copy. Evidence: ``files``
in ``trial.json``, which is written last. Tolerance: none. Nothing else of a trial with a broken file is judged, and
this gate can't be switched off.
"""

from __future__ import annotations

from kvladder.config.records import GateResult
from kvladder.gates.base import Evidence, Findings

REQUIRED = True


def check(evidence: Evidence) -> list[GateResult]:
    """One result for all files of the trial."""
    found = Findings(__name__, REQUIRED, "trial.json: files")
    expected = f"{len(evidence.trial.files)} files as they were written"
    seen = "; ".join(f"{name} {what}" for name, what in evidence.broken.items())
    found.decide(not evidence.broken, expected, seen or expected)
    return found.results
