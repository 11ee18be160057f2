"""This project's own client, in a process of its own; run as a module, it is that process.

The server's number comes back in the id of the answer.
"""

from __future__ import annotations

import json
import os
import re
import sys
from itertools import pairwise
from pathlib import Path

from kvladder import __version__
from kvladder.bench.clients.base import MODEL, Job, LoadClient, Observation, draw
from kvladder.config.bench import BenchCell
from kvladder.config.traffic import PassPlan, Request
from kvladder.load import Limits, PassResult, Target, run_in_processes, write_records

_RESPONSE = re.compile(r"cmpl-(\d+)")
_JOB = "job.json"
_RECORDS = "requests.jsonl"
SUMMARY = "summary.json"
"""What the process says about itself: pass_cpu_s, extra_rss_bytes, loop_lag_max_ns."""
# A stream without end must not take the pass to the cell's deadline, with a second wave behind the first.
_REQUEST_SHARE = 4


class Kvladder(LoadClient):
    """`kvladder.load`, a process on each core, under the interpreter that runs this."""

    distribution = "kvladder"

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    @property
    def version(self) -> str:
        return __version__

    def prepare(self, job: Job) -> list[str]:
        text = json.dumps({"cell": job.cell.model_dump(), "port": job.port, "prompts": len(job.prompts)})
        (job.folder / _JOB).write_text(text, encoding="utf-8")
        return [str(self.python), "-m", __name__, str(job.folder)]

    def read(self, folder: Path) -> list[Observation]:
        with (folder / _RECORDS).open(encoding="utf-8") as file:
            return [_observation(json.loads(line)) for line in file]


def _observation(record: dict[str, object]) -> Observation:
    times = record["chunk_ns"]
    assert isinstance(times, list)  # noqa: S101
    named = _RESPONSE.fullmatch(str(record["response_id"]))
    send, first = record["send_ns"], record["first_token_ns"]
    timed = isinstance(send, int) and isinstance(first, int)
    return Observation(
        ok=record["status"] == "ok",
        ttft_ns=first - send if timed else None,  # type: ignore[operator]
        gaps_ns=[later - earlier for earlier, later in pairwise(times)],
        number=int(named[1]) if named else None,
        send_ns=send if timed else None,  # type: ignore[arg-type]
        first_token_ns=first if timed else None,  # type: ignore[arg-type]
    )


def main(folder: Path) -> None:
    """Send the pass of ``job.json``; write the records and the summary."""
    job = json.loads((folder / _JOB).read_text(encoding="utf-8"))
    cell = BenchCell(**job["cell"])
    prompts = draw(cell.seed, job["prompts"], cell.prompt_tokens)
    requests = [Request(i, str(i), prompts[i % len(prompts)], cell.output_tokens) for i in range(cell.requests)]
    plan = PassPlan("bench", "warm", 0, cell.concurrency, requests)
    before = _memory("VmRSS")
    limits = Limits(connect_s=5, request_s=cell.timeout_s / _REQUEST_SHARE, stall_s=10)
    cores = sorted(os.sched_getaffinity(0))
    result = run_in_processes(Target("127.0.0.1", job["port"], MODEL), plan, limits, cell.cores, cores=cores)
    peak = _memory("VmHWM")
    # Several processes have what this one has, and what they send it: only one says what a pass takes.
    extra = max(0, peak - before - _payload(result)) if cell.cores == 1 else None
    summary = {
        "pass_cpu_s": result.client_cpu_ns / 1e9,
        "extra_rss_bytes": extra,
        "loop_lag_max_ns": result.loop_lag_max_ns,
    }
    write_records(folder / _RECORDS, result.records)
    (folder / SUMMARY).write_text(json.dumps(summary), encoding="utf-8")


def _memory(name: str) -> int:
    """A size of this process in bytes. Its ru_maxrss would not do: what the parent had before exec is in it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024


def _payload(result: PassResult) -> int:
    """Bytes that were sent, each distinct request once, and received."""
    distinct = {id(request.prompt): 6 * len(request.prompt) for request in result.plan.requests}
    return sum(distinct.values()) + sum(stream.received for stream in result.streams)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
