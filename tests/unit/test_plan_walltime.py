"""Wall time by stage, from records that lie where the pinned Snakemake puts them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from snakemake.persistence.file import FilePersistence

from kvladder.plan.walltime import HELD, STAGES, Stage, held, main, stages
from kvladder.tables.held import PARTS

RULES = Path(__file__).parents[2] / "workflow" / "rules"
TRIAL = "results/demo/trials/{}/" + "a-long-name-" * 20 + "suite/r0-00000000/trial.json"

RECORDS: dict[str, dict[str, Any]] = {
    "envs/cpu/.venv/stamp.json": {"rule": "install_stack", "starttime": 0.0, "endtime": 60.0},
    # Side by side for a second.
    TRIAL.format("plain"): {"rule": "measure_trial", "starttime": 100.0, "endtime": 110.0},
    TRIAL.format("native"): {"rule": "measure_trial", "starttime": 109.0, "endtime": 119.0},
    TRIAL.format("running"): {"rule": "measure_trial", "starttime": 120.0, "endtime": None},
    # Two outputs of one job.
    "results/demo/tables/trials.csv": {"rule": "build_tables", "log": ["t.log"], "starttime": 130.0, "endtime": 132.0},
    "results/demo/tables/gates.csv": {"rule": "build_tables", "log": ["t.log"], "starttime": 130.25, "endtime": 132.0},
    "results/demo-2/tables/trials.csv": {"rule": "build_tables", "starttime": 0.0, "endtime": 99.0},
    "reports/demo.html": {"rule": "write_report", "starttime": 140.0, "endtime": 143.5},
    "results/demo/something": {"rule": "unheard_of", "starttime": 0.0, "endtime": 1.0},
}


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    folder = tmp_path / ".snakemake" / "metadata"
    folder.mkdir(parents=True)
    store = FilePersistence.__new__(FilePersistence)  # for its file names; a real one locks a working directory
    store._max_len = None
    for output, record in RECORDS.items():
        path = Path(store._record_path(str(folder), output))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record), encoding="utf-8")
    return folder


def test_stages_by_hand(metadata: Path) -> None:
    assert stages(metadata, "demo") == [
        Stage("install", 1, 60.0, 60.0),
        Stage("measure", 2, 20.0, 19.0),
        Stage("tables", 1, 2.0, 2.0),
        Stage("report", 1, 3.5, 3.5),
    ]


def test_every_stage_is_made_of_rules() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in RULES.glob("*.smk"))
    rules = set(re.findall(r"^(?:rule|checkpoint) (\w+):", text, re.MULTILINE))
    assert {rule for names in STAGES.values() for rule in names} <= rules


def test_trials_are_split_by_the_table_held(
    metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(HELD) == {*PARTS, "rest_s"}
    monkeypatch.chdir(tmp_path)
    assert held(Path("results", "demo", "tables", "held.csv")) == {}
    Path("results/demo/tables").mkdir(parents=True)
    Path("results/demo/tables/held.csv").write_text(
        "setup,start_s,warm_up_s,timed_s,between_s,right_kv_s,stop_s,rest_s\n"
        "plain,4,1,3,0.5,0,1,0\nnative,5,,,,,,2.5\n",
        encoding="utf-8",
    )
    monkeypatch.setattr("sys.argv", ["walltime", "demo"])
    main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["measure", "2", "20.0", "19.0"] in lines
    assert ["servers", "start", "9.0"] in lines and ["timed", "passes", "3.0"] in lines
    assert ["lost", "with", "trials", "that", "failed", "2.5"] in lines
