"""torch's traces: a recorded one, and made-up ones that are cut or impossible."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from timeline_factory import OFFSET

from kvladder.timeline import assemble, marks, torch_trace
from kvladder.timeline.assemble import Timeline
from kvladder.timeline.decompose import decompose
from kvladder.timeline.model import Quality

RECORDED = Path(__file__).resolve().parents[1] / "data" / "timeline" / "torch-2.13-cpu"
US = 1000


def write(path: Path, events: list[dict[str, Any]], *, indent: int | None = None) -> Path:
    clock = {"ph": "X", "cat": "user_annotation", "name": f"kvladder:clock:{OFFSET}", "ts": 0, "dur": 1}
    text = json.dumps({"schemaVersion": 1, "traceEvents": [clock, *events], "traceName": "x"}, indent=indent)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def copy(start: float, length: float, **more: Any) -> dict[str, Any]:
    """A copy in microseconds."""
    arguments = {"stream": 7, "device": 0, "bytes": 1000, "correlation": 1}
    event = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": start, "dur": length}
    return {**event, "pid": 0, "tid": 7, "args": {**arguments, **more}}


def test_a_recorded_trace_is_on_the_clock_of_the_marks() -> None:
    events, quality, clock = torch_trace.read(RECORDED / "rank0.pt.trace.json.gz", "engine")
    steps = [mark for mark in marks.read(RECORDED) if mark.name == "execute"]
    forward = [event for event in events if event.name == "gpu_model_runner: forward"]
    # Each of the two forward passes lies inside a step that the plugin noted, to the microsecond.
    assert len(forward) == 2
    for event in forward:
        assert any(step.start < event.start and event.end < step.end for step in steps if step.requests)
    assert (clock.marks, quality.records) == (5, 0)
    assert clock.spread < 20 * US


def test_a_recorded_hit_is_taken_apart_to_the_nanosecond() -> None:
    events, quality, clock = torch_trace.read(RECORDED / "rank0.pt.trace.json.gz", "engine")
    found = marks.read(RECORDED)
    assemble.tie(events, found)
    timeline = Timeline(
        setup="native-host",
        profiler="torch",
        requests=assemble.requests(RECORDED / "requests.jsonl"),
        marks=found,
        events=[*events, *(mark.event() for mark in found)],
        quality=quality,
        clocks={"": clock},
    )
    (item,) = decompose(timeline)
    assert item.problem is None
    assert sum(part or 0 for part in item.parts.values()) + item.remainder == item.request.ttft == 219_779_233
    assert (item.loaded_tokens, item.computed_tokens, item.lookups) == (1536, 9, 1)
    # 207.8 ms of the 219.8 are the step that computes the last nine tokens.
    assert item.parts["recompute"] == 207_828_025
    assert 1_000_000 < (item.parts["transfer"] or 0) < 1_300_000
    assert item.unexplained < 0.01


@pytest.mark.parametrize("indent", [None, 1])
def test_events_are_cut_out_whatever_the_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None
) -> None:
    monkeypatch.setattr(torch_trace, "_CHUNK", 7)
    path = write(tmp_path / "a.json", [copy(10, 5, note='a "]}" in a string'), copy(20, 5)], indent=indent)
    assert [event["ts"] for event in torch_trace.events(path)] == [0, 10, 20]


def test_a_copy_that_reaches_far_into_its_successor_is_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json.gz", [copy(1000, 1_600_000), copy(3000, 500), copy(9_000, 500)])
    events, quality, _ = torch_trace.read(path, "engine")
    assert [(event.start - OFFSET, event.busy) for event in events] == [(3_000_000, 500_000), (9_000_000, 500_000)]
    assert (quality.records, quality.unusable, quality.valid) == (3, 1, False)
    assert quality.reasons == {"that reach far into their successor": 1}


def test_copies_carry_bytes_kinds_and_the_moment_of_their_launch(tmp_path: Path) -> None:
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "ts": 4, "dur": 1, "tid": 3, "args": {}}
    launch["args"] = {"correlation": 1}
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 30, "dur": 2, "args": {"stream": 0, "device": 0}}
    path = write(tmp_path / "a.json", [copy(10, 5), launch, kernel])
    (moved, computed), _, _ = torch_trace.read(path, "engine")
    assert (moved.kind, moved.bytes, moved.launched) == ("h2d", 1000, OFFSET + 4 * US)
    assert (computed.kind, computed.name, computed.launched) == ("kernel", "gemm", None)


@pytest.mark.parametrize("name", ["rank1.pt.trace.json.gz", "rank1.pt.trace.json"])
def test_a_trace_that_is_cut_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [copy(10.0 * number, 5) for number in range(2000)])
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(torch_trace.BrokenTrace, match=name):
        list(torch_trace.events(path))


def test_json_that_is_no_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"schemaVersion": 1}', encoding="utf-8")
    with pytest.raises(torch_trace.BrokenTrace, match=r"other\.json: has no"):
        list(torch_trace.events(path))


def test_an_empty_trace_has_no_events_and_no_clock(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"traceEvents": []}', encoding="utf-8")
    assert list(torch_trace.events(path)) == []
    with pytest.raises(ValueError, match="no clock mark"):
        torch_trace.read(path, "engine")


def test_of_no_record_nothing_is_unusable() -> None:
    assert Quality().valid
