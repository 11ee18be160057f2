"""Only our own server makes a port ready, and ports are never shared by accident."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from serving_world import HERE, World, wait_for

from kvladder.serving import ports
from kvladder.serving.errors import NotClean, PortInUse
from kvladder.serving.hygiene import after_stop, before_start
from kvladder.serving.locks import LockFile
from kvladder.serving.process import Readiness, ServerFailed


@contextmanager
def stranger(port: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(HERE / "servers" / "stranger.py"), str(port)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("path", ["/health", None])
def test_stranger_that_answers_is_never_ready(world: World, path: str | None) -> None:
    port = world.ports[0]
    spec = world.spec("--delay", 30, ready=Readiness(port=port, http_path=path, deadline_s=20))
    with stranger(port) as process:
        began = time.monotonic()
        with (
            pytest.raises(ServerFailed, match=rf"port {port} is served by another process \(pid {process.pid}, python"),
            world.servers(spec),
        ):
            pytest.fail("a stranger was taken for the server")
        assert time.monotonic() - began < 8, "found at once, and the stop isn't lost on a supervisor that still starts"
        process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == "", "it was never even asked"


def test_stranger_that_comes_while_waiting(world: World) -> None:
    spec = world.spec("--delay", 30)
    late = subprocess.Popen(
        [
            "/bin/sh",
            "-c",
            f"sleep 0.7; exec {sys.executable} {HERE / 'servers' / 'stranger.py'} {world.ports[0]}",
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        with pytest.raises(ServerFailed, match=f"another process .pid {late.pid}"), world.servers(spec):
            pytest.fail("a stranger was taken for the server")
    finally:
        late.kill()
        late.wait()


def test_proxies_are_never_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with stranger(world.ports[1]) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{world.ports[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with (
            pytest.raises(ServerFailed, match="answered 503"),
            world.servers(world.spec("--loading", 30, ready=Readiness(world.ports[0], "/health", deadline_s=1))),
        ):
            pytest.fail("the proxy's 200 was believed")
        with world.servers(world.spec()):
            pass
        proxy.kill()
        assert proxy.stdout is not None and proxy.stdout.read() == ""


def test_configured_port_in_use_names_the_owner(world: World) -> None:
    port = world.ports[2]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        message = rf"port {port} is in use by another process \(pid {os.getpid()}, "
        with pytest.raises(PortInUse, match=message):
            ports.check_free(port)
        with (
            pytest.raises(PortInUse, match=message),
            ports.reserve(0, wanted=[port], folder=world.folder),
        ):
            pytest.fail("port is taken")
        with pytest.raises(NotClean, match=message):
            before_start(tag=world.tag, ports=[port])
        with pytest.raises(NotClean, match="still has a listener"):
            after_stop(before_start(tag=world.tag), tag=world.tag, ports=[port])
    ports.check_free(port)


def test_two_runs_get_different_ports(world: World) -> None:
    with ports.reserve(3, folder=world.folder) as first, ports.reserve(3, folder=world.folder) as second:
        assert len({*first.ports, *second.ports}) == 6
        with (
            pytest.raises(
                PortInUse, match=re.escape(f"port {first.ports[1]} is reserved by another run (kvladder, pid")
            ),
            ports.reserve(0, wanted=[first.ports[1]], folder=world.folder),
        ):
            pytest.fail("reserved twice")
    for port in (*first.ports, *second.ports):
        lock = LockFile(world.folder / f"port-{port}.lock")
        assert lock.acquire("next run"), "given back"
        lock.release()


def test_port_lock_lasts_until_the_servers_of_a_killed_run_are_gone(world: World) -> None:
    """The lock travels to the supervisor: a port isn't handed out while the old server still leaves."""
    lock, probe = LockFile(world.folder / "x.lock"), LockFile(world.folder / "x.lock")
    assert lock.acquire("run")
    with world.servers(world.spec(), hold=[lock.fd]):
        lock.release()  # as the kernel does when the job dies
        assert not probe.acquire("probe")
    wait_for(lambda: probe.acquire("probe"))
    probe.release()
