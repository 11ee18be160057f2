"""Facts about processes, sockets and shared memory, read from /proc.

Standard library only: the supervisor imports it. Processes come and go while /proc is read, so a vanished one is
never an error; it's just not in the answer.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
SHM = Path("/dev/shm")  # noqa: S108 - the kernel's own place for POSIX shared memory

_LISTEN = "0A"


class Process(NamedTuple):
    """One process: ``start`` (clock ticks since boot) tells it from a later one with the same pid."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    state: str
    start: int
    name: str


class Listener(NamedTuple):
    """One listening TCP socket; ``rank`` 0 is bound to the very address, 1 to 0.0.0.0, 2 to [::]."""

    inode: int
    rank: int


def read_process(pid: int) -> Process | None:
    """Return the process, None when there is none."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name stands in brackets and may itself hold blanks and brackets.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Process(
        pid=pid,
        ppid=int(fields[1]),
        pgid=int(fields[2]),
        sid=int(fields[3]),
        state=fields[0],
        start=int(fields[19]),
        name=head.partition("(")[2],
    )


def processes() -> Iterator[Process]:
    """Yield every process that this user can see."""
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (process := read_process(int(entry.name))):
            yield process


def descendants(root: int) -> list[Process]:
    """Return all processes below ``root`` (not ``root`` itself), parents first, zombies included."""
    children: dict[int, list[Process]] = {}
    for process in processes():
        children.setdefault(process.ppid, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += [process.pid for process in below]
    return found


def is_alive(pid: int, start: int) -> bool:
    """Say whether the process with this pid and start time still runs; a zombie doesn't."""
    process = read_process(pid)
    return process is not None and process.start == start and process.state not in "ZX"


def environ(pid: int) -> dict[str, str]:
    """Return the environment the process was started with; empty where it can't be read."""
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(item).partition("=") for item in raw.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def _links(pid: int) -> Iterator[str]:
    try:
        entries = list((PROC / str(pid) / "fd").iterdir())
    except OSError:
        return
    for entry in entries:
        try:
            yield str(entry.readlink())
        except OSError:
            continue


def mapped_files(pid: int) -> set[str] | None:
    """Return the paths of all files mapped into the process, None where that can't be read."""
    try:
        text = (PROC / str(pid) / "maps").read_text(errors="replace")
    except OSError:
        return None
    # address perms offset dev inode path; the path is missing for anonymous memory and may hold blanks.
    columns = (line.split(maxsplit=5) for line in text.splitlines())
    return {fields[5] for fields in columns if len(fields) == 6 and fields[5].startswith("/")}


def shm_names(pid: int) -> set[str]:
    """Return the names below /dev/shm that the process has mapped or open (first path component)."""
    prefix = f"{SHM}/"
    paths = (mapped_files(pid) or set()) | set(_links(pid))
    return {
        path.removeprefix(prefix).removesuffix(" (deleted)").split("/")[0] for path in paths if path.startswith(prefix)
    }


def listeners(port: int, host: str = "127.0.0.1") -> list[Listener]:
    """Return the listening sockets that would get a connection to ``host:port`` (IPv4), all of the same rank.

    The kernel prefers a socket bound to the address itself over one bound to 0.0.0.0, and that over [::].
    """
    word = f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}"
    mapped = f"{0:016X}{int.from_bytes(bytes.fromhex('0000ffff'), sys.byteorder):08X}{word}"
    ranks = {word: 0, mapped: 0, "0" * 8: 1, "0" * 32: 2}
    found = []
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:  # a kernel without IPv6
            continue
        for line in lines:
            fields = line.split()
            address, _, local_port = fields[1].partition(":")
            if fields[3] == _LISTEN and int(local_port, 16) == port and address in ranks:
                found.append(Listener(inode=int(fields[9]), rank=ranks[address]))
    best = min((listener.rank for listener in found), default=0)
    return [listener for listener in found if listener.rank == best]


def sockets(pid: int) -> set[int]:
    """Return the inodes of all sockets the process has open."""
    return {int(link[8:-1]) for link in _links(pid) if link.startswith("socket:[")}


def socket_owner(inodes: Collection[int]) -> Process | None:
    """Return a process that has one of the sockets open, None when no visible process has."""
    wanted = set(inodes)
    return next((process for process in processes() if wanted & sockets(process.pid)), None)


def describe_owner(inodes: Collection[int]) -> str:
    """Name the owner of a socket for a message: ``pid 12, python3``, or that it can't be seen."""
    owner = socket_owner(inodes)
    return f"pid {owner.pid}, {owner.name}" if owner else "owner not visible to this user"
