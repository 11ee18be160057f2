"""Progress lines of a job: on the terminal as they come, and in its log."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Self


class Progress:
    """A context manager that is called with one line at a time."""

    def __init__(self, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("w", encoding="utf-8")

    def __call__(self, line: str) -> None:
        """Show one line now."""
        print(line, file=sys.stderr, flush=True)
        self.detail(line)

    def detail(self, text: str) -> None:
        """For the log alone."""
        self._log.write(text + "\n")
        self._log.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()
