"""Nothing is hit in the cold pass: every prompt token is computed. Nor is anything in a mixed pass that it didn't send.

Protects from a warm cache measured by accident: a fixed seed with prefix caching (vllm#54227, 49× TTFT), workers that
share a seed (inference-perf PR#340, 92.9 % hits on "random" data), a warm-up with the first measured prompt, a
persistent tier of an earlier run, a reset that does not reset (vllm#57727, llm-d-benchmark#1100, LMCache PR#4993).
Evidence: prompt tokens by source over each cold pass. A mixed pass has no cold part of its own: its hits are held
against what tiers without limits would give for what the trial itself had sent. Tolerance: none.
"""

from __future__ import annotations

from kvladder.config.records import GateResult
from kvladder.gates.base import HITS, Evidence, Findings, measured, tokens

REQUIRED = True


def check(evidence: Evidence) -> list[GateResult]:
    """One result a workload."""
    found = Findings(__name__, REQUIRED, "counters.jsonl: prompt tokens by source over the cold pass")
    for workload in evidence.served:
        windows = [window for _, window in evidence.passes(workload, "cold")]
        if not windows and evidence.passes(workload, "mixed"):
            _mixed(found, evidence, workload)
            continue
        expected = "0 tokens hit in any tier"
        hits = [window.by_source.get(tier) for window in windows for tier in HITS]
        if not windows:
            found.unreadable(expected, "there is no cold pass", workload)
        elif any(hits):
            found.decide(False, expected, "; ".join(tokens(window.by_source) for window in windows), workload)
        elif None in hits or any(window.prompt_tokens is None for window in windows):
            problems = "; ".join(problem for window in windows for problem in window.problems)
            found.unreadable(expected, problems or "the engine's token counters are missing", workload)
        else:
            computed = sum(window.by_source.get("computed") or 0 for window in windows)
            found.decide(True, expected, f"0 hit, {computed} computed", workload)
    return found.results


def _mixed(found: Findings, evidence: Evidence, workload: str) -> None:
    """No more hits than the trial's own requests can have left, whatever the tiers hold."""
    passes = evidence.predicted_passes(workload, "mixed")
    most = sum(each.ceiling_total for _, _, each in passes)
    hits = [measured(window) for _, window, _ in passes]
    total = sum(hit or 0 for hit in hits)
    expected = f"at most {most} tokens hit: what the trial had sent before"
    if not passes:
        found.unreadable("no hit on what was never sent", "the engine did not report its block size", workload)
    elif None in hits:
        found.unreadable(expected, "the engine's token counters are missing", workload)
    else:
        found.decide(total <= most, expected, f"{total} hit", workload)
