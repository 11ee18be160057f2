"""The machine a trial runs on, and the harness that runs it."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from kvladder import __version__
from kvladder.config.records import HostRecord
from kvladder.serving.devices import device_handle

REVISION = "KVLADDER_REVISION"
"""Environment variable that names the git revision where the tree was copied to a host without its repository."""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def describe_gpus(devices: list[str], nvml: Any = None) -> list[dict[str, Any]]:
    """Name, memory (bytes), PCIe generation and width, driver of each leased GPU; without NVML's answer no key.

    ``nvml`` stands in for the ``pynvml`` module in tests.
    """
    if not devices:
        return []
    if nvml is None:
        import pynvml  # noqa: PLC0415 (only where GPUs are)

        nvml = pynvml
    gpus: list[dict[str, Any]] = []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return [{"device": device} for device in devices]
    for device in devices:
        gpu: dict[str, Any] = {"device": device}
        try:
            handle = device_handle(nvml, device)
        except nvml.NVMLError:
            gpus.append(gpu)
            continue
        queries: dict[str, Callable[[Any], Any]] = {
            "name": nvml.nvmlDeviceGetName,
            "uuid": nvml.nvmlDeviceGetUUID,
            "memory_bytes": lambda h: int(nvml.nvmlDeviceGetMemoryInfo(h).total),
            "pcie_generation_max": lambda h: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(h)),
            "pcie_width_max": lambda h: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(h)),
            "driver": lambda _: nvml.nvmlSystemGetDriverVersion(),
        }
        for key, query in queries.items():
            try:
                value = query(handle)
            except nvml.NVMLError:
                continue
            gpu[key] = value.decode() if isinstance(value, bytes) else value
        gpus.append(gpu)
    return gpus


def describe_host(devices: list[str]) -> HostRecord:
    """Identity and size of this machine. The id changes at every boot: trials of two boots aren't one block.

    It is ``unknown`` where neither the machine nor the boot has an id to read.
    """
    identity = _read("/etc/machine-id") + _read("/proc/sys/kernel/random/boot_id")
    return HostRecord(
        host_id=hashlib.sha256(identity.encode()).hexdigest()[:12] if identity else "unknown",
        cpu=_cpu_model(),
        cores=os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        kernel=platform.release(),
        gpus=describe_gpus(devices),
    )


def describe_harness(repository: Path) -> dict[str, str]:
    """kvladder's version, its git revision, Python's version.

    '+changes' where the tree differs; outside git it is what the environment says (`REVISION`), else 'unknown'.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True, timeout=10
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    revision = git("rev-parse", "HEAD")
    if revision is not None and git(
        "status", "--porcelain", "--untracked-files=no", "--", "workflow", "envs", "patches"
    ):
        revision += "+changes"
    return {
        "kvladder": __version__,
        "revision": revision or os.environ.get(REVISION) or "unknown",
        "python": platform.python_version(),
    }
