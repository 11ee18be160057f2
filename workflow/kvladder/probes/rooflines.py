"""Measure the ceilings of the links that KV travels on this machine: no tier can load faster than its link.

Runs under the *stack's* interpreter, as a file (``python rooflines.py --out rooflines.json``), because the device
copies need the stack's torch; so it imports nothing but the standard library and, for device copies, torch. Rates are
bytes per second over several repeats; what can't be measured here is left out and said in ``problems``, never 0.

A ceiling must hold for whatever an engine does: host memory, loopback and disk are also measured with several threads
at once, since two threads copy more than one. Measuring takes seconds, not minutes: a link that is slow is repeated
less often.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MIB = 2**20
REPEATS = 7
LEAST_REPEATS = 2
PATIENCE_S = 0.8
"""How long one measurement may go on repeating."""
TRANSFER_ENGINE_S = 10
"""Seconds after which the processes that time the transfer engine end themselves."""


def measure(link: str, size: int, repeats: int, once: Callable[[], float], *, threads: int = 1) -> dict[str, Any]:
    """Median and range of ``size`` bytes over the seconds that ``once`` returns; a first, warming call is left out.

    Stops before ``repeats`` once `PATIENCE_S` is over, with two at least.
    """
    begin = time.monotonic()
    once()
    rates: list[float] = []
    while len(rates) < repeats and (len(rates) < LEAST_REPEATS or time.monotonic() - begin < PATIENCE_S):
        rates.append(size / once())
    return _summary(link, size, rates, threads)


def _summary(link: str, size: int, rates: Sequence[float], threads: int = 1) -> dict[str, Any]:
    return {
        "link": link,
        "bytes": size,
        "threads": threads,
        "repeats": len(rates),
        "median": statistics.median(rates),
        "min": min(rates),
        "max": max(rates),
    }


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e9


def _at_once(threads: int, work: Callable[[int], Any]) -> float:
    """Seconds that ``work(0 … threads - 1)`` takes, each in a thread of its own; the threads start before the clock."""
    if threads == 1:
        return _timed(lambda: work(0))
    ready = threading.Barrier(threads + 1)

    def wait_and_work(number: int) -> None:
        ready.wait(60)
        work(number)

    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(wait_and_work, number) for number in range(threads)]
        ready.wait(60)
        return _timed(lambda: [job.result() for job in jobs])


def device_copies(size: int) -> Iterator[dict[str, Any]]:
    """Copies between the first visible GPU and pinned and pageable host memory, timed by device events.

    Raises RuntimeError where torch sees no GPU, ImportError without torch.
    """
    import torch  # noqa: PLC0415 (not there for the harness, and seconds to import)

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")

    def by_events(destination: Any, source: Any) -> Callable[[], float]:
        def once() -> float:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            destination.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return once

    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    for name, pinned in (("pinned", True), ("pageable", False)):
        # Written once, so that every page exists before the clock starts.
        host = torch.full((size,), 1, dtype=torch.uint8, pin_memory=pinned)
        yield measure(f"{name}_h2d", size, REPEATS, by_events(device, host))
        yield measure(f"{name}_d2h", size, REPEATS, by_events(host, device))
        del host


def host_copies(threads: int) -> Iterator[dict[str, Any]]:
    """memcpy from small (in cache) to large (in memory) sizes, by one thread and by ``threads``, each its own part."""
    for count in sorted({1, threads}):
        for size in (MIB // 4, 4 * MIB, 64 * MIB, 256 * MIB):
            source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
            source.write(b"\x01" * size)
            target.write(b"\x02" * size)
            source_at = ctypes.addressof(ctypes.c_char.from_buffer(source))
            target_at = ctypes.addressof(ctypes.c_char.from_buffer(target))
            times, part = max(1, 128 * MIB // size), size // count

            def copy(
                number: int, to: int = target_at, at: int = source_at, part: int = part, times: int = times
            ) -> None:
                for _ in range(times):
                    ctypes.memmove(to + number * part, at + number * part, part)

            def once(copy: Callable[[int], None] = copy, count: int = count, times: int = times) -> float:
                return _at_once(count, copy) / times

            yield measure("host_memcpy", part * count, REPEATS, once, threads=count)


def loopback(threads: int) -> Iterator[dict[str, Any]]:
    """TCP over 127.0.0.1 in pieces of 1 MiB, 256 MiB in all: one stream, and ``threads`` at once."""
    total, piece = 256 * MIB, b"\x01" * MIB
    for count in sorted({1, threads}):
        each = total // MIB // count or 1

        def once(count: int = count, each: int = each) -> float:
            with socket.create_server(("127.0.0.1", 0), backlog=count) as server:
                receivers: list[threading.Thread] = []

                def receive(peer: socket.socket) -> None:
                    buffer = bytearray(MIB)
                    with peer:
                        while peer.recv_into(buffer):
                            pass

                streams = []
                for _ in range(count):
                    streams.append(socket.create_connection(server.getsockname(), timeout=60))
                    thread = threading.Thread(target=receive, args=(server.accept()[0],), daemon=True)
                    thread.start()
                    receivers.append(thread)

                def send(number: int) -> None:
                    with streams[number] as stream:
                        for _ in range(each):
                            stream.sendall(piece)
                    receivers[number].join(60)

                return _at_once(count, send)

        yield measure("tcp_loopback", each * count * MIB, REPEATS, once, threads=count)


def disk(folder: Path, chunk: int, total: int, threads: int = 1) -> Iterator[dict[str, Any]]:
    """Write and read files of ``chunk`` bytes in ``folder`` past the page cache (O_DIRECT), by one and ``threads``.

    ``chunk`` is rounded up to whole pages, which O_DIRECT wants. A file system that refuses it is measured through its
    cache, under a link name that says so. Raises OSError where the folder can't be written, or is full.
    """
    chunk = -(-chunk // mmap.PAGESIZE) * mmap.PAGESIZE
    with tempfile.TemporaryDirectory(dir=folder, prefix="kvladder-roofline-") as scratch:
        direct, suffix = os.O_DIRECT, "_direct"
        try:
            os.close(os.open(Path(scratch, "probe"), os.O_WRONLY | os.O_CREAT | direct))
        except OSError:
            direct, suffix = 0, "_cached"
        for count in sorted({1, threads}):
            each = max(1, total // chunk // count)
            # Page aligned, and each thread its own.
            buffers = [mmap.mmap(-1, chunk) for _ in range(count)]
            for buffer in buffers:
                buffer.write((os.urandom(min(chunk, MIB)) * (chunk // min(chunk, MIB) + 1))[:chunk])

            def transfer(
                number: int, flags: int, act: Callable[[int, Any], int], buffers: Any = buffers, each: int = each
            ) -> None:
                for place in range(each):
                    handle = os.open(Path(scratch, f"{number}-{place}"), flags | direct)
                    try:
                        if act(handle, buffers[number]) != chunk:
                            raise OSError("short transfer")
                    finally:
                        os.close(handle)

            def write(transfer: Callable[..., None] = transfer, count: int = count) -> float:
                return _at_once(count, lambda number: transfer(number, os.O_WRONLY | os.O_CREAT, os.write))

            def read(transfer: Callable[..., None] = transfer, count: int = count) -> float:
                return _at_once(
                    count, lambda number: transfer(number, os.O_RDONLY, lambda handle, into: os.readv(handle, [into]))
                )

            # Rates are of the whole set of files; the chunk is what one call moves.
            size = each * count * chunk
            yield {**measure(f"disk_write{suffix}", size, REPEATS, write, threads=count), "chunk": chunk}
            yield {**measure(f"disk_read{suffix}", size, REPEATS, read, threads=count), "chunk": chunk}


def transfer_engine(chunk: int) -> Iterator[dict[str, Any]]:
    """Mooncake's transfer engine between two processes over TCP on 127.0.0.1, host memory to host memory.

    Of 128 MiB in one call, and in objects of ``chunk`` bytes. It is timed in processes of its own, which end by
    themselves when they hang. Raises RuntimeError where not all could be measured, after what could.
    """
    script = Path(__file__).with_name("transfer_engine.py")
    with tempfile.TemporaryDirectory(prefix="kvladder-transfer-engine-") as scratch:
        out = Path(scratch, "times.json")
        command = [sys.executable, str(script), "--out", str(out), "--chunk", str(chunk)]
        command += ["--deadline", str(TRANSFER_ENGINE_S)]
        subprocess.run(command, check=False, timeout=TRANSFER_ENGINE_S + 10, stdin=subprocess.DEVNULL, cwd=scratch)
        found = json.loads(out.read_bytes())
    for item in found["transfers"]:
        rates = [item["bytes"] / second for second in item["seconds"]]
        yield {**_summary(f"transfer_engine_{item['way']}", item["bytes"], rates), "chunk": item["chunk"]}
    if found["problem"] is not None:
        raise RuntimeError(found["problem"])


def main() -> None:
    """Measure everything and write one JSON file: ``links``, ``problems``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device-bytes", type=int, default=0, help="bytes of a copy to and from the GPU; 0: no GPU")
    parser.add_argument("--threads", type=int, default=1, help="threads that engine and side processes may copy with")
    parser.add_argument("--folder", type=Path, help="folder on the disk of the file tier")
    parser.add_argument("--chunk", type=int, default=2 * MIB, help="bytes of one file of the tier")
    parser.add_argument("--disk-bytes", type=int, default=128 * MIB, help="bytes written to the disk at once")
    parser.add_argument("--disk-threads", type=int, default=1, help="threads that read and write the tier's files")
    parser.add_argument("--object", type=int, help="bytes of an object that goes through Mooncake's transfer engine")
    options = parser.parse_args()
    steps: dict[str, Iterator[dict[str, Any]]] = {
        "host memory": host_copies(options.threads),
        "loopback": loopback(options.threads),
    }
    if options.device_bytes:
        steps["device"] = device_copies(options.device_bytes)
    if options.folder is not None:
        steps["disk"] = disk(options.folder, options.chunk, options.disk_bytes, options.disk_threads)
    if options.object is not None:
        steps["transfer engine"] = transfer_engine(options.object)
    links: list[dict[str, Any]] = []
    problems: list[str] = []
    for name, step in steps.items():
        try:
            links.extend(step)
        except Exception as error:  # one link that can't be measured must not cost the others
            problems.append(f"{name}: {type(error).__name__}: {error}")
    text = json.dumps({"links": links, "problems": problems}, indent=1)
    options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
