"""Measure the ceilings of the links that KV travels on this machine: no tier can load faster than its link.

Runs under the *stack's* interpreter, as a file (``python rooflines.py --out rooflines.json``), because the device
copies need the stack's torch; so it imports nothing but the standard library and, for device copies, torch. Rates are
bytes per second, each the median of its repeats; what can't be measured here is left out, never 0.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 2**20
REPEATS = 7


def measure(link: str, size: int, repeats: int, once: Callable[[], float]) -> dict[str, Any]:
    """Median and range of ``size`` bytes over the seconds that ``once`` returns; a first, warming call is left out."""
    once()
    rates = sorted(size / once() for _ in range(repeats))
    return {
        "link": link,
        "bytes": size,
        "repeats": repeats,
        "median": statistics.median(rates),
        "min": rates[0],
        "max": rates[-1],
    }


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e9


def device_copies(size: int) -> list[dict[str, Any]]:
    """Copies between the first visible GPU and pinned and pageable host memory, timed by device events."""
    try:
        import torch  # noqa: PLC0415 (not there for the harness, and seconds to import)
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []

    def by_events(destination: Any, source: Any) -> Callable[[], float]:
        def once() -> float:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            destination.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return once

    found = []
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    for name, pinned in (("pinned", True), ("pageable", False)):
        # Written once, so that every page exists before the clock starts.
        host = torch.full((size,), 1, dtype=torch.uint8, pin_memory=pinned)
        found.append(measure(f"{name}_h2d", size, REPEATS, by_events(device, host)))
        found.append(measure(f"{name}_d2h", size, REPEATS, by_events(host, device)))
        del host
    return found


def host_copies() -> list[dict[str, Any]]:
    """memcpy by one thread from small (in cache) to large (in memory) sizes."""
    found = []
    for size in (MIB // 4, 4 * MIB, 64 * MIB, 256 * MIB):
        source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
        source.write(b"\x01" * size)
        target.write(b"\x02" * size)
        source_at = ctypes.addressof(ctypes.c_char.from_buffer(source))
        target_at = ctypes.addressof(ctypes.c_char.from_buffer(target))
        times = max(1, 256 * MIB // size)

        def once(at: int = target_at, source_at: int = source_at, size: int = size, times: int = times) -> float:
            return _timed(lambda: [ctypes.memmove(at, source_at, size) for _ in range(times)]) / times

        found.append(measure("host_memcpy", size, REPEATS, once))
    return found


def loopback() -> list[dict[str, Any]]:
    """One TCP stream over 127.0.0.1, 512 MiB in pieces of 1 MiB."""
    size, piece = 512 * MIB, b"\x01" * MIB

    def once() -> float:
        with socket.create_server(("127.0.0.1", 0)) as server:

            def serve() -> None:
                peer, _ = server.accept()
                buffer = bytearray(MIB)
                with peer:
                    while peer.recv_into(buffer):
                        pass

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()

            def send() -> None:
                with socket.create_connection(server.getsockname(), timeout=60) as client:
                    for _ in range(size // MIB):
                        client.sendall(piece)
                thread.join(60)

            return _timed(send)

    return [measure("tcp_loopback", size, 3, once)]


def disk(folder: Path, chunk: int, total: int) -> list[dict[str, Any]]:
    """Write and read files of ``chunk`` bytes in ``folder`` past the page cache (O_DIRECT), one thread.

    A file system that refuses O_DIRECT is measured through its cache, under a link name that says so.
    """
    count = max(1, total // chunk)
    buffer = mmap.mmap(-1, chunk)  # page aligned, as O_DIRECT wants it
    buffer.write(os.urandom(min(chunk, MIB)) * (chunk // min(chunk, MIB)))
    with tempfile.TemporaryDirectory(dir=folder, prefix="kvladder-roofline-") as scratch:
        direct, suffix = os.O_DIRECT, "_direct"
        try:
            os.close(os.open(Path(scratch, "probe"), os.O_WRONLY | os.O_CREAT | direct))
        except OSError:
            direct, suffix = 0, "_cached"

        def each(flags: int, act: Callable[[int], int]) -> float:
            def work() -> None:
                for number in range(count):
                    handle = os.open(Path(scratch, f"{number}"), flags | direct)
                    try:
                        if act(handle) != chunk:
                            raise OSError("short transfer")
                    finally:
                        os.close(handle)

            return _timed(work)

        def write() -> float:
            return each(os.O_WRONLY | os.O_CREAT, lambda handle: os.write(handle, buffer))

        def read() -> float:
            return each(os.O_RDONLY, lambda handle: os.readv(handle, [buffer]))

        # Rates are of the whole set of files; the chunk is what one call moves.
        results = [measure(f"disk_write{suffix}", count * chunk, 3, write)]
        results.append(measure(f"disk_read{suffix}", count * chunk, 3, read))
    return [{**result, "chunk": chunk} for result in results]


def main() -> None:
    """Measure everything and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="folder on the disk of the file tier")
    parser.add_argument("--chunk", type=int, default=2 * MIB, help="bytes of one file of the tier")
    parser.add_argument("--device-bytes", type=int, default=1024 * MIB)
    options = parser.parse_args()
    links = device_copies(options.device_bytes) + host_copies() + loopback()
    if options.folder is not None:
        with contextlib.suppress(OSError):
            links += disk(options.folder, options.chunk, 256 * MIB)
    options.out.write_text(json.dumps({"schema": 1, "links": links}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
