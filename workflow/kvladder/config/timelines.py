"""``capture.json``: what was captured of one setup for timelines, and with which profiler."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kvladder.config.base import Record, Strict
from kvladder.config.records import EffectiveConfig, HostRecord, PassRecord, ServerRecord, TrialStatus


class WindowRecord(Strict):
    """One recording of the profiler."""

    name: str = Field(description="The pass that it holds, or `all`.")
    files: list[str] = Field(description="Its files, below the capture's folder.")


class CaptureRecord(Record):
    """One capture: a setup's servers under a profiler, for timelines and never for timing."""

    experiment: str
    setup: str
    kind: str
    status: TrialStatus
    reason: str | None = None
    started_at: str = Field(description="UTC, ISO 8601.")
    profiler: Literal["nsys", "torch"]
    host: HostRecord
    stack: dict[str, Any]
    harness: dict[str, str]
    effective: EffectiveConfig | None = Field(description="None where the engine has ended before it was asked.")
    expected: dict[str, Any] = Field(description="The setup's tier and the bytes of KV that a token takes.")
    servers: list[ServerRecord]
    passes: list[PassRecord] = Field(description="Passes inside the recording.")
    windows: list[WindowRecord] = Field(default_factory=list)
    databases: dict[str, str] = Field(default_factory=dict, description="nsys' SQLite export by server.")
