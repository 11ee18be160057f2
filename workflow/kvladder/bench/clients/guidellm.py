"""GuideLLM: prompts as text from a file; the answer's id carries the server's number.

It reports a mean ITL a request and no single gaps, so its gaps are unknown.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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

_REPORT = "report.json"


class GuideLLM(LoadClient):
    """``guidellm run``."""

    distribution = "guidellm"
    folder = peer_folder("guidellm")

    def prepare(self, job: Job) -> list[str]:
        # It stops at the end of its data: one line a request.
        data = job.folder / "prompts.jsonl"
        counts = {"prompt_tokens_count": job.cell.prompt_tokens, "output_tokens_count": job.cell.output_tokens}
        texts = [words(prompt) for prompt in job.prompts]
        write_lines(data, [{"prompt": texts[i % len(texts)], **counts} for i in range(job.cell.requests)])
        write_tokenizer(job.folder / "tokenizer")
        options = {
            "--backend": f"kind=openai_http,target={job.url},model={MODEL},request_format=/v1/completions",
            "--profile": f"kind=concurrent,streams={job.cell.concurrency}",
            "--constraint": f"kind=max_requests,count={job.cell.requests}",
            "--tokenizer": f"kind=huggingface_auto,model={job.folder / 'tokenizer'}",
            "--data": f"kind=json_file,path={data}",
            "--output": f"kind=json,path={job.folder / _REPORT}",
        }
        program = str(self.python.with_name("guidellm"))
        return [program, "run", "--disable-console", *(part for option in options.items() for part in option)]

    def read(self, folder: Path) -> list[Observation]:
        report = json.loads((folder / _REPORT).read_text(encoding="utf-8"))
        requests = report["benchmarks"][0]["requests"]
        groups = ("successful", "errored", "incomplete")
        return [_observation(item, group == "successful") for group in groups for item in requests[group] or ()]


def _observation(item: dict[str, Any], ok: bool) -> Observation:
    ttft = item["time_to_first_token_ms"]
    number = (item["response_id"] or "").rpartition("-")[2]
    return Observation(
        ok=ok,
        ttft_ns=None if ttft is None else nanoseconds(ttft, 1e-3),
        gaps_ns=None,
        number=int(number) if number.isdigit() else None,
    )
