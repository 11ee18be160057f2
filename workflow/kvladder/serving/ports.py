"""Free loopback ports, held by lock files so that two runs at once never pick the same."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvladder.serving import procfs
from kvladder.serving.errors import PortInUse
from kvladder.serving.locks import LockFile, runtime_folder

# Below the kernel's default ephemeral range, so that no client connection takes one in between.
RANGE = range(21000, 29000)


@dataclass(frozen=True)
class Ports:
    """Reserved TCP ``ports``, and the file descriptors of their locks (for ``servers(hold=…)``)."""

    ports: list[int]
    fds: list[int]


def owner_of(port: int, host: str = "127.0.0.1") -> str | None:
    """Return who listens on the port, as text for a message; None when nobody does."""
    found = procfs.listeners(port, host)
    return procfs.describe_owner([listener.inode for listener in found]) if found else None


def check_free(port: int, host: str = "127.0.0.1") -> None:
    """Raise PortInUse, naming the owner, when a server could not listen on the port now."""
    if owner := owner_of(port, host):
        raise PortInUse(f"port {port} is in use by another process ({owner})")
    # Every address: a listener on another one would still stop a server that binds 0.0.0.0.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - never listens
        except OSError as error:
            reason = "in use on another address" if error.errno == errno.EADDRINUSE else error.strerror
            raise PortInUse(f"port {port} can't be used: {reason}") from None


@contextlib.contextmanager
def reserve(
    count: int, *, wanted: Sequence[int] = (), holder: str = "kvladder", folder: Path | None = None
) -> Iterator[Ports]:
    """Hold ``wanted`` (configured) ports and ``count`` further free ones, in this order, inside the ``with`` block.

    ``holder`` names this run in other runs' messages. Raises PortInUse when a wanted port has a listener or belongs to
    another run, or when no free port is left.
    """
    folder = folder or runtime_folder("ports")
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        fds: list[int] = []

        def take(port: int) -> None:
            lock = LockFile(folder / f"port-{port}.lock")
            if not lock.acquire(holder):
                raise PortInUse(f"port {port} is reserved by another run ({lock.holder()})")
            try:
                check_free(port)
            except PortInUse:
                lock.release()
                raise
            held.callback(lock.release)
            ports.append(port)
            fds.append(lock.fd)

        for port in wanted:
            take(port)
        for port in RANGE:
            if len(ports) == len(wanted) + count:
                break
            with contextlib.suppress(PortInUse):
                if port not in wanted:
                    take(port)
        else:
            raise PortInUse(f"no {count} free ports between {RANGE.start} and {RANGE.stop - 1}")
        yield Ports(ports=ports, fds=fds)
