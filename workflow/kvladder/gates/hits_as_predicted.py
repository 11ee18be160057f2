"""Every pass hit what tiers of the configured capacity must give, no less and no more.

Protects from a tier that is smaller or larger than configured (llm-d-benchmark's key that no template reads, a capacity
that counts ranks twice), from a pool that engines are said to share and don't, or share and aren't said to, from a
working set that doesn't fit, so that an LRU loses nearly all of it and the "warm" numbers are a recomputation, and from
an eviction policy that isn't the one asked for. Evidence: prompt tokens by source of every pass against the hit oracle,
which replays the trial's own requests (`kvladder.replay`). Tolerance: none where nothing was evicted or the order of
everything is known; else `kvladder.replay.TOLERANCE` of the pass's prompt tokens beyond what two orders of its requests
give. Advisory where an engine's evictions can't be known from outside (LMCache, Mooncake, SimpleCPUOffloadConnector,
and vLLM before 0.32).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from kvladder.config.records import GateResult, HitPrediction, WindowTokens
from kvladder.gates.base import HITS, Evidence, Findings, PredictedPass, Unreadable, measured, short_label, tokens
from kvladder.replay import PassPrediction, Prediction

REQUIRED = True


def check(evidence: Evidence) -> list[GateResult]:
    """One result a workload; one on a pass whose evictions can't be known is advisory."""
    source = "counters.jsonl: prompt tokens by source of every pass; requests.jsonl, replayed"
    # Replaying at many capacities takes seconds, and serves all workloads.
    fits = cache(lambda: _fits(evidence))
    firm, rough = Findings(__name__, REQUIRED, source), Findings(__name__, False, source)
    expected = "hits as tiers of this capacity give them"
    for workload in evidence.served:
        if evidence.setup.tier is None:
            firm.skip(expected, "this setup has no tier", workload)
        elif evidence.prediction is None:
            firm.skip(expected, "the engine did not report its block size", workload)
        elif unbounded := _unbounded(evidence.prediction):
            firm.skip(expected, f"the capacity of {unbounded} is unknown", workload)
        else:
            # That nothing is hit where nothing can be is for cold-is-cold to say; but for an engine that did not store.
            passes = [
                found for found in evidence.predicted_passes(workload) if found[2].ceiling_total or found[0].engine
            ]
            results = firm if all(each.known for _, _, each in passes) else rough
            _compare(results, evidence.prediction, workload, passes, fits)
    return [*firm.results, *rough.results]


def predictions(evidence: Evidence) -> list[HitPrediction]:
    """What the table ``oracle`` shows, made here because replaying a trial takes longer than all its tables do.

    Empty for a setup without a tier, and for a trial that can't be replayed.
    """
    try:
        if evidence.setup.tier is None or evidence.prediction is None:
            return []
    except Unreadable:
        return []
    made, capacity = [], evidence.prediction.capacity_tokens()
    for item, window in zip(evidence.trial.passes, evidence.windows, strict=True):
        each = evidence.predicted(item)
        if each is None or item.workload not in evidence.workloads:
            continue
        made.append(
            HitPrediction(
                workload=item.workload,
                name=item.name,
                round=item.round,
                prompt_tokens=each.prompt_tokens,
                working_set=each.working_set,
                capacity=capacity,
                hits=each.hits,
                ceiling=each.ceiling_total,
                exact=each.exact,
                known=each.known,
                wrong=deviation(each, window),
                thrash=thrash(evidence.prediction, each),
            )
        )
    return made


def _unbounded(prediction: Prediction) -> str | None:
    """A tier that can evict, of which nobody knows when."""
    return next((tier.name for tier in prediction.hierarchy.tiers if tier.capacity is None), None)


def _compare(
    found: Findings, prediction: Prediction, workload: str, passes: list[PredictedPass], fits: Callable[[], str]
) -> None:
    total = sum(each.total for _, _, each in passes)
    expected = f"{total} hit tokens in {len(passes)} passes"
    if not passes:
        found.skip(expected, "no prompt shares a whole block with one that was sent before", workload)
        return
    for item, window, each in passes:
        wrong = deviation(each, window)
        if wrong is not None:
            seen = f"{short_label(item)}: {tokens(window.by_source)} hit"
            found.decide(False, f"{short_label(item)}: {wrong}", f"{seen}{fits()}", workload)
            return
    missing = next((short_label(item) for item, window, _ in passes if measured(window) is None), None)
    if missing is not None:
        found.skip(expected, f"the engine's token counters are missing in {missing}", workload)
        return
    seen = f"{sum(measured(window) or 0 for _, window, _ in passes)} hit tokens"
    said = next((text for _, _, each in passes if (text := thrash(prediction, each)) is not None), None)
    found.decide(True, expected, seen if said is None else f"{seen}; {said}", workload)


def deviation(each: PassPrediction, window: WindowTokens) -> str | None:
    """What was predicted, where the counters say something else; None where they agree or are silent."""
    checks: list[tuple[str | None, int | None]] = [(None, measured(window))]
    # Where the engine doesn't say which tier it was, all that can be compared is the sum.
    if not window.by_source.get("unknown"):
        checks += [(tier, window.by_source.get(tier)) for tier in HITS]
    for tier, got in checks:
        least, most = each.allowed(tier)
        if got is not None and not least <= got <= most:
            wanted = (
                tokens(each.hits, each.hits)
                if each.exact
                else f"{least}–{most} tokens{f' from {tier}' if tier else ''}"
            )
            return f"{wanted} hit"
    return None


def thrash(prediction: Prediction, each: PassPrediction) -> str | None:
    """That a pass can't hit what it asks for, in words; None where it can, or there is nothing to hit."""
    if not each.ceiling_total or not each.thrashes:
        return None
    held = ", ".join(f"{name} holds {size}" for name, size in prediction.capacity_tokens().items() if size is not None)
    policy = next((tier.policy.upper() for tier in reversed(prediction.hierarchy.tiers)), "LRU")
    return f"thrash: working set {each.working_set} tokens, {held}; {policy} predicted {each.total} hits"


def _fits(evidence: Evidence) -> str:
    """The capacity that would explain what was measured, where one does so clearly better than the configured one."""
    hits = [measured(window) for window in evidence.windows]
    known = [value for value in hits if value is not None]
    prediction = evidence.prediction
    if prediction is None or len(known) < len(hits):
        return ""
    configured = prediction.capacity_tokens()
    found = prediction.fitting_capacity(known)
    return "".join(
        f"; hits fit a capacity of {size} tokens in {tier}, configured {configured[tier]}"
        for tier, size in found.items()
    )
