"""All trials of a block ran on one host, in one boot.

Protects from ratios between machines: a block that a lost host cut in two is measured again as a whole. Evidence: the
host id of each trial. Tolerance: none; with two hosts in a block all of its trials are invalid, and so is one whose
host is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvladder.config.records import GateResult
from kvladder.gates.base import Evidence, Findings, TrialKey

REQUIRED = True

UNKNOWN = "unknown"
"""What a machine without an identity is called."""


def check_block(evidences: Sequence[Evidence]) -> dict[TrialKey, list[GateResult]]:
    """One result a trial."""
    hosts = {item.trial.host.host_id for item in evidences} - {UNKNOWN}
    results = {}
    for item in evidences:
        found = Findings(__name__, REQUIRED, "trial.json: host.host_id of the block's trials")
        host, expected = item.trial.host.host_id, "one host for the whole block"
        if host == UNKNOWN:
            found.unreadable(expected, "the machine has no id that could be read")
        else:
            found.decide(
                len(hosts) == 1, expected, f"{len(hosts)} hosts; this one on {host}" if len(hosts) > 1 else "one host"
            )
        results[item.key] = found.results
    return results
