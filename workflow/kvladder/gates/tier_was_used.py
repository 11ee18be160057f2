"""The setup's tier gave the tokens it should have given, and bytes moved that fit them.

Protects from a tier that is silently unused, so that the "warm" numbers are a recomputation or a hit elsewhere
(LMCache#1109, #2334, #2535, #2876), from hash seeds that differ between processes (LMCache#1095, #1139, #2136, #2979;
vllm#42625) and from counters that claim what was never loaded (LMCache#2912). Evidence: of each pass after the cold
one, the engine's prompt tokens by source, and bytes from a counter that is independent of it. What a tier must give is
the hit oracle's answer: each prompt whole where the tier holds what was sent, less where it is smaller. Tolerance:
tokens none (a prompt hits in whole blocks, so the number is known), where evictions depend on what happened at the same
time `kvladder.replay.TOLERANCE` of the prompt tokens; bytes ``gates.load_tolerance``, by default 10 %. Where nobody
knows what an engine evicts, any number is left open but two: no hit at all, and more than a tier without limits has.
Where the engine doesn't tell a setup's tiers apart, all hits together are held against all that were expected: too few
or too many fail, the right number leaves open which tier they came from.
"""

from __future__ import annotations

from kvladder.config.records import GateResult
from kvladder.gates.base import HITS, Evidence, Findings, PredictedPass, measured, short_label, tokens
from kvladder.replay import PassPrediction

REQUIRED = True

BELOW = tuple(tier for tier in HITS if tier != "gpu")
"""Sources whose tokens were loaded onto the device."""


def check(evidence: Evidence) -> list[GateResult]:
    """A workload has a result for tokens, one for stored and one for loaded bytes."""
    found = Findings(
        __name__, REQUIRED, "counters.jsonl: tokens by source and bytes over the passes after the cold one"
    )
    tier = evidence.setup.tier
    for workload in evidence.served:
        names = ("first-hit", "warm", "mixed")
        if tier is None:
            found.skip("hits in a tier", "this setup has no tier", workload)
        elif not evidence.passes(workload, *names):
            found.skip(f"hits in {tier}", "the workload has no pass after the cold one", workload)
        elif not (passes := evidence.predicted_passes(workload, *names)):
            found.unreadable(f"hits in {tier}", "the engine did not report its block size", workload)
        elif _tokens(found, evidence, workload, tier, passes) and tier != "gpu":
            _stored(found, evidence, workload)
            _loaded(found, evidence, workload, passes)
    return found.results


def _tokens(found: Findings, evidence: Evidence, workload: str, tier: str, passes: list[PredictedPass]) -> bool:
    """Compare tokens, pass by pass; the worst pass is reported. Returns whether the tier was measurable at all."""
    tiers = [_source(evidence.setup.hit_tier(item.name) or tier, each) for item, _, each in passes]
    places = [
        None if window.by_source.get("unknown") else source
        for source, (_, window, _) in zip(tiers, passes, strict=True)
    ]
    seen = [measured(window, place) for place, (_, window, _) in zip(places, passes, strict=True)]
    expected = [
        each.total if place is None else each.hits.get(place, 0)
        for place, (_, _, each) in zip(places, passes, strict=True)
    ]
    if not any(expected) and not any(seen):
        unit = evidence.setup.granularity(evidence.trial.effective.block_size or 1)
        why = f"prompt shorter than one block ({unit} tokens)"
        if any(each.ceiling_total for _, _, each in passes):
            why = f"what {tier} held was evicted before it was asked for again"
        found.skip(f"hits in {tier}", f"not measurable: {why}", workload)
        return False
    total = f"{sum(expected)} tokens from {' and '.join(dict.fromkeys(tiers))} in {len(passes)} passes"
    used = any(seen)
    for (item, window, each), place, got in zip(passes, places, seen, strict=True):
        # A tier that nobody has seen answering isn't measured, whatever its engine may have evicted.
        least, most = each.allowed(place) if each.known else (0 if used else min(each.total, 1), each.ceiling_total)
        if got is not None and not least <= got <= most:
            where = f"{short_label(item)}: {tokens(window.by_source, window.by_source)}"
            wanted = f"{least}" if each.exact else f"{least}–{most}"
            found.decide(False, f"{wanted} tokens from {place or 'all tiers'}", where, workload)
            return True
    got_tokens = [got for got in seen if got is not None]
    if len(got_tokens) < len(seen):
        missing = short_label(passes[seen.index(None)][0])
        found.unreadable(total, f"the engine's token counters are missing in {missing}", workload)
    elif any(
        not each.known and got != wanted for (_, _, each), got, wanted in zip(passes, seen, expected, strict=True)
    ):
        found.skip(
            total, f"{sum(got_tokens)} tokens; what {tier} evicts can't be known (see hits-as-predicted)", workload
        )
    elif None in places:
        found.skip(total, f"{sum(got_tokens)} tokens; this engine doesn't say which tier they came from", workload)
    else:
        found.decide(True, total, f"{sum(got_tokens)}{total.removeprefix(str(sum(expected)))}", workload)
    return True


def _source(tier: str, each: PassPrediction) -> str:
    """The tier that a pass is served from: the setup's own, or one below it where that has lost everything."""
    return tier if each.hits.get(tier) or not each.total else max(each.hits, key=lambda name: each.hits[name])


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


def _loaded(found: Findings, evidence: Evidence, workload: str, passes: list[PredictedPass]) -> None:
    per_token = evidence.trial.expected.get("kv_bytes_per_token")
    tolerance = evidence.config.load_tolerance
    loaded = [window.loaded_bytes for _, window, _ in passes]
    text = f"loaded bytes within {tolerance:.0%} of hit tokens × bytes per token"
    if per_token is None:
        found.skip(text, "bytes per token are unknown for this model", workload)
        return
    if None in loaded:
        found.skip(text, "no counter of loaded bytes that is independent of the tokens", workload)
        return
    for (item, window, each), got in zip(passes, loaded, strict=True):
        # Where evictions leave room for several answers, bytes are held against the tokens that were counted.
        hits = each.hits if each.exact else window.by_source
        wanted = sum(hits.get(tier) or 0 for tier in BELOW) * per_token
        if abs((got or 0) - wanted) > tolerance * wanted:
            found.decide(False, f"{wanted} B loaded ± {tolerance:.0%}", f"{short_label(item)}: {got} B", workload)
            return
    found.decide(True, text, f"{sum(value or 0 for value in loaded)} B loaded", workload)
