"""The roofline of Mooncake's transfer engine, with an engine that behaves as told in Mooncake's place."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from config_factory import experiment

from kvladder.config.rooflines import Rooflines
from kvladder.probes import ceilings, rooflines, transfer_engine

ENGINE = """
import os, sys, time
print("a line of the engine's own")
class TransferEngine:
    def initialize(self, *where):
        assert where == ("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        return 0
    def register_memory(self, address, size):
        return 0
    def get_rpc_port(self):
        return os.getpid()
    def move(self, sizes):
        time.sleep(0.001)
        return 0
    def transfer_sync_read(self, peer, here, there, size):
        assert peer.startswith("127.0.0.1:") and peer != f"127.0.0.1:{os.getpid()}", "the other process is the peer"
        return self.move([size])
    transfer_sync_write = transfer_sync_read
    def batch_transfer_sync_read(self, peer, here, there, sizes):
        assert len(here) == len(there) == len(sizes) <= 256
        assert len(set(here)) == len(here) and here[1] - here[0] == there[1] - there[0] == sizes[0]
        return self.move(sizes)
    batch_transfer_sync_write = batch_transfer_sync_read
"""
MIB = 2**20


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module that stands in for Mooncake's."""
    module = tmp_path / "path" / "mooncake" / "engine.py"
    module.parent.mkdir(parents=True)
    (module.parent / "__init__.py").write_text("", encoding="utf-8")
    module.write_text(ENGINE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    # Test machines are busy: what isn't about the deadline mustn't meet it.
    monkeypatch.setattr(rooflines, "TRANSFER_ENGINE_S", 60)
    return module


def change(engine: Path, old: str, new: str) -> None:
    text = engine.read_text(encoding="utf-8")
    assert old in text
    engine.write_text(text.replace(old, new, 1), encoding="utf-8")


def measured(chunk: int) -> tuple[list[dict[str, Any]], str | None]:
    """Links, and why there aren't more."""
    links: list[dict[str, Any]] = []
    try:
        links.extend(rooflines.transfer_engine(chunk))
    except RuntimeError as error:
        return links, str(error)
    return links, None


def left() -> list[str]:
    """Processes of the measurement that are still there."""
    return [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline"])
        if transfer_engine.__file__ in (process.info["cmdline"] or []) and process.status() != "zombie"
    ]


@pytest.mark.usefixtures("engine")
def test_reads_and_writes_whole_and_in_objects() -> None:
    links, problem = measured(3 * MIB)
    assert problem is None
    assert [(link["link"], link["bytes"], link["chunk"]) for link in links] == [
        ("transfer_engine_read", 128 * MIB, None),
        ("transfer_engine_read", 126 * MIB, 3 * MIB),
        ("transfer_engine_write", 128 * MIB, None),
        ("transfer_engine_write", 126 * MIB, 3 * MIB),
    ]
    # 128 MiB in a millisecond or a little more, whatever this machine's memory can do.
    assert all(link["max"] <= 128 * MIB / 0.001 for link in links)
    assert Rooflines.model_validate({"links": links}).ceiling("transfer_engine_read", MIB) is not None
    assert not left()


@pytest.mark.usefixtures("engine")
def test_small_objects_are_sent_in_several_calls() -> None:
    links, problem = measured(64 * 1024)
    assert problem is None
    # 2,048 objects, 256 a call: eight calls of a millisecond each.
    assert all(link["max"] <= 128 * MIB / 0.008 for link in links if link["chunk"])


def test_what_the_engine_refuses_is_no_rate(engine: Path) -> None:
    """Refused transfers return at once: 64 KiB objects, too many for the queue, gave 25 GB/s over a link of 2."""
    change(engine, "return self.move(sizes)", "return -1")
    links, problem = measured(MIB)
    assert problem == "batch_transfer_sync_read returned -1"
    assert [(link["link"], link["chunk"]) for link in links] == [("transfer_engine_read", None)]


@pytest.mark.parametrize("call", ["initialize(self, *where):\n", "move(self, sizes):\n"])
def test_an_engine_that_hangs_is_ended(engine: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(rooflines, "TRANSFER_ENGINE_S", 2)
    change(engine, call, f"{call}        time.sleep(3600)\n")
    begin = time.monotonic()
    assert measured(MIB) == ([], "it took longer than 2 s")
    assert time.monotonic() - begin < 12
    deadline = time.monotonic() + 10
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left()


def test_another_process_that_does_not_come_up(engine: Path) -> None:
    register = "def register_memory(self, address, size):\n        return "
    change(engine, f"{register}0", f"{register}5 if '--serve' in sys.argv else 0")
    assert measured(MIB) == ([], "the other process ended before it had an engine")


def test_without_mooncake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert measured(MIB) == ([], "No module named 'mooncake'")


def test_it_is_measured_for_setups_that_use_it_with_their_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv: list[str] = []
    monkeypatch.setattr(ceilings.subprocess, "run", lambda given, **_: argv.extend(given))
    ceilings.measure(experiment(), Path("python"), "cpu", {}, [], tmp_path)
    assert "--object" not in argv
    pool = {"kind": "mooncake-store", "segment_bytes": "1MiB", "buffer_bytes": "1MiB"}
    ceilings.measure(experiment(pool=pool), Path("python"), "cpu", {}, [], tmp_path)
    # A block of 128 tokens, each of 2 (K, V) × 2 layers × 2 heads × 16 × 2 bytes.
    assert argv[argv.index("--object") + 1] == str(128 * 256)
