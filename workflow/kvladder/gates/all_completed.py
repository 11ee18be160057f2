"""Every request came back whole: no error, all tokens asked for, and the prompt that was sent.

Protects from means over the requests that happened to survive, from streams that end early and count as success
(inference-perf#655, PR#746), and from servers that prepend or cut tokens. Evidence: the client's own records; the
server's ``usage`` where it sends one. Tolerance: none.
"""

from __future__ import annotations

from kvladder.config.records import GateResult, PassRecord, RequestRecord
from kvladder.gates.base import Evidence, Findings, short_label

REQUIRED = True


def check(evidence: Evidence) -> list[GateResult]:
    """One result a workload."""
    found = Findings(__name__, REQUIRED, "requests.jsonl")
    for workload in evidence.served:
        passes = [item for item in evidence.trial.passes if item.workload == workload]
        planned = sum(item.requests for item in passes)
        if not planned:
            found.unreadable("all requests complete", "no request was sent", workload)
            continue
        faults = [fault for item in passes for fault in _faults(item, evidence.sent(item))]
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        seen = f"{faults[0]}{more}" if faults else f"{planned} requests complete"
        found.decide(not faults, f"{planned} requests complete, with all tokens asked for", seen, workload)
    return found.results


def _faults(item: PassRecord, sent: list[RequestRecord]) -> list[str]:
    where = short_label(item)
    # By index: a record that is there twice hides one that is missing.
    recorded = len({request.index for request in sent}) if len(sent) == item.requests else len(sent)
    faults = [f"{where}: {recorded} of {item.requests} requests recorded"] if recorded != item.requests else []
    for request in sent:
        what = _fault(request)
        if what is not None:
            faults.append(f"{where} request {request.index}: {what}")
    return faults


def _fault(request: RequestRecord) -> str | None:
    if request.status != "ok":
        return request.error or "failed"
    if request.output_tokens != request.asked_tokens:
        return f"{request.output_tokens} of {request.asked_tokens} tokens"
    if request.usage_prompt_tokens not in (None, request.prompt_tokens):
        return f"prompt of {request.prompt_tokens} tokens, the server says {request.usage_prompt_tokens}"
    times = (request.send_ns, request.first_token_ns, request.end_ns)
    if None in times or list(times) != sorted(time for time in times if time is not None):
        return "sent, first token and end are no times in this order"
    return None
