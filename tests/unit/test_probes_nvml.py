"""Boards without a reading: unknown, never 0, and no crash (reports: nvitop PR#208, NeMo RL PR#2203)."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvladder.config.records import ProbeSample
from kvladder.probes import sampler
from kvladder.probes.sampler import Device, Host
from kvladder.provenance.host import describe_gpus


class FakeNvml:
    """NVML of a unified-memory board: power and name work, memory and PCIe don't; every ``fail_every``-th fails."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, fail_every: int = 0) -> None:
        self._calls = itertools.count(1)
        self._fail_every = fail_every

    def _call(self) -> None:
        if self._fail_every and next(self._calls) % self._fail_every == 0:
            raise self.NVMLError("lost")

    def _unsupported(self, *_: Any) -> Any:
        raise self.NVMLError("Not Supported")

    nvmlDeviceGetMemoryInfo = nvmlDeviceGetClockInfo = _unsupported
    nvmlDeviceGetMaxPcieLinkGeneration = nvmlDeviceGetMaxPcieLinkWidth = _unsupported

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPowerUsage(self, _: int) -> int:
        self._call()
        return 250_000

    def nvmlDeviceGetUtilizationRates(self, _: int) -> SimpleNamespace:
        self._call()
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetFieldValues(self, _: int, fields: list[int]) -> list[SimpleNamespace]:
        return [SimpleNamespace(nvmlReturn=3, value=SimpleNamespace(ullVal=0)) for _ in fields]

    def nvmlDeviceGetName(self, _: int) -> bytes:
        return b"NVIDIA GB10"

    def nvmlDeviceGetUUID(self, _: int) -> str:
        return "GPU-1"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"


def test_unsupported_readings_are_unknown_and_others_work() -> None:
    reading = Device(FakeNvml(), ["0"]).read()
    assert reading == {
        "gpu_util": 0.5,
        "gpu_memory_bytes": None,
        "gpu_power_mw": 250_000,
        "gpu_sm_mhz": None,
        "pcie_tx_bytes": None,
        "pcie_rx_bytes": None,
    }


def test_readings_of_two_devices_are_summed_and_utilisation_is_their_mean() -> None:
    reading = Device(FakeNvml(), ["0", "1"]).read()
    assert reading["gpu_power_mw"] == 500_000
    assert reading["gpu_util"] == pytest.approx(0.5)


def test_a_call_that_fails_now_and_then_leaves_a_hole_and_no_crash() -> None:
    device = Device(FakeNvml(fail_every=10), ["0"])
    power = [device.read()["gpu_power_mw"] for _ in range(50)]
    assert power.count(250_000) > 30
    assert None in power
    assert 0 not in power


def test_host_record_leaves_out_what_the_board_does_not_say() -> None:
    assert describe_gpus(["0"], FakeNvml()) == [
        {"device": "0", "name": "NVIDIA GB10", "uuid": "GPU-1", "driver": "580.1"}
    ]
    assert describe_gpus([]) == []


def test_the_block_begins_with_the_first_sample_on_disk(tmp_path: Path) -> None:
    out = tmp_path / "probes.jsonl"
    with sampler.sampling(out, 0.05, []):
        first = out.read_text(encoding="utf-8").splitlines()
        time.sleep(0.3)
    samples = [ProbeSample.model_validate_json(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert first
    assert len(samples) > len(first)
    assert samples[-1].cpu_busy is not None
    assert samples[-1].rss_bytes
    taken = [sample.sampler_cpu_ns for sample in samples]
    assert None not in taken and taken == sorted(taken) and taken[0] < taken[-1]  # type: ignore[type-var]


def test_a_sampler_that_does_not_come_up_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler.sys, "executable", "/bin/false")
    begin = time.monotonic()
    with sampler.sampling(tmp_path / "probes.jsonl", 0.05, []):
        pass
    assert time.monotonic() - begin < 5


def test_what_ended_processes_of_ours_took_is_no_other_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client processes end with their pass, in the middle of a sample."""
    busy = 0.0
    monkeypatch.setattr(sampler, "cpu_seconds", lambda: (0.0, busy))
    host = Host(os.getpid())
    host.read()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.4: pass"], check=True)
    busy = 0.3
    found = host.read()
    assert found["cpu_busy"] and found["cpu_other"] == 0
