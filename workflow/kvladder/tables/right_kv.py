"""What right-kv measured on every trial that was compared, the invalid ones too: those are what it is for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvladder.tables.raw import RawTrial

Row = dict[str, Any]

VERDICTS = {None: "not checked", 0: "right"}
"""By the number of prompts beyond the limit, None without one; any other number is ``wrong``."""


def right_kv_rows(raw: Sequence[RawTrial]) -> Iterable[Row]:
    """Rows of the table ``right_kv``: one a trial × hit pass."""
    for trial in raw:
        for part in trial.verdict.deviations if trial.verdict is not None else []:
            yield {
                **trial.key,
                "pass": part.name,
                "prompts": part.prompts,
                "median": part.median,
                "max": part.largest,
                "limit": part.limit,
                "beyond": part.beyond,
                "flipped": part.flipped,
                "equal_to_control": part.equal,
                "verdict": VERDICTS.get(part.beyond, "wrong"),
            }
