"""All trials of a block ran on one host, in one boot.

Protects from ratios between machines: a block that a lost host cut in two is measured again as a whole. Evidence: the
host id of each trial. Tolerance: none; with two hosts in a block all of its trials are invalid.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvladder.config.records import GateResult
from kvladder.gates.base import Evidence, Findings, TrialKey

REQUIRED = True


def check_block(evidences: Sequence[Evidence]) -> dict[TrialKey, list[GateResult]]:
    """One result a trial."""
    hosts = {item.trial.host.host_id for item in evidences}
    results = {}
    for item in evidences:
        found = Findings(__name__, REQUIRED, "trial.json: host.host_id of the block's trials")
        seen = f"{len(hosts)} hosts; this one on {item.trial.host.host_id}" if len(hosts) > 1 else "one host"
        found.decide(len(hosts) == 1, "one host for the whole block", seen)
        results[item.key] = found.results
    return results
