"""Captures of an H200 under Nsight Systems, cut to one pass each: what is read is what SQL finds in the databases.

Numbers were taken from the databases with sqlite3, from the marks and from the client's records by hand.
"""

from __future__ import annotations

import lzma
import shutil
from pathlib import Path

import pytest
from timeline_factory import record

from kvladder.timeline import assemble, nsys
from kvladder.timeline.assemble import Timeline
from kvladder.timeline.decompose import PARTS, decompose

DATA = Path(__file__).resolve().parents[1] / "data" / "timeline" / "nsys-h200"
US = 1000
TOKEN = 131_072
"""Bytes of KV of a token: 32 layers, 8 heads of 128, K and V, 2 bytes each."""
PAGE = 16 * TOKEN // 32
"""Bytes of one layer's KV of a block of 16 tokens, which is what native copies at once."""


def unpacked(setup: str, folder: Path) -> Timeline:
    """The capture's databases, marks and requests in ``folder``, as one timeline."""
    (folder / "profile").mkdir()
    databases = {}
    for path in sorted((DATA / setup).glob("*.sqlite.xz")):
        database = folder / "profile" / path.name.removesuffix(".xz")
        database.write_bytes(lzma.decompress(path.read_bytes()))
        databases[database.stem] = f"profile/{database.name}"
    shutil.copyfile(DATA / setup / "marks-1.jsonl", folder / "profile" / "marks-1.jsonl")
    shutil.copyfile(DATA / setup / "requests.jsonl", folder / "requests.jsonl")
    return assemble.load(folder, record(setup, databases=databases))


@pytest.fixture
def native(tmp_path: Path) -> Timeline:
    return unpacked("native", tmp_path)


@pytest.fixture
def lmcache(tmp_path: Path) -> Timeline:
    return unpacked("lmcache-mp", tmp_path)


def test_native_loads_a_prompt_in_one_call_of_61984_copies(native: Timeline) -> None:
    (item,) = decompose(native)
    assert (item.transfer_calls, item.transfer_count, item.transfer_bytes) == (1, 61_984, 4_062_183_424)
    assert item.transfer_bytes == item.transfer_count * PAGE == 30_992 * TOKEN
    # 80,848,054 ns by the profiler's clock, whose drift is 4 in a million.
    assert item.transfer_busy == pytest.approx(80_848_054, abs=400)
    assert item.rate == pytest.approx(50.24e9, rel=1e-3)
    assert (item.loaded_tokens, item.computed_tokens, item.request.prompt_tokens) == (30_992, 8, 31_000)


def test_the_copy_lies_between_the_marks_that_begin_and_end_its_load(native: Timeline) -> None:
    (load,) = (mark for mark in native.marks if mark.name == "load")
    (loaded,) = (mark for mark in native.marks if mark.name == "loaded")
    (copy,) = (event for event in native.events if event.kind == "h2d" and event.bytes > PAGE * 2)
    # The call returns 62.2 ms after it began, 26 ms before the device is done.
    assert load.start < copy.launched < copy.start < load.end < copy.end < loaded.start
    (item,) = decompose(native)
    assert (item.until_copies, item.after_copies) == (copy.start - load.start, loaded.end - copy.end)
    assert copy.requests == load.requests == loaded.requests


def test_the_first_token_waits_for_the_next_step_to_be_launched(native: Timeline) -> None:
    (item,) = decompose(native)
    steps = [mark for mark in native.marks if mark.name == "execute" and mark.requests]
    update = next(mark for mark in native.marks if mark.name == "update" and mark.requests)
    assert [mark.tokens for mark in steps] == [(8,), (1,)]
    # The result of the first step is taken after the second one's launch.
    assert steps[1].end < update.start
    assert item.parts["next_step"] == pytest.approx(steps[1].end - steps[1].start + 1_720 * US, abs=10 * US)
    assert item.parts["recompute"] == pytest.approx(steps[0].end - steps[0].start, abs=200 * US)


@pytest.mark.parametrize("setup", ["native", "lmcache-mp"])
def test_parts_and_remainder_are_the_ttft_and_little_is_left(setup: str, tmp_path: Path) -> None:
    items = decompose(unpacked(setup, tmp_path))
    assert [round(item.request.ttft / 1e6, 1) for item in items] == {
        "native": [188.6],
        "lmcache-mp": [122.0, 180.5, 210.9, 238.0],
    }[setup]
    for item in items:
        assert sum(item.parts[part] for part in PARTS) + item.remainder == item.request.ttft
        assert item.unexplained < 0.02


def test_what_another_process_copies_is_told_apart_by_request(lmcache: Timeline) -> None:
    items = decompose(lmcache)
    # 32 chunks of 256 tokens and 4 KiB of block numbers for each of four prompts.
    assert [item.transfer_bytes for item in items] == [8_192 * TOKEN + 4_096] * 4
    assert [(item.transfer_calls, item.transfer_count) for item in items] == [(33, 33)] * 4
    # Sums of `end - start` over the copies launched in each `retrieve`; a union and a merge's gaps are not more.
    busy = [19_491_008, 19_702_463, 19_592_064, 19_794_047]
    assert [item.transfer_busy for item in items] == pytest.approx(busy, rel=0.003)
    assert [item.computed_tokens for item in items] == [8, 8, 8, 8]
    # Staging: the 8 kernels that scatter each prompt's chunks.
    kernels = [event for event in lmcache.events if event.kind == "kernel" and event.process == "lmcache"]
    assert [sum(event.requests == (name,) for event in kernels) for name in _loads(lmcache)] == [8, 8, 8, 8]


def test_a_request_of_a_burst_queues_behind_the_others_copies(lmcache: Timeline) -> None:
    copies = {
        name: [e for e in lmcache.events if e.kind == "h2d" and e.requests == (name,)] for name in _loads(lmcache)
    }
    ends = [max(event.end for event in found) for found in copies.values()]
    starts = [min(event.start for event in found if event.bytes > PAGE) for found in copies.values()]
    assert all(end < start for end, start in zip(ends, starts[1:], strict=False)), "one prompt after the other"
    loaded = {name: mark.start for mark in lmcache.marks if mark.name == "loaded" for name in mark.requests}
    assert all(loaded[name] > end for name, end in zip(copies, ends, strict=True))
    queued = [item.parts["queue"] / 1e6 for item in decompose(lmcache)]
    assert queued == sorted(queued)
    assert queued[-1] > 3 * 19.5


def test_the_clocks_of_both_processes_agree_with_the_marks(lmcache: Timeline) -> None:
    assert {name: clock.marks for name, clock in lmcache.clocks.items()} == {"engine.sqlite": 202, "lmcache.sqlite": 23}
    assert all(clock.spread < 5 * US for clock in lmcache.clocks.values())
    assert lmcache.quality.valid
    # The server takes a load up after the engine asked for it and before anything is copied.
    ranges = sorted(event.start for event in lmcache.events if event.name in assemble.SERVER_LOADS)
    (load,) = (mark for mark in lmcache.marks if mark.name == "load")
    assert len(ranges) == 4
    assert (
        load.start
        < ranges[0]
        < min(event.start for event in lmcache.events if event.process == "lmcache" and event.kind == "h2d")
    )


def test_kernels_of_a_step_run_after_its_launch_began(native: Timeline) -> None:
    kernels = [event for event in native.events if event.kind == "kernel"]
    assert len(kernels) == 880
    assert all(event.launched <= event.start for event in kernels)
    assert {event.step for event in kernels} <= {event.step for event in native.events if event.kind == "step"} | {None}


def _loads(timeline: Timeline) -> list[str]:
    return [name for mark in timeline.marks if mark.name == "load" for name in mark.requests]


def test_an_extract_has_no_more_than_what_is_read(tmp_path: Path) -> None:
    unpacked("native", tmp_path)
    database = tmp_path / "profile" / "engine.sqlite"
    with nsys.connect(database) as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        assert names == set(nsys.COLUMNS)
        for table in names:
            assert nsys.columns(connection, table) <= set(nsys.COLUMNS[table])
