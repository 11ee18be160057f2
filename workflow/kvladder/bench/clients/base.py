"""What the bench asks of a load client."""

from __future__ import annotations

import json
import os
import re
import subprocess
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvladder.config.bench import BenchCell
from kvladder.stack.paths import ROOT

MODEL = "m"
_NUMBER = re.compile(r"#(\d+)")
_FIRST_ID, _IDS = 10_000, 90_000
_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class Job:
    """One run: where to, what, and a folder of its own. Prompts repeat when there are fewer than requests."""

    cell: BenchCell
    port: int
    folder: Path
    prompts: Sequence[array[int]]

    @property
    def url(self) -> str:
        """The server's base URL."""
        return f"http://127.0.0.1:{self.port}"

    def prompt(self, index: int) -> array[int]:
        """The prompt of a request."""
        return self.prompts[index % len(self.prompts)]


@dataclass(frozen=True, slots=True)
class Observation:
    """What a client reports about one request.

    It is paired by the server's ``number`` or by the ``request_id`` of its X-Request-Id header. ``gaps_ns`` are the
    times between chunks with tokens, in order, None where the client keeps no such list. ``send_ns`` and
    ``first_token_ns`` are moments of CLOCK_MONOTONIC, of clients that record them.
    """

    ok: bool
    ttft_ns: int | None
    gaps_ns: list[int] | None
    number: int | None = None
    request_id: str | None = None
    send_ns: int | None = None
    first_token_ns: int | None = None


class LoadClient(ABC):
    """A load client: its own interpreter, its own command line, its own result file."""

    distribution: str
    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / ".venv" / "bin" / "python"

    @property
    def environment(self) -> dict[str, str]:
        """Its environment: no telemetry, no proxy, no threads beyond what it starts itself."""
        kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        quiet = {"DO_NOT_TRACK": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "VLLM_NO_USAGE_STATS": "1"}
        return kept | quiet | {"TOKENIZERS_PARALLELISM": "false"}

    @property
    def version(self) -> str:
        """Its installed version. Raises CalledProcessError when it isn't installed."""
        command = [str(self.python), "-c", _VERSION, self.distribution]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=self.environment)
        return done.stdout.strip()

    @abstractmethod
    def prepare(self, job: Job) -> list[str]:
        """Write what it reads into the job's folder; gives its command line."""

    @abstractmethod
    def read(self, folder: Path) -> list[Observation]:
        """What it reported. Raises OSError, ValueError, LookupError or TypeError for output that isn't such."""


def peer_folder(name: str) -> Path:
    """Where a peer's pins and its environment are."""
    return ROOT / "envs" / "clients" / name


def draw(seed: int, count: int, length: int) -> list[array[int]]:
    """Prompts of ids with five digits each, so that every client sends bodies of nearly the same size."""
    import random  # noqa: PLC0415

    source = random.Random(f"{seed}/{length}")  # noqa: S311
    return [array("I", source.choices(range(_FIRST_ID, _FIRST_ID + _IDS), k=length)) for _ in range(count)]


def words(prompt: array[int]) -> str:
    """A prompt as text, for clients that can't send ids: one word an id, of the same length in bytes."""
    return " ".join(map(str, prompt))


def number_of(text: str) -> int | None:
    """The server's number in an answer's text; None when it has none."""
    match = _NUMBER.match(text)
    return int(match[1]) if match else None


def write_tokenizer(folder: Path) -> None:
    """A tokenizer that knows the words of `words`: peers load one even where they count nothing with it."""
    folder.mkdir(exist_ok=True)
    vocabulary = {str(_FIRST_ID + place): place for place in range(_IDS)} | {"[UNK]": _IDS}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": _IDS, "content": "[UNK]", "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    } | dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "model_max_length": 1 << 20}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def nanoseconds(value: float, unit: float) -> int:
    """A number in seconds × ``unit`` (1e-3: milliseconds) as nanoseconds."""
    return round(value * unit * 1e9)
