"""Measure this machine's rooflines for an experiment: with the sizes and threads that its setups use."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from kvladder.config.experiment import ExperimentConfig
from kvladder.config.rooflines import Rooflines
from kvladder.probes import rooflines
from kvladder.probes.sampler import cpu_seconds
from kvladder.provenance.host import describe_host

GIB = 2**30
MOST_THREADS = 64
"""More threads than that move no more through one machine's memory, and their parts get small."""
DEADLINE_S = 180
_BLOCK = {"cuda": 16}
"""Tokens of a KV block where the configuration leaves it to the engine; 128 without a GPU."""


def measure(  # noqa: PLR0917
    config: ExperimentConfig, python: Path, device: str, env: Mapping[str, str], devices: list[str], folder: Path
) -> Rooflines:
    """Run `rooflines` with the stack's ``python`` and ``env`` on a machine that is held for it.

    ``device`` is the stack's, ``devices`` are the leased GPUs, ``folder`` is where tiers on disk lie by default. Never
    raises for what can't be measured: ``problems`` say it, and no roofline is no evidence.
    """
    # The threads of engine and side processes aren't bound as one: all cores that this job may use bound them.
    argv = [str(python), rooflines.__file__, "--threads", str(min(len(os.sched_getaffinity(0)), MOST_THREADS))]
    argv += ["--device-bytes", str(GIB if device == "cuda" else 0)]
    argv += _disk(config, device, folder)
    argv += _objects(config, device)
    begin, busy = time.monotonic(), _cpu()
    measured: dict[str, list[object]] = {"links": [], "problems": []}
    with tempfile.TemporaryDirectory(prefix="kvladder-rooflines-") as scratch:
        out = Path(scratch, "rooflines.json")
        try:
            subprocess.run(
                [*argv, "--out", str(out)], check=True, timeout=DEADLINE_S, env={**os.environ, **env}, cwd=scratch
            )
            measured = json.loads(out.read_bytes())
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            measured["problems"] = [f"the measurement ended without a result: {error}"]
    return Rooflines.model_validate(
        {
            **measured,
            "host": describe_host(devices),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - begin, 3),
            "cpu_other": _others(busy, _cpu()),
        }
    )


def _cpu() -> tuple[float, float, float]:
    """Seconds so far: of all cores, those of them that were busy, and those that children of this process used."""
    mine = os.times()
    return *cpu_seconds(), mine.children_user + mine.children_system


def _others(before: tuple[float, float, float], after: tuple[float, float, float]) -> float | None:
    """Share of all cores that others took between two readings; None where no time passed."""
    total, busy, mine = (new - old for new, old in zip(after, before, strict=True))
    return round(min(max((busy - mine) / total, 0.0), 1.0), 4) if total > 0 else None


def _disk(config: ExperimentConfig, device: str, folder: Path) -> list[str]:
    """Arguments for the disk: folder, file size and threads of the setups' tiers on disk, the largest of each.

    Without such a tier the results' own disk is measured.
    """
    block, per_token = _block(config, device), config.kv_bytes_per_token()
    tiers = [tier for tier in (setup.file_access(block) for setup in config.setups.values()) if tier is not None]
    place = next((Path(tier.path) for tier in tiers if tier.path is not None), folder)
    place.mkdir(parents=True, exist_ok=True)
    argv = ["--folder", str(place.absolute())]
    if tiers and per_token is not None:
        argv += ["--chunk", str(max(tier.chunk_tokens for tier in tiers) * per_token)]
    if tiers:
        argv += ["--disk-threads", str(max(tier.threads for tier in tiers))]
    return argv


def _objects(config: ExperimentConfig, device: str) -> list[str]:
    """Arguments for Mooncake's transfer engine: the largest object that a setup moves through it; none, where none does
    or its size isn't known."""
    block, per_token = _block(config, device), config.kv_bytes_per_token()
    tokens = max((setup.object_tokens(block) or 0 for setup in config.setups.values()), default=0)
    return ["--object", str(tokens * per_token)] if tokens and per_token is not None else []


def _block(config: ExperimentConfig, device: str) -> int:
    return config.engine.block_size or _BLOCK.get(device, 128)
