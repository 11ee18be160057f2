"""What the benchmarks of the analysis are fed with is what a run leaves."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from kvladder.config.experiment import plan
from kvladder.config.records import RequestRecord, TrialRecord
from kvladder.config.sources import read
from kvladder.judge import judge_trial
from kvladder.load.records import RequestTrace
from kvladder.tables.build import build, find_trials

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports one of their modules."""
    for folder in (TESTS, TESTS / "unit", TESTS / "benchmarks"):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module


def test_lines_are_those_of_the_client(tmp_path: Path, benchmarks: Any) -> None:
    traffic = benchmarks("traffic")
    folders = traffic.write(tmp_path, records=80, trials=2, chunks=3)
    (path,) = folders[0].glob("*.requests.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    records = [RequestRecord.model_validate_json(line) for line in lines]
    assert [(record.round, record.index) for record in records] == [
        (round_, i) for round_ in range(4) for i in range(10)
    ]
    for line, record in zip(lines, records, strict=True):
        # Key by key in the client's order, with the client's separators.
        trace = RequestTrace(**record.model_dump(exclude={"schema_version"}))
        assert line == json.dumps(trace.as_json(), separators=(",", ":"))
        assert record.send_ns < record.first_token_ns == record.chunk_ns[0] < record.chunk_ns[-1] < record.end_ns
        assert len(record.chunk_ns) == sum(record.chunk_tokens) == record.output_tokens == 3
    built = build(folders, tmp_path / "tables", baseline="plain")
    assert set(built.trials["status"]) == {"valid"}
    assert built.requests.collect().height == 80
    assert built.passes["ttft_n"].to_list() == [10] * 8
    # Judging gets past the files to its gates.
    assert "raw-files-intact" in {gate.gate for gate in judge_trial(folders[0]).gates}


def test_the_experiment_is_finished_and_nothing_of_it_is_foreign(tmp_path: Path, benchmarks: Any) -> None:
    experiments = benchmarks("experiments")
    project = experiments.write(tmp_path / "clone", 2)
    results = project.folder / "results" / experiments.NAME
    config = read([project.folder / "config" / "config.yaml"], ())
    assert sorted(results / trial.folder for trial in plan(config)) == find_trials(results / "trials")
    assert len(plan(config)) == 2 * experiments.TRIALS_A_REPEAT
    for folder in find_trials(results / "trials"):
        assert TrialRecord.model_validate_json((folder / "trial.json").read_bytes()).experiment == experiments.NAME
        times = [(folder / name).stat().st_mtime_ns for name in ("trial.json", "own-verdict.json", "verdict.json")]
        assert times == sorted(times)
