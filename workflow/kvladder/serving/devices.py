"""GPUs as the servers will see them; everything is "none" or "unknown" where NVML is missing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvladder.serving import procfs


@dataclass(frozen=True)
class GpuProcess:
    """One process with a compute context on a device; ``memory_bytes`` None = the driver doesn't say."""

    device: str
    pid: int
    name: str
    memory_bytes: int | None


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """Yield the initialised ``pynvml`` module, None on a machine without NVIDIA driver."""
    try:
        import pynvml  # noqa: PLC0415 - a machine without GPU needn't have it

        pynvml.nvmlInit()
    except Exception:  # ImportError, or any of NVML's errors
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def visible(environ: Mapping[str, str]) -> list[str]:
    """Return the ids of the devices this user may use: CUDA_VISIBLE_DEVICES where set, else all that NVML counts."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        ids = [item.strip() for item in listed.split(",")]
        # As CUDA reads it: the first invalid entry ends the list.
        end = next((place for place, item in enumerate(ids) if not item or item == "-1"), len(ids))
        return ids[:end]
    with nvml() as library:
        return [str(index) for index in range(library.nvmlDeviceGetCount())] if library else []


def lock_name(device: str) -> str:
    """Return a file name that is the same for every way to name the device (index, UUID), where NVML can tell."""
    name = device
    with nvml() as library:
        if library:
            with contextlib.suppress(library.NVMLError, ValueError):
                name = _text(library.nvmlDeviceGetUUID(device_handle(library, device)))
    return "gpu-" + re.sub(r"[^A-Za-z0-9-]", "_", name)


def processes(devices: Sequence[str]) -> list[GpuProcess]:
    """Return all compute processes on the devices; empty where NVML is missing or won't tell."""
    found = []
    with nvml() as library:
        for device in devices if library else ():
            with contextlib.suppress(library.NVMLError, ValueError):
                for entry in library.nvmlDeviceGetComputeRunningProcesses(device_handle(library, device)):
                    process = procfs.read_process(entry.pid)
                    name = process.name if process else "not visible here"
                    found.append(GpuProcess(device, entry.pid, name, entry.usedGpuMemory))
    return found


def device_handle(library: Any, device: str) -> Any:
    """Return NVML's handle of a device named by index or UUID; raises NVML's own errors."""
    if device.isdigit():
        return library.nvmlDeviceGetHandleByIndex(int(device))
    return library.nvmlDeviceGetHandleByUUID(device)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
