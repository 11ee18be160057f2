"""The engine's counters agree with themselves and with what the client sent.

Protects from connectors that claim more hits than the prompt has (LMCache#2912, vllm-ascend#8664, #7489), from an
engine recreated between two snapshots (NeMo-RL PR#4052), and from somebody else's requests on the server. Evidence:
sources against prompt tokens, process start times, prompt tokens against the client's; that a trial's other engines
counted none; from pass to pass, that no counter begins again. Tolerance: none.
"""

from __future__ import annotations

from kvladder.config.records import GateResult
from kvladder.gates.base import Evidence, Findings, short_label

REQUIRED = True


def check(evidence: Evidence) -> list[GateResult]:
    """One result a workload."""
    found = Findings(__name__, REQUIRED, "counters.jsonl, requests.jsonl")
    expected = "prompt tokens = sum of their sources = tokens that the client sent"
    for workload in evidence.served:
        faults, unknown = [], False
        for item, window in evidence.passes(workload):
            faults += [f"{short_label(item)}: {problem}" for problem in window.problems]
            faults += [f"before {short_label(item)}: {problem}" for problem in evidence.between(item)]
            for server, count in evidence.elsewhere(item).items():
                unknown |= count is None
                faults += [f"{short_label(item)}: not sent to {server}, which counted {count} tokens"] if count else []
            sent = evidence.sent(item)
            # A failed request may or may not have been counted.
            if window.prompt_tokens is None or any(request.status != "ok" for request in sent):
                unknown = True
                continue
            client = sum(request.prompt_tokens for request in sent)
            if client != window.prompt_tokens:
                faults.append(f"{short_label(item)}: client sent {client}, the engine counted {window.prompt_tokens}")
        if faults:
            found.decide(False, expected, "; ".join(faults), workload)
        elif unknown:
            found.skip(expected, "prompt tokens are unknown in at least one pass", workload)
        else:
            found.decide(True, expected, "they are equal in every pass", workload)
    return found.results
