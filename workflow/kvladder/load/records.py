"""The record of one request, and the file it goes to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvladder.config.traffic import PassName


@dataclass(slots=True)
class RequestTrace:
    """One request's life cycle, field for field `kvladder.config.records.RequestRecord` (see there for units)."""

    workload: str
    pass_name: PassName
    round: int
    index: int
    key: str
    prompt_tokens: int
    asked_tokens: int
    eligible_ns: int
    status: Literal["ok", "failed"] = "ok"
    error: str | None = None
    http_status: int | None = None
    response_id: str | None = None
    send_ns: int | None = None
    headers_ns: int | None = None
    first_token_ns: int | None = None
    end_ns: int | None = None
    chunk_ns: list[int] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    output_tokens: int | None = None
    token_ids: list[int] | None = None
    usage_prompt_tokens: int | None = None
    usage_completion_tokens: int | None = None
    usage_cached_tokens: int | None = None
    logprobs: list[dict[str, float]] | None = None
    anomalies: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The keys and values of one line of ``<workload>.requests.jsonl``."""
        line: dict[str, Any] = {"schema": 1}
        for name in self.__slots__:
            line["pass" if name == "pass_name" else name] = getattr(self, name)
        return line


def write_records(path: Path, records: Iterable[RequestTrace], *, append: bool = False) -> int:
    """Write one JSON line a record to ``path`` (UTF-8) and return the number of lines.

    ``append`` adds a later pass to the file of its workload. Raises OSError when the file can't be written.
    """
    lines = 0
    with path.open("a" if append else "w", encoding="utf-8", newline="\n") as file:
        for record in records:
            file.write(json.dumps(record.as_json(), separators=(",", ":"), allow_nan=False) + "\n")
            lines += 1
    return lines
