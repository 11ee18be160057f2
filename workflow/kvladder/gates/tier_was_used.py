"""The setup's tier gave the tokens it should have given, and bytes moved that fit them.

Protects from a tier that is silently unused, so that the "warm" numbers are a recomputation or a hit elsewhere
(LMCache#1109, #2334, #2535, #2876), from hash seeds that differ between processes (LMCache#1095, #1139, #2136, #2979;
vllm#42625) and from counters that claim what was never loaded (LMCache#2912). Evidence: of each pass after the cold
one, the engine's prompt tokens by source, and bytes from a counter that is independent of it. Tolerance: tokens none
(a prompt hits in whole blocks, so the number is known); bytes ``gates.load_tolerance``, by default 10 %.
"""

from __future__ import annotations

from kvladder.config.records import GateResult, PassRecord, WindowTokens
from kvladder.gates.base import Evidence, Findings, short_label, tokens

REQUIRED = True


def check(evidence: Evidence) -> list[GateResult]:
    """A workload has a result for tokens, one for stored and one for loaded bytes."""
    found = Findings(
        __name__, REQUIRED, "counters.jsonl: tokens by source and bytes over the passes after the cold one"
    )
    tier = evidence.setup.tier
    for workload in evidence.workloads:
        pairs = evidence.passes(workload, "first-hit", "warm")
        if tier is None:
            found.skip("hits in a tier", "this setup has no tier", workload)
        elif not pairs:
            found.skip(f"hits in {tier}", "the workload has no pass after the cold one", workload)
        elif _tokens(found, evidence, workload, tier, pairs) and tier != "gpu":
            _stored(found, evidence, workload)
            _loaded(found, evidence, workload, pairs)
    return found.results


def _hits(evidence: Evidence, item: PassRecord, block: int) -> list[int]:
    return [
        evidence.setup.expected_hit(request.prompt_tokens, block)
        for request in evidence.sent(item)
        if request.status == "ok"
    ]


def _tokens(
    found: Findings, evidence: Evidence, workload: str, tier: str, pairs: list[tuple[PassRecord, WindowTokens]]
) -> bool:
    """Compare tokens, pass by pass; the worst pass is reported. Returns whether the tier was measurable at all."""
    block = evidence.trial.effective.block_size
    if block is None:
        found.unreadable(f"hits in {tier}", "the engine did not report its block size", workload)
        return False
    expected = [sum(_hits(evidence, item, block)) for item, _ in pairs]
    tiers = [evidence.setup.hit_tier(item.name) or tier for item, _ in pairs]
    seen = [window.by_source.get(source) for source, (_, window) in zip(tiers, pairs, strict=True)]
    if not any(expected) and not any(seen):
        unit = evidence.setup.granularity(block)
        found.skip(f"hits in {tier}", f"not measurable: prompt shorter than one block ({unit} tokens)", workload)
        return False
    total = f"{sum(expected)} tokens from {' and '.join(dict.fromkeys(tiers))} in {len(pairs)} passes"
    for (item, window), source, wanted, got in zip(pairs, tiers, expected, seen, strict=True):
        if got is not None and got != wanted:
            where = f"{short_label(item)}: {tokens(window.by_source, window.by_source)}"
            found.decide(False, f"{wanted} tokens from {source}", where, workload)
            return True
    if None in seen:
        missing = short_label(pairs[seen.index(None)][0])
        found.unreadable(total, f"the engine's token counters are missing in {missing}", workload)
    else:
        found.decide(True, total, total, workload)
    return True


def _stored(found: Findings, evidence: Evidence, workload: str) -> None:
    """Something must have been stored since the trial began: a full cold pass of it."""
    stored = [window.stored_bytes for _, window in evidence.passes(workload)]
    known = [value for value in stored if value is not None]
    if sum(known) > 0:
        found.decide(True, "stored bytes above 0", f"{sum(known)} B stored", workload)
    elif known and stored[0] is not None:
        found.decide(False, "stored bytes above 0", "0 B stored", workload)
    else:
        found.skip("stored bytes above 0", "no counter of stored bytes", workload)


def _loaded(found: Findings, evidence: Evidence, workload: str, pairs: list[tuple[PassRecord, WindowTokens]]) -> None:
    per_token = evidence.trial.expected.get("kv_bytes_per_token")
    tolerance = evidence.config.load_tolerance
    block = evidence.trial.effective.block_size
    loaded = [window.loaded_bytes for _, window in pairs]
    text = f"loaded bytes within {tolerance:.0%} of hit tokens × bytes per token"
    if per_token is None or block is None:
        found.skip(text, "bytes per token are unknown for this model", workload)
        return
    if None in loaded:
        found.skip(text, "no counter of loaded bytes that is independent of the tokens", workload)
        return
    for (item, _), got in zip(pairs, loaded, strict=True):
        wanted = sum(_hits(evidence, item, block)) * per_token
        if abs((got or 0) - wanted) > tolerance * wanted:
            found.decide(False, f"{wanted} B loaded ± {tolerance:.0%}", f"{short_label(item)}: {got} B", workload)
            return
    found.decide(True, text, f"{sum(value or 0 for value in loaded)} B loaded", workload)
