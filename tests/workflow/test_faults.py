"""Engines that misbehave, each as a setup of one experiment: no bad number becomes a valid one, and the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import Project, clone

PLAIN, NATIVE = {"kind": "plain"}, {"kind": "native", "cpu_bytes": "4MiB"}


def faulty(setup: dict[str, Any], fault: str) -> dict[str, Any]:
    """A setup whose engine has a fault."""
    return {**setup, "env": {"KVLADDER_STUB_FAULT": fault}}


SETUPS = {
    "good": PLAIN,
    "good-tier": NATIVE,
    "crash-at-start": faulty(PLAIN, "crash-at-start"),
    "crash-mid-pass": faulty(NATIVE, "crash-mid-pass:4"),
    "tier-ignored": faulty(NATIVE, "tier-ignored"),
    "warm-in-cold": faulty(NATIVE, "warm-in-cold"),
    "http-500": faulty(PLAIN, "http-500:3"),
    "short-output": faulty(PLAIN, "short-output:3"),
    "stall": faulty(PLAIN, "stall:3"),
    "hang-at-stop": faulty(PLAIN, "hang-at-stop"),
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each setup's verdict."""
    project: Project = clone(tmp_path_factory.mktemp("faults") / "clone")
    project.config(
        repeats=1,
        start="folded",
        baseline="good",
        setups=SETUPS,
        workloads={"repeat": {"kind": "repeat", "prompt_tokens": 513, "output_tokens": 4, "warm_passes": 2}},
        load={"quiet_s": 0.05, "drain_s": 2, "request_s": 10, "stall_s": 1.5},
    )
    done = project.snakemake("judge", "--cores", "2")
    assert done.code == 0, done.text
    paths: list[Path] = sorted((project.folder / "results/tiny/trials").glob("*/*/*/verdict.json"))
    return {path.parts[-4]: json.loads(path.read_text(encoding="utf-8")) for path in paths}


@pytest.mark.parametrize(
    ("setup", "status", "reason"),
    [
        ("good", "valid", None),
        ("good-tier", "valid", None),
        ("crash-at-start", "failed", "asked to crash at start"),
        ("crash-mid-pass", "failed", "asked to crash in the middle"),
        ("tier-ignored", "invalid", "tier-was-used"),
        ("warm-in-cold", "invalid", "cold-is-cold"),
        ("http-500", "failed", "500"),
        ("short-output", "failed", "2 of 4"),
        ("stall", "failed", "1.5 s"),
        ("hang-at-stop", "valid", None),
    ],
)
def test_verdict(verdicts: dict[str, dict[str, Any]], setup: str, status: str, reason: str | None) -> None:
    verdict = verdicts[setup]
    assert verdict["status"] == status, verdict["reason"]
    if reason is None:
        assert verdict["reason"] is None
    else:
        assert reason in verdict["reason"]
