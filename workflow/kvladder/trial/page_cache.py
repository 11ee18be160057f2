"""How much of a tier on disk lies in the page cache: with O_DIRECT nothing does, whatever the engine says."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import psutil

_SUFFIXES = (".bin", ".data")
"""Of files with KV: vLLM's, LMCache's."""

MOST_FILES = 512
"""Files looked at, evenly over all of them: a large tier has tens of thousands, written and read alike."""


def disk_state(folder: Path) -> dict[str, Any]:
    """``filesystem``, ``files``, ``looked_at`` of them, their ``bytes``, and ``cached_bytes``; the latter None where
    the kernel doesn't tell.

    To be called while the tier's files are still there and nothing else has read them.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    step = max(1, -(-len(files) // MOST_FILES))
    size, cached = 0, 0
    known = True
    looked_at = files[::step]
    for path in looked_at:
        try:
            length = path.stat().st_size
            resident = cached_bytes(path) if length else 0
        except OSError:
            known = False
            break
        size += length
        cached += resident
    return {
        "filesystem": _filesystem(folder),
        "files": len(files),
        "looked_at": len(looked_at),
        "bytes": size,
        "cached_bytes": cached if known and looked_at else None,
    }


def cached_bytes(path: Path) -> int:
    """Bytes of a file that lie in the page cache, in whole pages; asking (mincore) brings none in.

    Raises OSError where the file can't be mapped or the kernel doesn't answer, ValueError for an empty file.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file:
        # Private and writable, because only then Python tells the address; nothing is written.
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    pages = -(-len(mapped) // mmap.PAGESIZE)
    answer = (ctypes.c_ubyte * pages)()
    start = ctypes.c_char.from_buffer(mapped)
    try:
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), answer)
        if failed:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(path))
        return sum(page & 1 for page in answer) * mmap.PAGESIZE
    finally:
        del start
        mapped.close()


def _filesystem(folder: Path) -> str | None:
    """Type of the file system below a folder; None where it isn't known."""
    place = folder.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else None
