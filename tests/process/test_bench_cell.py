"""Whole cells: the own client against the reference server, and clients that fail or never end."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from kvladder.bench import cell as cells
from kvladder.bench.clients.base import Job, LoadClient, Observation
from kvladder.bench.clients.registry import CLIENTS
from kvladder.bench.tables import read_cell
from kvladder.bench.truth import ttft_bias
from kvladder.bench.usage import measure, tree
from kvladder.config.bench import BenchBlock, BenchCell, BenchConfig, CellRecord, plan

MS = 1_000_000


def cell(**changes: object) -> BenchCell:
    block = BenchBlock(
        clients=["kvladder"], concurrency=[8], steady_requests=16, ttft_ms=20, itl_ms=5, output_tokens=4, timeout_s=60
    )
    (base,) = plan(BenchConfig(experiment="x", spin_us=0, blocks=[block]))
    return base.model_copy(update=changes)


def test_the_own_client_is_paired_and_measured(binary: Path, tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    record = cells.run(cell(), binary, tmp_path)
    assert os.sched_getaffinity(0) == before
    assert CellRecord.model_validate_json((tmp_path / "cell.json").read_text(encoding="utf-8")) == record
    assert (record.exit_code, record.error, record.client_ok, record.client_failed) == (0, None, 24, 0)
    requests = pl.read_parquet(tmp_path / "requests.parquet")
    assert requests.height == 24 and requests["client_ttft_ns"].null_count() == 0
    assert sorted(requests["number"]) == list(range(24))
    # Moments and durations tell the same story: bias is what lies before the arrival and behind the write.
    before_arrival = requests["arrival_ns"] - requests["client_send_ns"]
    behind_write = requests["client_first_token_ns"] - requests["write_ns"].list.first()
    stamps = requests.select("client_ttft_ns", "arrival_ns", "write_ns").iter_rows()
    assert (before_arrival + behind_write).to_list() == [ttft_bias(*row) for row in stamps]
    assert behind_write.min() > 0  # type: ignore[operator]
    row = read_cell(tmp_path)
    assert (row["paired"], row["gaps"]) == (24, 72)
    assert record.pass_cpu_s is not None and 0 < record.pass_cpu_s < (record.cpu_s or 0)
    assert record.peak_rss_bytes > 10_000_000 and record.server_cpu_s > 0
    assert row["client_failed"] == 0 and 0 < row["held"] <= 8.01
    assert row["server_jitter_p50_ms"] is None or row["server_jitter_p50_ms"] < 20


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are asked for")
def test_on_two_cores_the_own_client_runs_two_processes(binary: Path, tmp_path: Path) -> None:
    record = cells.run(cell(cores=2, concurrency=9, requests=40), binary, tmp_path)
    assert (record.exit_code, record.error, record.client_ok, record.client_failed) == (0, None, 40, 0)
    requests = pl.read_parquet(tmp_path / "requests.parquet")
    assert sorted(requests["number"]) == list(range(40)) and requests["client_ttft_ns"].null_count() == 0
    row = read_cell(tmp_path)
    assert (row["cores"], row["paired"], row["extra_mb_per_1000"]) == (2, 40, None)
    assert record.pass_cpu_s is not None and record.pass_cpu_s > 0 and row["held"] <= 9.01
    # One process more than the one that asks: the most that was seen at a time.
    single = cells.run(cell(concurrency=9, requests=40), binary, tmp_path / "single")
    assert record.peak_rss_bytes > 1.5 * single.peak_rss_bytes


class Fake(LoadClient):
    """A client whose program is a line of Python."""

    distribution = "kvladder"

    def __init__(self, code: str) -> None:
        self.code = code

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    @property
    def version(self) -> str:
        return "0"

    def prepare(self, job: Job) -> list[str]:
        return [sys.executable, "-c", self.code]

    def read(self, folder: Path) -> list[Observation]:
        names = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return [Observation(ok=True, ttft_ns=1, gaps_ns=[], number=number) for number in names]


def test_a_client_that_fails_is_a_result(binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLIENTS, "vllm", Fake("import sys; print('no such option'); sys.exit(3)"))
    record = cells.run(cell(client="vllm"), binary, tmp_path)
    assert record.exit_code == 3 and record.client_ok is None
    assert (
        record.error is not None and "FileNotFoundError" in record.error and "the server had 0 requests" in record.error
    )
    assert (tmp_path / "client.log").read_text() == "no such option\n"
    row = read_cell(tmp_path)
    assert (row["served"], row["paired"], row["stopped"], row["ttft_bias_p50_ms"]) == (0, 0, False, None)


def test_a_report_that_can_not_be_paired_is_said(binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLIENTS, "vllm", Fake("open('result.json', 'w').write('[0]')"))
    record = cells.run(cell(client="vllm"), binary, tmp_path)
    assert record.exit_code == 0 and record.client_ok is None
    assert record.error is not None and "a request 0 that the server never had" in record.error


def test_a_client_that_never_ends_is_stopped_with_its_children(
    binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '987']); x = bytearray(80_000_000); time.sleep(99)"
    monkeypatch.setitem(CLIENTS, "aiperf", Fake(code))
    begin = time.monotonic()
    record = cells.run(cell(client="aiperf", timeout_s=2), binary, tmp_path)
    assert time.monotonic() - begin < 15
    assert (record.exit_code, record.cpu_s) == (None, None)
    assert 2 <= record.wall_s < 10 and record.peak_rss_bytes > 80_000_000
    assert read_cell(tmp_path)["stopped"] is True
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert b"sleep\x00987\x00" not in commands


def test_the_own_client_ends_an_endless_stream(binary: Path, tmp_path: Path) -> None:
    record = cells.run(cell(fault="endless", requests=8, timeout_s=20), binary, tmp_path)
    assert (record.exit_code, record.client_ok, record.client_failed) == (0, 0, 8)
    assert record.wall_s < 20
    row = read_cell(tmp_path)
    assert row["paired"] == 8 and row["first_wave_bias_p50_ms"] is not None


def test_usage_counts_children() -> None:
    pid = os.getpid()
    assert tree(pid)[0] == pid
    sample = measure(pid)
    assert sample is not None and sample.rss_bytes > 1_000_000 and sample.cpu_ns > 0
    assert measure(2**22 + 1) is None
