"""A run's own results folder: claimed for the run, with its effective configuration in it, which its jobs read."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from kvladder.config.experiment import ExperimentConfig
from kvladder.config.sources import read as read_files
from kvladder.serving.locks import LockFile

NAME = "experiment.json"
LOCK = ".lock"

_NO_LOCKS_HERE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Some network file systems have none: then snakemake's own lock of the working directory is all there is."""


class NotOurs(RuntimeError):
    """The results folder can't be this run's; the message says why and what to do."""


def claim(results: Path) -> LockFile:
    """Take the folder of an experiment for this run; it is given back when the process ends, however it does.

    snakemake locks its working directory. Two checkouts that share a results folder, or ``--nolock``, go past that, and
    each would take the other's trials in progress for broken-off ones and delete them. Raises NotOurs where another run
    has the folder, or nothing can be written there.
    """
    lock = LockFile(results / LOCK)
    try:
        results.mkdir(parents=True, exist_ok=True)
        if not lock.acquire(f"snakemake on {socket.gethostname()}"):
            raise NotOurs(
                f"{results} is in use by another run ({lock.holder()}): let it end, or name this `experiment` otherwise"
            )
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise NotOurs(f"{results} can't be written: {error.strerror}") from error
    return lock


def write(config: ExperimentConfig, results: Path) -> None:
    """Write ``experiment.json``, every default filled in; JSON is YAML too, so it is a config file itself."""
    results.mkdir(parents=True, exist_ok=True)
    partial = results / f".{NAME}.{os.getpid()}.partial"
    partial.write_text(config.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
    partial.rename(results / NAME)


def read(results: Path) -> ExperimentConfig:
    """The configuration of the run in progress. Raises ConfigError."""
    return read_files([results / NAME])
