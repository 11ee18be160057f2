"""Loaded KV is the KV that was stored: a hit answers as the same prompt computed does.

Protects from fast and wrong: LMCache on vLLM from 0.26 on reported to return wrong KV silently (LMCache#4463, #4247),
dynamo#14416, vllm#31210, vLLM PR#46278; one real setup is wrong at its first hit after the store and right at later
ones, so first and later hits are judged apart. Evidence: the log probabilities of the ``right-kv`` passes at the first
generated position, before a near tie can flip a token and change all that follows; the same of the block's
``prefix-cache`` setup, whose hits are not bit-equal to computing either, because what is left of the prompt is computed
in another batch shape. Tolerance: ``gates.right_kv_factor`` times the largest deviation of the control's own hits, or
``gates.right_kv_floor`` where that is more; one prompt beyond it is wrong KV.

Two blocks of a prompt in each other's place don't show, and do no harm: keys carry their position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal

from kvladder.config.records import GateResult, HitDeviation, RequestRecord
from kvladder.config.traffic import RIGHT_KV
from kvladder.gates.base import HITS, Evidence, Findings, TrialKey
from kvladder.stats.logprobs import deviation, greedy

REQUIRED = True

PROMPTS = 8
"""Fewer are no evidence."""

SOURCE = f"{RIGHT_KV}.requests.jsonl: log probabilities at the first generated position"
EXPECTED = "hits answer as computing does"
HIT_PASSES: tuple[Literal["first-hit", "warm"], ...] = ("first-hit", "warm")

Answers = Mapping[str, Mapping[str, float]]
"""Log probabilities by token, at the first generated position, by the prompt's key."""


def check(evidence: Evidence) -> list[GateResult]:
    """Why the trial alone can't be judged; nothing where its block decides."""
    found = Findings(__name__, REQUIRED, SOURCE)
    why = _not_applicable(evidence)
    lacking = None if why is not None else _lacking(evidence)
    if why is not None:
        found.skip(EXPECTED, why)
    elif lacking is not None:
        found.unreadable(EXPECTED, lacking)
    return found.results


def check_block(evidences: Sequence[Evidence]) -> dict[TrialKey, list[GateResult]]:
    """Of each trial that loads KV one result for first hits and one for later ones."""
    results: dict[TrialKey, list[GateResult]] = {item.key: [] for item in evidences}
    judged = [item for item in evidences if _judged(item)]
    for item in judged:
        found = Findings(__name__, REQUIRED, f"{SOURCE}, and those of the block's prefix-cache")
        controls = _controls(item, judged)
        if not controls:
            found.skip(EXPECTED, "no valid prefix-cache with such a pass in this block: nothing to measure against")
        else:
            _decide(found, item, controls)
        results[item.key] = found.results
    return results


def deviations(evidences: Sequence[Evidence]) -> dict[TrialKey, list[HitDeviation]]:
    """The numbers behind `check_block`: by trial that loads KV one entry a hit pass."""
    judged = [item for item in evidences if _judged(item)]
    return {item.key: _of_trial(item, _controls(item, judged)) for item in judged}


def _not_applicable(evidence: Evidence) -> str | None:
    """Why this trial needs no check, or can't have one."""
    if evidence.setup.tier is None:
        return "this setup has no tier"
    if evidence.trial.config.get("right_kv") is None:
        return "measured without a right-kv pass"
    if evidence.trial.config.get("model", {}).get("weights") == "dummy":
        return "dummy weights are no evidence: their output depends on the last token alone"
    block = evidence.trial.effective.block_size
    lengths = {request.prompt_tokens for request in evidence.requests.get(RIGHT_KV, [])}
    if block is not None and lengths and not any(evidence.setup.expected_hit(length, block) for length in lengths):
        return f"not measurable: prompts shorter than what a hit comes in ({evidence.setup.granularity(block)} tokens)"
    return None


def _lacking(evidence: Evidence) -> str | None:
    """What is missing of the evidence that a finished trial has."""
    passes, asked = evidence.passes(RIGHT_KV), evidence.trial.config["right_kv"]
    prompts, top = max(PROMPTS, asked.get("prompts", 0)), asked.get("top", 1)
    for name in ("cold", *HIT_PASSES):
        sent = [request for item, _ in passes if item.name == name for request in evidence.sent(item)]
        usable = len({request.key for request in sent if _is_usable(request, top)})
        if usable < max(prompts, len(sent)):
            return f"{name}: {usable} of {max(prompts, len(sent))} prompts answered with log probabilities"
    for item, window in passes:
        tier = evidence.setup.hit_tier(item.name)
        # Not every engine says which tier a hit came from; where it says nothing at all, tier-was-used does.
        if item.name in HIT_PASSES and tier is not None and not any(map(window.by_source.get, (tier, "unknown"))):
            return f"{item.name}: no hit in {tier}, so nothing that was loaded"
    return None


def _is_usable(request: RequestRecord, top: int) -> bool:
    """Whether a request came back with all the log probabilities that were asked for: a shorter list hides tokens."""
    first = request.logprobs[0] if request.logprobs else {}
    return request.status == "ok" and len(first) >= top and all(map(math.isfinite, first.values()))


def _judged(evidence: Evidence) -> bool:
    return _not_applicable(evidence) is None and _lacking(evidence) is None


def _controls(item: Evidence, judged: Sequence[Evidence]) -> list[Evidence]:
    """What a trial is measured against: hits of the device prefix cache on the same prompts."""
    asked = item.trial.config["right_kv"]
    return [each for each in judged if each.setup.tier == "gpu" and each.trial.config["right_kv"] == asked]


def _answers(evidence: Evidence, name: str) -> Answers:
    def first(request: RequestRecord) -> Mapping[str, float]:
        return request.logprobs[0] if request.logprobs else {}

    sent = (evidence.sent(item) for item, _ in evidence.passes(RIGHT_KV, name))
    return {request.key: first(request) for requests in sent for request in requests}


def _of_trial(item: Evidence, controls: Sequence[Evidence]) -> list[HitDeviation]:
    limit = _limit(item, controls)
    cold = _answers(item, "cold")
    others = [_answers(control, name) for control in controls for name in HIT_PASSES]
    # Where computing gave something else than the control's, a hit that agrees with it agrees with something wrong.
    computed = {key: _from_controls(key, answer, controls) for key, answer in cold.items()}
    found = []
    for name in HIT_PASSES:
        hits = _answers(item, name)
        away = {key: deviation(cold[key], hit) for key, hit in hits.items() if key in cold}
        beyond = None if limit is None else sum(max(away[key], computed[key]) > limit for key in away)
        if not beyond and _computed_instead(item, name) is not None:
            beyond = None
        found.append(
            HitDeviation(
                name=name,
                prompts=len(away),
                median=median(away.values()),
                largest=max(away.values()),
                limit=limit,
                beyond=beyond,
                flipped=sum(greedy(cold[key]) != greedy(hits[key]) for key in away),
                equal=sum(any(hits[key] == other.get(key) for other in others) for key in hits) if others else None,
            )
        )
    return found


def _spread(controls: Sequence[Evidence]) -> float:
    """The largest deviation of any hit of the controls."""
    return max(part.largest for control in controls for part in _of_trial(control, ()))


def _limit(item: Evidence, controls: Sequence[Evidence]) -> float | None:
    """How far a hit may be; None without a control, or one that is no measure."""
    spread = _spread(controls) if controls else None
    if spread is None or spread > item.config.right_kv_control:
        return None
    return max(item.config.right_kv_factor * spread, item.config.right_kv_floor)


def _from_controls(key: str, answer: Mapping[str, float], controls: Sequence[Evidence]) -> float:
    """How far a prompt's cold answer is from the controls'; 0 where there is none."""
    theirs = [_answers(control, "cold").get(key) for control in controls]
    return max((deviation(answer, other) for other in theirs if other is not None), default=0.0)


def _decide(found: Findings, item: Evidence, controls: Sequence[Evidence]) -> None:
    limit = _limit(item, controls)
    if limit is None:
        spread, most = _spread(controls), item.config.right_kv_control
        found.unreadable(EXPECTED, f"hits of prefix-cache itself are {spread:.3f} off, more than {most:g}: no measure")
        return
    computed = max(_from_controls(key, answer, controls) for key, answer in _answers(item, "cold").items())
    if computed > limit:
        found.decide(
            False, f"computed as prefix-cache does, within {limit:.3f}", f"its cold pass is {computed:.3f} off"
        )
        return
    for part in _of_trial(item, controls):
        hits = "first hits" if part.name == "first-hit" else "later hits"
        seen = (
            f"{hits}: {part.beyond or 0} of {part.prompts} prompts beyond, largest {part.largest:.3f}, "
            f"median {part.median:.3f}; greedy token flipped in {part.flipped}, equal to prefix-cache in {part.equal}"
        )
        expected = f"{hits} within {limit:.3f} of the cold pass (log probability)"
        if part.beyond is None:
            found.skip(expected, f"{_computed_instead(item, part.name)}; {seen}")
        else:
            found.decide(not part.beyond, expected, seen)


def _computed_instead(item: Evidence, name: str) -> str | None:
    """That not every prompt of a hit pass was loaded, in words: one that was computed agrees with computing it.

    Less than one prompt's tokens may be missing in all: an engine may note a prompt's last block too late to store it.
    """
    block = item.trial.effective.block_size
    if block is None:
        return "nobody knows how many tokens were to be loaded: the engine did not report its block size"
    for each, window in item.passes(RIGHT_KV, name):
        hit = sum(window.by_source.get(tier) or 0 for tier in HITS)
        wanted = [item.setup.expected_hit(request.prompt_tokens, block) for request in item.sent(each)]
        if sum(wanted) - hit >= min(wanted):
            return f"{hit} of {sum(wanted)} tokens were loaded, the rest computed"
    return None
