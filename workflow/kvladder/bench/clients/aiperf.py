"""AIPerf: prompts as text from a file; requests are paired by the X-Request-Id that it sends and exports."""

from __future__ import annotations

import json
from pathlib import Path

from kvladder.bench.clients.base import (
    MODEL,
    Job,
    LoadClient,
    Observation,
    nanoseconds,
    peer_folder,
    words,
    write_lines,
    write_tokenizer,
)

_RECORDS = "profile_export.jsonl"


class AIPerf(LoadClient):
    """``aiperf profile``."""

    distribution = "aiperf"
    folder = peer_folder("aiperf")

    def prepare(self, job: Job) -> list[str]:
        count = min(len(job.prompts), job.cell.requests)
        data = job.folder / "prompts.jsonl"
        length = job.cell.output_tokens
        write_lines(data, [{"text": words(job.prompt(index)), "output_length": length} for index in range(count)])
        write_tokenizer(job.folder / "tokenizer")
        options = {
            "--model": MODEL,
            "--url": job.url,
            "--endpoint-type": "completions",
            "--input-file": str(data),
            "--custom-dataset-type": "single_turn",
            "--concurrency": str(job.cell.concurrency),
            "--request-count": str(job.cell.requests),
            "--tokenizer": str(job.folder / "tokenizer"),
            "--extra-inputs": "ignore_eos:true",
            "--output-artifact-dir": str(job.folder),
            "--export-level": "records",
            "--ui": "none",
        }
        flags = ["--streaming", "--use-server-token-count"]
        program = str(self.python.with_name("aiperf"))
        return [program, "profile", *flags, *(part for option in options.items() for part in option)]

    def read(self, folder: Path) -> list[Observation]:
        with (folder / _RECORDS).open(encoding="utf-8") as file:
            return [_observation(json.loads(line)) for line in file]


def _observation(record: dict[str, dict[str, object]]) -> Observation:
    ttft, gaps = _value(record, "time_to_first_token"), _value(record, "inter_chunk_latency")
    return Observation(
        ok=not record.get("error"),
        ttft_ns=nanoseconds(ttft, 1e-3) if isinstance(ttft, int | float) else None,
        gaps_ns=[nanoseconds(gap, 1e-3) for gap in gaps] if isinstance(gaps, list) else [],
        request_id=str(record["metadata"]["x_request_id"]),
    )


def _value(record: dict[str, dict[str, object]], name: str) -> object:
    """A metric's value in milliseconds; None where the record has none. Raises ValueError for another unit."""
    metric = record["metrics"].get(name)
    if not isinstance(metric, dict):
        return None
    if metric["unit"] != "ms":
        raise ValueError(f"{name}: {metric['unit']!r} instead of milliseconds")
    return metric["value"]
