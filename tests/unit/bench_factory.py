"""Cells of the truth bench, for tests that need one."""

from __future__ import annotations

from typing import Any

from kvladder.config.bench import BenchCell


def cell(**changes: Any) -> BenchCell:
    """One run of the own client on one core, 16 in flight, tokens at 50, 60, 70 and 80 ms; ``changes`` are fields."""
    known = {
        "client": "kvladder",
        "cores": 1,
        "prompt_tokens": 1000,
        "concurrency": 16,
        "requests": 600,
        "fault": "none",
        "ttft_ms": 50,
        "itl_ms": 10,
        "output_tokens": 4,
        "timeout_s": 9,
        "seed": 1,
        "spin_us": 0,
        "repeat": 0,
    }
    return BenchCell.model_validate(known | changes)
