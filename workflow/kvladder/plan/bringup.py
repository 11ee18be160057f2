"""Where a setup's bring-up is recorded, and what it says to the trials that depend on it."""

from __future__ import annotations

from pathlib import Path

from kvladder.config import stack as stacks
from kvladder.config.experiment import ExperimentConfig, start_id
from kvladder.config.records import StartRecord
from kvladder.plan import digest
from kvladder.stack import paths


def code_of_setup(config: ExperimentConfig, setup: str, suite: str | None = None) -> list[Path]:
    """Modules that make the raw data of a setup's bring-up, or of its trials of a suite."""
    workloads = [] if suite is None else config.suite_map()[suite]
    return digest.measuring_code(config.setups[setup].kind, {config.workloads[name].kind for name in workloads})


def stack_digest(config: ExperimentConfig) -> str:
    """Hash of all that defines the experiment's stack. Raises ConfigError."""
    folder = paths.find(config.stack)
    return digest.digest(paths.definition_files(folder, stacks.load(folder)), paths.ROOT)


def start_path(config: ExperimentConfig, results: Path, setup: str, stack: str) -> Path:
    """The record of a setup's bring-up: another path for another content of anything that it depends on.

    ``results``: ``results/<experiment>``; ``stack``: the stack's digest.
    """
    code = digest.digest(code_of_setup(config, setup), paths.ROOT)
    return results / "start" / f"{setup}-{start_id(config, setup, stack, code)}.json"


def failure(config: ExperimentConfig, results: Path, setup: str) -> str | None:
    """Why the bring-up that a setup's trials depend on failed; None where it didn't, or where they depend on none.

    Older records of the same setup, of another configuration or other code, say nothing about this one.
    """
    if config.start == "folded":
        return None
    path = start_path(config, results, setup, stack_digest(config))
    if not path.is_file():
        return None
    start = StartRecord.model_validate_json(path.read_text(encoding="utf-8"))
    return (start.reason or "no reason recorded") if start.status == "failed" else None
