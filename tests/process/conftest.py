"""Fixtures for every test of this folder: ``world``, and the reference server's program, ``binary``."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving_world import world

from kvladder.bench.server import build

__all__ = ["world"]


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The truth bench's reference server, compiled."""
    path = tmp_path_factory.mktemp("server") / "server"
    build(path)
    return path
