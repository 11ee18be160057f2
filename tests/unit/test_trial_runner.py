"""What becomes of a trial whose raw files can't be written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvladder.config.experiment import plan, validate
from kvladder.config.stack import StackConfig, StackStamp
from kvladder.trial import runner
from kvladder.trial.session import Job, Stack

CONFIG = validate(
    {
        "experiment": "tiny",
        "stack": "stub",
        "model": {"weights": "dummy", "shape": {"num_hidden_layers": 2}},
        "engine": {"max_model_len": 1024, "kv_pool_bytes": "1MiB"},
        "setups": {"plain": {"kind": "plain"}},
        "workloads": {"repeat": {"kind": "repeat", "prompt_tokens": 100}},
    }
)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job whose servers are nobody."""

    @contextlib.contextmanager
    def up(attempt: runner.Attempt) -> Iterator[None]:
        yield

    monkeypatch.setattr(runner.Attempt, "up", up)
    stack = StackConfig(python="any", device="none", engine="stub", engine_version="0")
    stamp = StackStamp(
        stack="stub",
        lock_sha256="",
        python="3.11",
        interpreter="python",
        source="preinstalled",
        packages={},
        patches={},
    )
    return Job(CONFIG, Stack(tmp_path, stack, stamp), tmp_path, lambda _: None)


def write_fails(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def measure(run: object, session: object) -> None:
        raise OSError(number, os.strerror(number), "repeat.requests.jsonl")

    monkeypatch.setattr(runner._Run, "measure", measure)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_how_the_trial_ended(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write_fails(monkeypatch, number)
    folder = tmp_path / "trial"
    runner.run_trial(job, plan(CONFIG)[0], folder)
    record = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    assert record["status"] == "failed"
    assert record["reason"] == f"the disk is full: {os.strerror(number)}: repeat.requests.jsonl"


def test_other_trouble_with_files_is_no_result(tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fails(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        runner.run_trial(job, plan(CONFIG)[0], tmp_path / "trial")
    assert not (tmp_path / "trial" / "trial.json").exists()
