"""Nsight Systems' export: ranges of both kinds, impossible records, the clock, and what ties work to requests.

The databases are made by the exporter's documented schema (`timeline_factory.Database`), not recorded.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from timeline_factory import D2D, D2H, MS, OFFSET, START_END, Database, one_hit, rows_of

from kvladder.timeline import nsys
from kvladder.timeline.model import Event, busy_time


def test_start_end_ranges_are_requests_and_a_librarys_push_pop_ranges_are_not(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite")
    for number, (start, end) in enumerate([(0, 50), (10, 30), (20, 90)]):
        database.range(f"kvladder:request:r{number}", start, end, kind=START_END, thread=100 + number % 2)
    for number in range(40):
        database.range("DeviceRadixSort", number, number + 1)
    with nsys.connect(database.close()) as connection:
        found = nsys.request_ranges(connection)
        assert {name: (each.start, each.end) for name, each in found.items()} == {
            "r0": (0, 50),
            "r1": (10, 30),
            "r2": (20, 90),
        }
        assert len(list(nsys.ranges(connection))) == 43


def test_requests_and_the_engines_own_scopes_are_events_and_a_librarys_markers_are_none(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite")
    database.clock(1)
    database.range("kvladder:request:r0", 0, 50, kind=START_END)
    database.range("gpu_model_runner: forward", 5, 20)
    database.range("DeviceRadixSort", 6, 7)
    events, _, _ = nsys.read(database.close(), "engine")
    assert [(event.kind, event.name, event.requests, event.busy) for event in events] == [
        ("request", "r0", ("r0",), 50),
        ("engine", "gpu_model_runner: forward", (), 15),
    ]


def test_a_request_with_two_ranges_is_refused(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite")
    database.range("kvladder:request:r0", 0, 50, kind=START_END)
    database.range("kvladder:request:r0", 60, 70, kind=START_END)
    with nsys.connect(database.close()) as connection, pytest.raises(ValueError, match=r"two NVTX ranges .* r0"):
        nsys.request_ranges(connection)


def test_impossible_records_are_dropped_and_counted(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite")
    database.clock(1, 2)
    for number in range(1000):
        start, end = 100_000 * (number + 1), 100_000 * (number + 1) + 50_000
        if number < 100:
            start = end = 0
        elif number < 105:
            end = start - 10
        database.copy(start, end, 1000)
    events, quality, _ = nsys.read(database.close(), "engine")
    assert (quality.records, quality.unusable, quality.valid) == (1000, 105, False)
    assert str(quality) == "105 of 1,000 unusable: 5 that end before they start, 100 without a time"
    assert sum(event.count for event in events) == 895
    assert all(event.end > event.start >= OFFSET for event in events)


def test_no_rate_is_made_of_a_copy_that_took_no_time(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite")
    database.clock(1, 2)
    database.copy(500, 500, 1 << 30)
    (event,), quality, _ = nsys.read(database.close(), "engine")
    assert (event.rate, quality.unusable) == (None, 0)


def test_a_batch_is_one_event_and_its_rate_leaves_gaps_out(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite")
    database.clock(1, 2)
    call = database.call("cudaMemcpyBatchAsync", 0, 10)
    for number in range(100):
        database.copy(10_000 * number, 10_000 * number + 5_000, 1000, call=call)
    (event,), _, _ = nsys.read(database.close(), "engine")
    assert (event.kind, event.count, event.bytes, event.busy) == ("h2d", 100, 100_000, 500_000)
    assert event.calls == 1
    assert event.rate == pytest.approx(0.2e9)
    assert event.launched == OFFSET


def test_transfers_of_two_launches_stay_apart_though_the_stream_ran_them_in_a_row(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite")
    database.clock(1, 2)
    for number in range(2):
        call = database.call("cudaMemcpyBatchAsync", number * MS, number * MS + 10)
        database.copy(2 * MS + number * 1000, 2 * MS + number * 1000 + 1000, 10, call=call)
    events, _, _ = nsys.read(database.close(), "engine")
    assert [(event.bytes, event.launched) for event in events] == [(10, OFFSET), (10, OFFSET + MS)]


def test_calls_are_counted_once_whatever_their_copies_are_merged_to(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite")
    database.clock(1, 2)
    both = database.call("cudaMemcpyBatchAsync", 0, 10)
    last = database.call("cudaMemcpyAsync", 20_000, 20_010)
    for start, call in ((1, both), (4, both), (4.5, last)):
        database.copy(round(start * MS), round((start + 0.49) * MS), 10, call=call)
    events, _, _ = nsys.read(database.close(), "engine")
    assert [(event.count, event.calls) for event in events] == [(1, 1), (2, 1)]


def test_directions_lanes_and_waits(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite")
    database.clock(1, 2)
    for number, kind in enumerate([1, D2H, D2D]):
        database.copy(MS * number, MS * number + 10, 5, kind=kind, stream=number)
    database.call("cudaStreamSynchronize_v3020", 0, 77)
    database.call("cudaGetDevice_v3020", 0, 5)
    events, _, _ = nsys.read(database.close(), "lmcache")
    assert [(event.kind, event.lane) for event in events if event.kind != "sync"] == [
        ("h2d", "GPU 0 stream 0"),
        ("d2h", "GPU 0 stream 1"),
        ("d2d", "GPU 0 stream 2"),
    ]
    assert [(event.name, event.busy) for event in events if event.kind == "sync"] == [
        ("cudaStreamSynchronize_v3020", 77)
    ]
    assert {event.process for event in events} == {"lmcache"}


def test_the_clock_is_the_least_late_mark(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite")
    database.clock(MS, 3 * MS, late=4_000)
    database.clock(2 * MS, late=100)
    with nsys.connect(database.close()) as connection:
        clock = nsys.clock(connection)
    assert clock(2 * MS) == 2 * MS - 100 + OFFSET
    assert (clock.marks, clock.spread) == (3, 3_900)


def test_a_clock_that_drifts_is_followed(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite")
    for number in range(20):
        # 10 ppm slow: 10 µs in a second.
        database.clock(number * 1_000 * MS, late=number * 10_000)
    with nsys.connect(database.close()) as connection:
        clock = nsys.clock(connection)
    assert clock.drift == pytest.approx(-1e-5, rel=1e-3)
    assert clock(15_000 * MS) == pytest.approx(15_000 * MS - 150_000 + OFFSET, abs=200)


def test_a_recording_without_a_mark_cannot_be_placed(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite")
    database.copy(1, 2, 3)
    with pytest.raises(ValueError, match="no clock mark"):
        nsys.read(database.close(), "engine")


def test_a_recording_of_nothing_has_no_tables(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite")
    database.clock(1)
    database._connection.execute("DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY")
    database._connection.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
    events, quality, _ = nsys.read(database.close(), "engine")
    assert (events, str(quality)) == ([], "no device was recorded")


def test_an_older_exporter_without_a_column_is_read(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite")
    database.clock(1)
    database.copy(10, 20, 30)
    database._connection.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_MEMCPY DROP COLUMN copyCount")
    (event,), _, _ = nsys.read(database.close(), "engine")
    assert (event.bytes, event.count) == (30, 1)


def test_an_extract_reads_as_the_whole_did_inside_its_window(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite")
    one_hit(database)
    one_hit(database, step=1000 * MS)
    whole = database.close()
    small = tmp_path / "b.sqlite"
    kept = nsys.extract(whole, small, since=1000 * MS)
    expected = [event for event in nsys.read(whole, "engine")[0] if event.start >= OFFSET + 1000 * MS]
    assert nsys.read(small, "engine")[0] == expected
    assert [event.kind for event in expected] == ["h2d", "h2d", "h2d", "kernel", "sync", "kernel"]
    assert rows_of(small, "StringIds") < rows_of(whole, "StringIds") + 1
    assert kept["CUPTI_ACTIVITY_KIND_MEMCPY"] == rows_of(whole, "CUPTI_ACTIVITY_KIND_MEMCPY") / 2


def test_busy_time_is_a_union() -> None:
    events = [Event("kernel", start, end, "engine", lane) for start, end, lane in ((0, 10, "a"), (5, 12, "b"))]
    assert busy_time(events) == 12
