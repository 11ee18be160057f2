"""One experiment from its sources: config files in order, then single values from the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvladder.config.experiment import ExperimentConfig, validate
from kvladder.config.yaml import ConfigError, load_file, load_text, merge


def read(files: Sequence[Path], overrides: Iterable[str] = ()) -> ExperimentConfig:
    """Read every file strictly, merge them in order, apply ``key=value`` overrides, validate.

    A value is YAML (``repeats=5``, ``engine={max_num_seqs: 4}``) and merges like a file. Raises ConfigError.
    """
    data: dict[str, Any] = {}
    for path in files:
        data = merge(data, load_file(path))
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--config {text}: expected key=value")
        data = merge(data, load_text(f"{key}: {value}", f"--config {text}"))
    return validate(data)
