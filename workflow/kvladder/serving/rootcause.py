"""The one line of a server's log that says why it died."""

from __future__ import annotations

import re
from pathlib import Path

TAIL_BYTES = 4 * 2**20
"""Only the end of a log is searched; an engine dies soon after it says why."""
MAX_CHARS = 500

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# "(EngineCore_DP0 pid=71) ERROR 11-29 16:35:01 [core.py:840] text", "[rank0]: text", and each part may be missing.
_SOURCE = re.compile(r"^\(([\w.-]+(?: \w+=\d+)* pid=\d+[^)]*)\) ?")
_LEVEL = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? (?:\[[^\]]*\] ?)?")
_RANK = re.compile(r"^\[rank\d+\]: ?")

_TRACEBACK = "Traceback (most recent call last):"
_SURVIVED = ("DEBUG", "INFO", "WARNING")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?::\s|$)")
# Messages that go on in the next lines.
_CONTINUED = re.compile(r"(?::|validation errors? for \S+)$")
_CONTINUATION_LINES = 2
# These point at a cause that was logged elsewhere.
_POINTER = re.compile(
    r"see (?:the )?(?:root cause|stack trace)|check the stack trace|Engine core initialization failed|EngineDeadError"
    r"|Engine process failed to start|WorkerProc initialization failed|died unexpectedly",
    re.IGNORECASE,
)
# These say that something failed and never why; the last one is in the log of every healthy Mooncake client.
_EMPTY = re.compile(
    r"^EngineCore (?:failed to start|encountered a fatal error)|^WorkerProc failed to start"
    r"|^AsyncLLM output_handler failed\.$"
    r"|^(?:SystemExit|KeyboardInterrupt|GeneratorExit|(?:[\w.]+\.)?CancelledError)\b"
    r"|Local segment descriptor not found$"
)
_PLAIN_ERROR = re.compile(
    r"(?i:\bfatal\b|\bpanicked at|\bsegfault|\bsegmentation fault|\bterminate called|what\(\):)"
    r"|(?i:cannot open shared object|\berror:|\[(?:error|critical|fatal)\])"
    r"|^E(?:\d{4}|\d{8}) \d\d:|\b(?:ERROR|CRITICAL)\b|^[\w.]*(?:Error|Exception): "
)


def root_cause(text: str) -> str | None:
    """Return the line that says why the writer of ``text`` died, without the log's own prefixes; None if none does.

    That is the last exception that a traceback ends in, before the first line that only points at another
    ("See root cause above"); with no traceback, the last line that reports an error.
    """
    lines = [_strip(raw) for raw in _ANSI.sub("", text).splitlines()]
    exceptions: list[tuple[int, str]] = []
    errors: list[tuple[int, str]] = []
    pointers: list[int] = []
    counts: dict[str, bool] = {}  # by source that is inside a traceback: whether that one counts
    previous: dict[str, str] = {}
    for number, (source, level, line) in enumerate(lines):
        before, previous[source] = previous.get(source, ""), line
        if line.startswith(_TRACEBACK):
            # The interpreter's own sighs at shutdown are no cause, nor is what the writer only warned about and
            # survived: every vLLM 0.26 without a tokenizer logs a whole traceback when it starts.
            counts[source] = level not in _SURVIVED and not before.startswith("Exception ignored in")
        elif source in counts and not _EXCEPTION.match(line):
            counts[source] &= "resource_tracker.py" not in line
        elif _POINTER.search(line):
            pointers.append(number)
            counts.pop(source, None)
        elif source in counts:
            if counts.pop(source) and not _EMPTY.search(line):
                exceptions.append((number, line))
        elif (level in ("ERROR", "CRITICAL") or (level is None and _PLAIN_ERROR.search(line))) and not _EMPTY.search(
            line
        ):
            errors.append((number, line))
    for found in (exceptions, errors):
        if found:
            early = [number for number, _ in found if not pointers or number < pointers[0]]
            return _message(lines, (early or [found[0][0]])[-1])
    return lines[pointers[0]][2].strip()[:MAX_CHARS] if pointers else None


def _message(lines: list[tuple[str, str | None, str]], number: int) -> str:
    """Return the message that starts at line ``number``, with what follows it where its first line says nothing."""
    source, _, text = lines[number]
    if _CONTINUED.search(text):
        following = [line.strip() for other, _, line in lines[number + 1 :] if other == source and line.strip()]
        text = " ".join([text, *following[:_CONTINUATION_LINES]])
    return text.strip()[:MAX_CHARS]


def log_cause(log: Path, start: int = 0) -> str | None:
    """Return the root cause in a log file from byte ``start`` on; None where it can't be read or says nothing."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(start, log.stat().st_size - TAIL_BYTES))
            return root_cause(stream.read().decode(errors="replace"))
    except OSError:
        return None


def _strip(raw: str) -> tuple[str, str | None, str]:
    """Split a log line into its source, its level (None = a bare line) and the text."""
    source, level = "", None
    if match := _SOURCE.match(raw):
        source, raw = match[1], raw[match.end() :]
    if match := _LEVEL.match(raw):
        level, raw = match[1], raw[match.end() :]
    if match := _RANK.match(raw):
        source, raw = source + match[0], raw[match.end() :]
    return source, level, raw
