"""All setups of a block got the same work: requests, prompt tokens and output tokens, pass by pass.

Protects from unfair comparisons published in good faith: different token counts. Evidence: the client's records.
Tolerance: none. The odd one out is invalid; with no majority all are.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvladder.config.records import GateResult
from kvladder.gates.base import Evidence, Findings, TrialKey, majority

REQUIRED = True

Totals = dict[str, list[int]]


def check_block(evidences: Sequence[Evidence]) -> dict[TrialKey, list[GateResult]]:
    """One result a trial."""
    totals = {item.key: _totals(item) for item in evidences}
    usual: Totals | None = majority(totals) if totals else None
    results = {}
    for item in evidences:
        found = Findings(__name__, REQUIRED, "requests.jsonl of the block's trials")
        mine = totals[item.key]
        if usual is None:
            others = "; ".join(f"{key[0]}: {_text(_sum(value))}" for key, value in totals.items())
            found.decide(False, "the same work in all setups", others)
        elif mine == usual:
            found.decide(True, f"{_text(_sum(usual))}, as most setups", "the same")
        else:
            odd = next(label for label in {**usual, **mine} if usual.get(label) != mine.get(label))
            found.decide(False, f"{odd}: {_text(usual.get(odd))}, as most setups", _text(mine.get(odd)))
        results[item.key] = found.results
    return results


def _totals(evidence: Evidence) -> Totals:
    totals: Totals = {}
    for workload in evidence.workloads:
        for request in evidence.requests[workload]:
            total = totals.setdefault(f"{workload}/{request.pass_name}/{request.round}", [0, 0, 0])
            for place, value in enumerate((1, request.prompt_tokens, request.output_tokens or 0)):
                total[place] += value
    return totals


def _sum(totals: Totals) -> list[int]:
    return [sum(values) for values in zip(*totals.values(), strict=True)]


def _text(total: list[int] | None) -> str:
    return f"{total[0]} requests, {total[1]} prompt and {total[2]} output tokens" if total else "no request"
