"""Rooflines of this machine, with small sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvladder.probes import rooflines

MIB = 2**20


def test_the_first_call_is_not_counted_and_the_median_is_of_rates() -> None:
    seconds = iter([100.0, 1.0, 2.0, 4.0])
    result = rooflines.measure("x", 8, 3, lambda: next(seconds))
    assert (result["min"], result["median"], result["max"]) == (2.0, 4.0, 8.0)


def test_disk_moves_every_byte_and_cleans_up(tmp_path: Path) -> None:
    write, read = rooflines.disk(tmp_path, chunk=MIB, total=4 * MIB)
    assert write["bytes"] == read["bytes"] == 4 * MIB
    assert write["link"].startswith("disk_write_")
    assert read["link"].removeprefix("disk_read") == write["link"].removeprefix("disk_write")
    assert 0 < read["min"] <= read["median"] <= read["max"]
    assert not list(tmp_path.iterdir())


def test_without_direct_io_the_name_says_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rooflines.os.open

    def refuses(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & rooflines.os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(rooflines.os, "open", refuses)
    assert [link["link"] for link in rooflines.disk(tmp_path, MIB, MIB)] == ["disk_write_cached", "disk_read_cached"]


@pytest.mark.slow
def test_as_a_file_it_needs_no_package(tmp_path: Path) -> None:
    out = tmp_path / "rooflines.json"
    subprocess.run([sys.executable, "-I", rooflines.__file__, "--out", str(out)], check=True, timeout=120)
    links = {link["link"] for link in json.loads(out.read_text())["links"]}
    assert {"host_memcpy", "tcp_loopback"} <= links
