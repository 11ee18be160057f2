"""A finished experiment of any number of trials, in a clone of the project: what the analysis has to cope with.

Trials come from `trial_factory` and are small; their verdicts lie beside them, as judging writes them. All that comes
after judging is left for snakemake to make.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from table_factory import DEMO, judge
from trial_factory import SUITES, write_trial

from kvladder.config.experiment import ExperimentConfig, Trial, block_id, plan
from kvladder.judge import BlockVerdict
from workflow.conftest import Project, clone

NAME = "many"
LOADS = SUITES["demo"]
CONFIG = {
    "experiment": NAME,
    "setups": {
        "plain": {"kind": "plain"},
        "plain-2": {"kind": "plain"},
        "prefix-cache": {"kind": "prefix-cache"},
        "native-host": {"kind": "native", "cpu_bytes": "1GiB"},
        "lmcache-mp": {"kind": "lmcache-mp", "cpu_bytes": "1GiB"},
    },
    "workloads": {
        "repeat": {"kind": "repeat", "prompt_tokens": 513, "output_tokens": 4, "warm_passes": 3},
        "burst": {"kind": "burst", "requests": 4, "prompt_tokens": 513, "output_tokens": 4, "warm_passes": 3},
    },
    "suites": {name: [name] for name in LOADS},
}
TRIALS_A_REPEAT = len(CONFIG["setups"]) * len(LOADS)


def write(folder: Path, repeats: int) -> Project:
    """Clone the project into ``folder`` with ``repeats`` × `TRIALS_A_REPEAT` judged trials of the experiment `NAME`."""
    project = clone(folder)
    config = ExperimentConfig.model_validate(project.config(**CONFIG, repeats=repeats))
    results = folder / "results" / NAME
    trials = plan(config)
    blocks: dict[tuple[str, int], list[Trial]] = {}
    for trial in trials:
        blocks.setdefault((trial.suite, trial.repeat), []).append(trial)
        kind, family = DEMO[trial.setup]
        write_trial(
            folder / "results",
            experiment=NAME,
            setup=trial.setup,
            kind=kind,
            suite=trial.suite,
            repeat=trial.repeat,
            run=trial.run,
            order=trial.order,
            workloads={trial.suite: LOADS[trial.suite]},
            family=family,
        )
    # Each kind of file after what it is made from: snakemake goes by their times.
    for trial in trials:
        judge(results / trial.folder)
        (results / trial.folder / "verdict.json").rename(results / trial.folder / "own-verdict.json")
    for (suite, repeat), block_trials in blocks.items():
        block = BlockVerdict(experiment=NAME, suite=suite, repeat=repeat, trials=[])
        path = results / "blocks" / suite / f"r{repeat}-{block_id(block_trials)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
    for trial in trials:
        shutil.copyfile(results / trial.folder / "own-verdict.json", results / trial.folder / "verdict.json")
    return project
