"""The roofline of the link over which a setup's KV comes to the device, measured on the host of the capture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvladder.config.rooflines import Rooflines
from kvladder.config.timelines import CaptureRecord
from kvladder.setups.base import SetupConfig

LEAST_BYTES = 1 << 28
"""A transfer that a ceiling is wanted for is at least this large: smaller copies may go at a cache's speed."""


def of_setup(setup: SetupConfig, folder: Path, known: Sequence[Rooflines]) -> float | None:
    """Bytes per second; None where the setup's link isn't known, or wasn't measured on that host."""
    record = CaptureRecord.model_validate_json((folder / "capture.json").read_text(encoding="utf-8"))
    tier = record.expected.get("tier")
    log = folder / "logs" / "engine.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    links = setup.links(tier, gpu=bool(record.host.gpus), log=text) if tier else ()
    measured = [item for item in known if item.host is not None and item.host.host_id == record.host.host_id]
    found = []
    for link in links:
        names = [link, f"{link}_h2d"]
        found += [best.max for item in measured for name in names if (best := item.ceiling(name, LEAST_BYTES))]
    return max(found, default=None)
