"""The effective configuration of a run, stored beside its results: what its jobs read."""

from __future__ import annotations

import os
from pathlib import Path

from kvladder.config.experiment import ExperimentConfig
from kvladder.config.sources import read as read_files

NAME = "experiment.json"


def write(config: ExperimentConfig, results: Path) -> None:
    """Write ``experiment.json``, every default filled in; JSON is YAML too, so it is a config file itself."""
    results.mkdir(parents=True, exist_ok=True)
    partial = results / f".{NAME}.{os.getpid()}.partial"
    partial.write_text(config.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
    partial.rename(results / NAME)


def read(results: Path) -> ExperimentConfig:
    """The configuration of the run in progress. Raises ConfigError."""
    return read_files([results / NAME])
