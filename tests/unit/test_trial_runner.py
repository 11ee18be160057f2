"""What becomes of a trial whose raw files can't be written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_server import Exchange, ScriptedServer

from kvladder.config.experiment import plan, validate
from kvladder.config.stack import StackConfig, StackStamp
from kvladder.config.traffic import PassPlan, Request
from kvladder.counters.drain import Drain
from kvladder.load import Target
from kvladder.serving.errors import ServerFailed
from kvladder.trial import runner
from kvladder.trial.session import Job, Say, Stack

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

UP = runner.Attempt.up


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


METRICS_DIED = (
    "(APIServer pid=6) ERROR 11-29 16:35:01 [async_llm.py:800] AsyncLLM output_handler failed.\n"
    "(APIServer pid=6) ERROR 11-29 16:35:01 [async_llm.py:800] Traceback (most recent call last):\n"
    "(APIServer pid=6) ERROR 11-29 16:35:01 [async_llm.py:800]   File x\n"
    "(APIServer pid=6) ERROR 11-29 16:35:01 [async_llm.py:800] "
    "ValueError: Counters can only be incremented by non-negative amounts.\n"
)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (METRICS_DIED, "ValueError: Counters can only be incremented by non-negative amounts."),
        ("INFO: all is well\n", "no request of repeat/warm/2 came through: no byte for 1.5 s"),
    ],
    ids=["the log knows", "nobody knows"],
)
def test_an_engine_that_lives_and_streams_nothing(tmp_path: Path, log: str, reason: str) -> None:
    """C2b: /health answers, every stream stalls: the log's own line is the reason, after the stall deadline."""
    (tmp_path / "engine.log").write_text(log, encoding="utf-8")
    session: Any = SimpleNamespace(
        contexts=[SimpleNamespace(log=tmp_path / "engine.log")],
        failed=lambda reason, engine: ServerFailed("engine", reason, tmp_path),
    )
    stalled = SimpleNamespace(status="failed", error="no byte for 1.5 s")
    whole: Any = SimpleNamespace(records=[stalled, SimpleNamespace(status="ok", error=None)])
    nothing: Any = SimpleNamespace(records=[stalled, stalled])
    plan = PassPlan("repeat", "warm", 2, 1, [])
    runner._Run._check_served(session, plan, whole)
    with pytest.raises(ServerFailed) as caught:
        runner._Run._check_served(session, plan, nothing)
    assert caught.value.reason == reason


def test_cores_that_the_machine_has_not_are_refused_before_a_server_starts(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.Attempt, "up", UP)
    config = validate(CONFIG.model_dump(exclude_unset=True) | {"load": {"cores": [4096]}})
    trial = plan(config)[0]
    with pytest.raises(ValueError, match=r"load.cores: 4096 isn't among the cores that this process may use: \d"):
        runner.run_trial(replace(job, config=config), trial, tmp_path / "trial")
    assert list((tmp_path / "trial").rglob("*.*")) == []


def test_a_pass_is_sent_by_as_many_processes_as_asked_for_and_possible(tmp_path: Path, job: Job) -> None:
    several = validate(CONFIG.model_dump(exclude_unset=True) | {"load": {"processes": 2}})
    said: list[str] = []
    busy = replace(job, config=several, write=said.append)
    trial = plan(several)[0]
    run = runner._Run(busy, trial, runner.Attempt(busy, trial.setup, "n", tmp_path, Say("plain", said.append)))
    wave = [Request(index, f"p{index}", array("I", [index, 5]), 1) for index in range(6)]
    with ScriptedServer(Exchange.answer) as server:
        session: Any = SimpleNamespace(
            snapshot=lambda label: None,
            group=SimpleNamespace(check_alive=lambda: None),
            drain=lambda engine: Drain(None, None),
            targets=[Target("127.0.0.1", server.port, "m")],
        )
        for concurrency in (4, 1):
            assert run._pass(session, PassPlan("repeat", "warm", 2, concurrency, wave), None).failed == 0
    wide, single = run.passes
    assert wide.client_process_cpu_ns is not None and len(wide.client_process_cpu_ns) == 2
    assert wide.client_cpu_ns == sum(wide.client_process_cpu_ns)
    assert single.client_process_cpu_ns is None and single.client_cpu_ns is not None
    assert (
        [line for line in said if "client processes" in line]
        == [line for line in said if line.endswith("repeat/warm/2: client processes: 1, for the pass allows no more")]
        != []
    )
