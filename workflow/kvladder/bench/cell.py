"""Run one cell of the bench: server and client each on their own cores, the client's processes watched."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any

from kvladder.bench.clients.base import Job, LoadClient, Observation, draw
from kvladder.bench.clients.kvladder import SUMMARY
from kvladder.bench.clients.registry import CLIENTS
from kvladder.bench.server import Schedule, Served, running
from kvladder.bench.truth import Pair, pair
from kvladder.bench.usage import Sampler, on_cores
from kvladder.config.bench import BenchCell, CellRecord
from kvladder.provenance.host import describe_host

# As many distinct prompts as keep the longest ones in a few megabytes.
_PROMPT_IDS = 1_000_000
_KILL_S = 5
_TAIL = 2000


@dataclass(frozen=True, slots=True)
class _Watch:
    """How long a client may take, where its output goes, and who runs where meanwhile."""

    timeout_s: float
    log: Path
    client_cores: Sequence[int]
    own_cores: set[int]


def run(cell: BenchCell, binary: Path, folder: Path) -> CellRecord:
    """Measure a cell into ``folder``: requests.parquet, client.log and, last, cell.json.

    A client that fails or doesn't end is a result, and the record says so. Raises ServerError when the server fails.
    """
    client = CLIENTS[cell.client]
    version = client.version
    server_cores, client_cores = assign(sorted(os.sched_getaffinity(0)), cell.cores)
    shared = not set(server_cores).isdisjoint(client_cores)
    schedule = Schedule(cell.ttft_ms, cell.itl_ms, cell.fault, 0 if shared else cell.spin_us)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="kvladder-bench-") as scratch,
        running(binary, schedule, Path(scratch, "server.jsonl"), server_cores) as server,
    ):
        count = min(cell.requests, max(1, _PROMPT_IDS // cell.prompt_tokens))
        work = Path(scratch, "client")
        work.mkdir()
        job = Job(cell, server.port, work, draw(cell.seed, count, cell.prompt_tokens))
        command = client.prepare(job)
        own_cores = _other_cores(server_cores, client_cores)
        ended = _watch(client, command, work, _Watch(cell.timeout_s, folder / "client.log", client_cores, own_cores))
        server_cpu_s = server.cpu_s
        served = server.stop()
        seen, pairs, error = _read(client, work, served)
        summary = json.loads((work / SUMMARY).read_text()) if (work / SUMMARY).is_file() else {}
    _write_requests(folder / "requests.parquet", pairs)
    record = CellRecord(
        cell=cell,
        client_version=version,
        host=describe_host([]),
        server_cores=server_cores,
        client_cores=client_cores,
        server_cpu_s=server_cpu_s,
        shared_core=shared,
        error=error,
        client_ok=None if error else sum(item.ok for item in seen),
        client_failed=None if error else sum(not item.ok for item in seen),
        **ended,
        **summary,
    )
    partial = folder / ".cell.json.partial"
    partial.write_text(record.model_dump_json(by_alias=True) + "\n", encoding="utf-8")
    partial.rename(folder / "cell.json")
    return record


def assign(available: Sequence[int], cores: int) -> tuple[list[int], list[int]]:
    """(server's cores, client's cores): the first is the server's, the client's follow; where there are too few, the
    client gets the server's as well. Raises ValueError for more cores than there are."""
    if cores > len(available):
        raise ValueError(f"a client is to have {cores} cores, and there are {len(available)}")
    return list(available[:1]), list(available[1 : cores + 1] if cores < len(available) else available[:cores])


def _other_cores(server: Sequence[int], client: Sequence[int]) -> set[int]:
    """Where this process may run meanwhile: on cores of nobody, else on the server's."""
    return os.sched_getaffinity(0) - set(server) - set(client) or set(server)


def _watch(client: LoadClient, command: list[str], work: Path, plan: _Watch) -> dict[str, Any]:
    """Run a client to its end or the deadline; gives its part of the record."""
    with plan.log.open("wb") as output, on_cores(plan.client_cores):
        start_ns = monotonic_ns()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=client.environment,
            cwd=work,
            start_new_session=True,
        )
    usage = None
    with on_cores(plan.own_cores):
        sampler = Sampler(process.pid)
        try:
            ended = _wait(process.pid, monotonic() + plan.timeout_s)
            wall_s = (monotonic_ns() - start_ns) / 1e9
            if ended is not None:
                process.returncode, usage = ended
        finally:
            samples = sampler.stop()
            _end(process)
    return {
        "start_ns": start_ns,
        "wall_s": wall_s,
        "exit_code": None if usage is None else process.returncode,
        "cpu_s": None if usage is None else usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": max((sample.rss_bytes for sample in samples), default=0),
        "samples": samples,
    }


def _wait(process: int, deadline: float) -> tuple[int, Any] | None:
    """Exit code and resource usage of a child, its own children included; None when the deadline comes first."""
    handle = os.pidfd_open(process)
    try:
        ended, _, _ = select.select([handle], [], [], max(0.0, deadline - monotonic()))
    finally:
        os.close(handle)
    if not ended:
        return None
    _, status, usage = os.wait4(process, 0)
    return os.waitstatus_to_exitcode(status), usage


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a client's session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.returncode is None:
        process.wait(_KILL_S)


def _read(client: LoadClient, work: Path, served: Sequence[Served]) -> tuple[list[Observation], list[Pair], str | None]:
    """What the client reported, paired with the log; and why nothing of it can be used, if so."""
    try:
        seen = client.read(work)
        return seen, pair(served, seen), None
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = f"no usable result ({type(error).__name__}: {error}); the server had {len(served)} requests"
        return [], pair(served, []), reason


def _write_requests(path: Path, pairs: Sequence[Pair]) -> None:
    """One row a served request, in order of arrival: the server's stamps and the client's word."""
    import polars as pl  # noqa: PLC0415

    columns: dict[str, tuple[Any, list[Any]]] = {
        "number": (pl.Int64, [p.served.number for p in pairs]),
        "connection": (pl.Int32, [p.served.connection for p in pairs]),
        "bytes": (pl.Int64, [p.served.bytes for p in pairs]),
        "state": (pl.String, [p.served.state for p in pairs]),
        "arrival_ns": (pl.Int64, [p.served.arrival_ns for p in pairs]),
        "first_read_ns": (pl.Int64, [p.served.first_read_ns for p in pairs]),
        "last_read_ns": (pl.Int64, [p.served.last_read_ns for p in pairs]),
        "due_ns": (pl.Int64, [p.served.due_ns for p in pairs]),
        "end_ns": (pl.Int64, [p.served.end_ns or None for p in pairs]),
        "write_ns": (pl.List(pl.Int64), [p.served.write_ns for p in pairs]),
        "write_took_ns": (pl.List(pl.Int64), [p.served.write_took_ns for p in pairs]),
        "client_ok": (pl.Boolean, [p.seen.ok if p.seen else None for p in pairs]),
        "client_ttft_ns": (pl.Int64, [p.seen.ttft_ns if p.seen else None for p in pairs]),
        "client_gaps_ns": (pl.List(pl.Int64), [p.seen.gaps_ns if p.seen else None for p in pairs]),
        "client_send_ns": (pl.Int64, [p.seen.send_ns if p.seen else None for p in pairs]),
        "client_first_token_ns": (pl.Int64, [p.seen.first_token_ns if p.seen else None for p in pairs]),
    }
    frame = pl.DataFrame({name: pl.Series(name, values, dtype=kind) for name, (kind, values) in columns.items()})
    frame.write_parquet(path, compression="zstd", compression_level=12)
