"""Sample host and device at a fixed distance into ``probes.jsonl``.

Runs as a process of its own (``python -m kvladder.probes.sampler``): in the client's process the 20 ms that NVML takes
for one PCIe reading would show up in the times the client measures. Ends on SIGTERM or when its parent is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from kvladder.config.records import ProbeSample
from kvladder.serving.devices import device_handle

_COME_UP_S = 20.0
_FIELD_PCIE_TX = 197
_FIELD_PCIE_RX = 198


class Device:
    """NVML readings of the leased GPUs, summed; whatever the device doesn't support is None, never 0.

    ``nvml`` is the ``pynvml`` module or an object with its functions.
    """

    def __init__(self, nvml: Any, devices: list[str]) -> None:
        self._nvml = nvml
        self._handles: list[Any] = []
        try:
            nvml.nvmlInit()
            self._handles = [device_handle(nvml, device) for device in devices]
        except nvml.NVMLError:
            self._handles = []

    def _sum(self, read: Callable[[Any], float]) -> int | None:
        try:
            return int(sum(read(handle) for handle in self._handles)) if self._handles else None
        except self._nvml.NVMLError:
            return None

    def _field(self, field: int) -> Callable[[Any], float]:
        def read(handle: Any) -> float:
            value = self._nvml.nvmlDeviceGetFieldValues(handle, [field])[0]
            if value.nvmlReturn != 0:
                raise self._nvml.NVMLError(value.nvmlReturn)
            # The union's valid member follows valueType; the PCIe counters are unsigned 64 bit.
            return float(value.value.ullVal)

        return read

    def read(self) -> dict[str, float | int | None]:
        """One reading, as fields of `ProbeSample`: utilisation 0–1, bytes, mW, MHz (of the first device)."""
        nvml = self._nvml
        util = self._sum(lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return {
            "gpu_util": None if util is None else util / 100 / len(self._handles),
            "gpu_memory_bytes": self._sum(lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "gpu_power_mw": self._sum(nvml.nvmlDeviceGetPowerUsage),
            "gpu_sm_mhz": self._clock(),
            "pcie_tx_bytes": self._sum(self._field(_FIELD_PCIE_TX)),
            "pcie_rx_bytes": self._sum(self._field(_FIELD_PCIE_RX)),
        }

    def _clock(self) -> int | None:
        if not self._handles:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetClockInfo(self._handles[0], self._nvml.NVML_CLOCK_SM))
        except self._nvml.NVMLError:
            return None


class Host:
    """CPU shares between two readings, and the memory of our own process tree below ``root``."""

    def __init__(self, root: int) -> None:
        self._root = psutil.Process(root)
        self._cores = psutil.cpu_count() or 1
        self._last: tuple[float, float, float] | None = None

    def _ours(self) -> tuple[float, int]:
        """CPU seconds so far, those of processes that have ended included, and resident bytes."""
        cpu, rss = 0.0, 0
        for process in [self._root, *self._root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                # Client processes come and go with each pass: what they took is then their parent's children's.
                cpu += times.user + times.system + times.children_user + times.children_system
                rss += process.memory_info().rss
        return cpu, rss

    def read(self) -> dict[str, float | int | None]:
        """One reading, as fields of `ProbeSample`; the first has no shares, there is nothing to compare with."""
        _, busy = cpu_seconds()
        ours, rss = self._ours()
        now = time.monotonic()
        last, self._last = self._last, (now, busy, ours)
        if last is None or now <= last[0]:
            return {"rss_bytes": rss}
        span = (now - last[0]) * self._cores
        share = min(max((busy - last[1]) / span, 0.0), 1.0)
        # One that ended after its parent takes its time with it: the difference may be negative.
        own = min(max((ours - last[2]) / span, 0.0), share)
        return {"cpu_busy": round(share, 4), "cpu_other": round(share - own, 4), "rss_bytes": rss}


def cpu_seconds() -> tuple[float, float]:
    """Seconds of all cores so far, and those of them that were busy; guests' time is in that of their hosts."""
    times = psutil.cpu_times()
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total, total - times.idle - getattr(times, "iowait", 0.0)


@contextlib.contextmanager
def sampling(out: Path, interval_s: float, devices: list[str]) -> Iterator[None]:
    """Sample into ``out`` (JSON lines) while the block runs; the tree below this process counts as ours.

    The block begins with the first sample on disk: an interpreter's start takes a second of a core, and would take it
    from the first pass. A sampler that doesn't come up keeps nobody waiting for long; its gate will say so.
    """
    argv = [sys.executable, "-m", "kvladder.probes.sampler", "--root", str(os.getpid()), "--out", str(out)]
    argv += ["--interval", str(interval_s), "--devices", ",".join(devices)]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _COME_UP_S
        while process.poll() is None and time.monotonic() < deadline:
            if out.exists() and out.stat().st_size > 0:
                break
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """Entry point of the sampling process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--interval", type=float, required=True)
    parser.add_argument("--devices", default="")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    host = Host(options.root)
    devices = [device for device in options.devices.split(",") if device]
    device = None
    if devices:
        import pynvml  # noqa: PLC0415 (absent NVML must not cost a CPU host anything)

        device = Device(pynvml, devices)
    with options.out.open("w", encoding="utf-8", buffering=1) as out:
        while os.getppid() == options.root:
            reading: dict[str, Any] = {**host.read(), **(device.read() if device else {})}
            sample = ProbeSample(t_ns=time.monotonic_ns(), sampler_cpu_ns=time.process_time_ns(), **reading)
            out.write(sample.model_dump_json(by_alias=True, exclude_none=True) + "\n")
            time.sleep(options.interval)


if __name__ == "__main__":
    main()
