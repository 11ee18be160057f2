"""Gates across a block: the odd one out is invalid, and nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from trial_factory import Load, write_trial

from kvladder.config import registry
from kvladder.gates.base import COULD_NOT, Evidence, majority

NAMES = ("plain", "prefix-cache", "native-host")
GATES = ("equal-kv-pool", "equal-token-totals", "one-host-block")


def block(root: Path, **odd: Any) -> list[Evidence]:
    """Three trials, the last with these differences."""
    folders = [write_trial(root, setup=name) for name in NAMES[:-1]]
    return [Evidence.load(folder) for folder in (*folders, write_trial(root, setup=NAMES[-1], **odd))]


def decisions(gate: str, evidences: Sequence[Evidence]) -> dict[str, str]:
    found = registry.load("gates", gate).check_block(evidences)
    return {setup: result.decision for (setup, _), (result,) in found.items()}


def seen(gate: str, evidences: Sequence[Evidence], setup: str) -> str:
    found = registry.load("gates", gate).check_block(evidences)
    return next(str(results[0].seen) for (name, _), results in found.items() if name == setup)


@pytest.mark.parametrize("gate", GATES)
def test_equal_trials_pass(tmp_path: Path, gate: str) -> None:
    assert set(decisions(gate, block(tmp_path)).values()) == {"pass"}


@pytest.mark.parametrize(
    ("pool", "decision"), [(40_960 + 127, "pass"), (40_960 + 128, "fail"), (35_000, "fail"), (None, "not-checked")]
)
def test_pool_of_another_size(tmp_path: Path, pool: int | None, decision: str) -> None:
    evidences = block(tmp_path, edit_trial=lambda data: data["effective"].update(kv_pool_tokens=pool))
    assert decisions("equal-kv-pool", evidences) == {"plain": "pass", "prefix-cache": "pass", "native-host": decision}
    if pool is None:
        assert seen("equal-kv-pool", evidences, "native-host").startswith(COULD_NOT)


def test_two_pools_without_a_majority_fail_both(tmp_path: Path) -> None:
    evidences = block(tmp_path, edit_trial=lambda data: data["effective"].update(kv_pool_tokens=1280))[1:]
    assert set(decisions("equal-kv-pool", evidences).values()) == {"fail"}
    assert seen("equal-kv-pool", evidences, "prefix-cache") == "prefix-cache 40960, native-host 1280 tokens"


def test_setup_that_got_less_work(tmp_path: Path) -> None:
    fewer = {"repeat": Load(), "burst": Load(requests=3, concurrency=3)}
    evidences = block(tmp_path, workloads=fewer)
    expected = {"plain": "pass", "prefix-cache": "pass", "native-host": "fail"}
    assert decisions("equal-token-totals", evidences) == expected
    assert seen("equal-token-totals", evidences, "native-host") == "3 requests, 9000 prompt and 12 output tokens"


def test_block_over_two_hosts(tmp_path: Path) -> None:
    evidences = block(tmp_path, host_id="host-b")
    assert set(decisions("one-host-block", evidences).values()) == {"fail"}


def test_block_with_a_host_that_is_unknown(tmp_path: Path) -> None:
    evidences = block(tmp_path, host_id="unknown")
    known = {"plain": "pass", "prefix-cache": "pass"}
    assert decisions("one-host-block", evidences) == {**known, "native-host": "not-checked"}
    assert seen("one-host-block", evidences, "native-host").startswith(COULD_NOT)
    nobody = [Evidence.load(write_trial(tmp_path / "all", setup=name, host_id="unknown")) for name in NAMES]
    assert set(decisions("one-host-block", nobody).values()) == {"not-checked"}


@pytest.mark.parametrize(
    ("values", "most"),
    [([1, 1, 2], 1), ([1, 2], None), ([1, 1, 2, 2], None), ([[1], [1]], [1]), ([{"a": 1}], {"a": 1})],
)
def test_majority(values: list[Any], most: Any) -> None:
    assert majority({(str(place), "run"): value for place, value in enumerate(values)}) == most
