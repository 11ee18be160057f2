"""The hit oracle against trials of a real engine whose host tier was a little smaller than its working set.

Recorded on vLLM 0.32.0's CPU build (host copier): twelve prompts of eight blocks through 92 chunks, one after the other
(`one`) and with four in flight (`four`). Of the pages only what says how much was hit is kept, of requests what they
were; the passes of right-kv, which came last, are left out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvladder.config import registry
from kvladder.gates.base import Evidence, measured, pass_label
from kvladder.stats.oracle import replay

DATA = Path(__file__).resolve().parents[1] / "data" / "trials" / "vllm-0.32.0"
TRIALS = sorted(path for path in DATA.iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", TRIALS, ids=lambda folder: folder.name)
def test_one_after_the_other_every_token_is_as_predicted(folder: Path) -> None:
    evidence = Evidence.load(folder)
    assert not evidence.broken
    partly = 0
    for item, window in evidence.passes("one"):
        each = evidence.predicted(item)
        assert each is not None and each.exact
        assert measured(window) == each.total, pass_label(item)
        partly += 0 < each.total < each.ceiling_total
    assert partly >= 1, "a recording in which nothing is lost, or everything, shows little"


@pytest.mark.parametrize("folder", TRIALS, ids=lambda folder: folder.name)
def test_with_four_in_flight_within_the_tolerance(folder: Path) -> None:
    evidence = Evidence.load(folder)
    for gate in ("hits-as-predicted", "tier-was-used"):
        results = [result for result in registry.load("gates", gate).check(evidence) if "stored" not in result.expected]
        assert {result.decision for result in results} == {"pass"}, gate
        assert {result.workload for result in results} == {"one", "four"}
    (four,) = [
        result for result in registry.load("gates", "hits-as-predicted").check(evidence) if result.workload == "four"
    ]
    assert four.required


def test_the_wrong_policy_does_not_explain_a_recording() -> None:
    """The tests above can fail: replayed with head-first eviction, an LRU predicts something else."""
    evidence = Evidence.load(DATA / "native-lru-92-of-96")
    assert evidence.prediction is not None
    right = evidence.prediction.hierarchy
    assert right.host is not None
    wrong = replace(right, host=replace(right.host, order="head-first"))
    first, other = (
        sum(hit["cpu"] for hit in replay(evidence.prediction.sequence, each).hits) for each in (right, wrong)
    )
    assert first != other
