"""An experiment or a truth bench from its sources: config files in order, then single values of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvladder.config import bench, experiment
from kvladder.config.bench import BenchConfig
from kvladder.config.experiment import ExperimentConfig
from kvladder.config.yaml import ConfigError, load_file, load_text, merge


def read(files: Sequence[Path], overrides: Iterable[str] = ()) -> ExperimentConfig:
    """Read every file strictly, merge them in order, apply ``key=value`` overrides, validate.

    A value is YAML (``repeats=5``, ``engine={max_num_seqs: 4}``) and merges like a file. Raises ConfigError.
    """
    return experiment.validate(_merged(files, overrides))


def read_bench(files: Sequence[Path], overrides: Iterable[str] = ()) -> BenchConfig:
    """A truth bench's configuration, read as `read` reads an experiment's. Raises ConfigError."""
    return bench.validate(_merged(files, overrides))


def _merged(files: Sequence[Path], overrides: Iterable[str]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for path in files:
        data = merge(data, load_file(path))
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--config {text}: expected key=value")
        data = merge(data, load_text(f"{key}: {value}", f"--config {text}"))
    return data
