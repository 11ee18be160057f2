"""Where a request's time went: exact sums, and each part from what was made up for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from timeline_factory import MS, OFFSET, Database, mark, one_hit, record, request, write_capture, write_lines

from kvladder.counters.reading import Delta, parse_pages
from kvladder.timeline import assemble
from kvladder.timeline.counters import counted_parts
from kvladder.timeline.decompose import PARTS, Decomposition, decompose
from kvladder.timeline.model import clip, subtract, union

NAME = ["cmpl-a-0-1234"]


def taken_apart(
    folder: Path, marks: list[dict[str, Any]], *requests: dict[str, Any], **traces: Path
) -> list[Decomposition]:
    """A capture of these marks, requests and databases (by server), taken apart."""
    write_lines(folder / "profile" / "marks-4000.jsonl", marks)
    write_lines(folder / "requests.jsonl", list(requests))
    names = {server: path.relative_to(folder).as_posix() for server, path in traces.items()}
    return decompose(assemble.load(folder, record("native", databases=names)))


def shares(item: Decomposition) -> dict[str, float]:
    """Known parts that have any time, in ms."""
    return {name: value / MS for name, value in item.parts.items() if value}


def test_every_part_has_the_time_that_was_made_for_it(tmp_path: Path) -> None:
    write_capture(tmp_path)
    (item,) = decompose(assemble.load(tmp_path, record("native", databases={"engine": "profile/engine.sqlite"})))
    assert shares(item) == pytest.approx(
        {
            "client_http": 6,  # 2 to the front end, 2 to the scheduler, 2 back
            "queue": 1,  # until its schedule
            "lookup": 1,
            "scheduler": 2 - 1 + 0.2,  # schedule without the lookup, the empty step until the load
            "load_wait": 65 - 19.2 - 40 + 0.002,
            "transfer": 40 - 0.002,
            "recompute": 96 - 66,
            "sampling": 98 - 96,
        },
        abs=1e-9,
    )
    assert item.remainder == 3 * MS  # 17 to 19 and 65 to 66
    assert sum(item.parts[part] or 0 for part in PARTS) + item.remainder == item.request.ttft == 90 * MS
    assert (item.loaded_tokens, item.computed_tokens) == (992, 8)
    assert (item.transfer_bytes, item.transfer_count, item.transfer_hidden) == (20_000_000, 2, 0)
    assert item.rate == pytest.approx(20e6 / (40e-3 - 2e-6))


def test_a_copy_under_computing_is_hidden_and_counted_once(tmp_path: Path) -> None:
    database = Database(tmp_path / "profile" / "engine.sqlite")
    marks = one_hit(database)
    # Layer by layer: the rest is copied while the worker computes already.
    database.copy(
        70 * MS, 80 * MS, 5_000_000, call=database.call("cudaMemcpyAsync", round(19.6 * MS), round(19.7 * MS))
    )
    marks = [line for line in marks if line["name"] != "loaded"] + [mark("loaded", 90 * MS, requests=NAME)]
    (item,) = taken_apart(tmp_path, marks, request("cmpl-a", 10 * MS, 100 * MS), engine=database.close())
    assert (item.transfer_hidden, item.transfer_busy) == (10 * MS, 50 * MS - 2000)
    assert item.parts["transfer"] == 40 * MS - 2000
    assert item.transfer_bytes == 25_000_000
    assert sum(part or 0 for part in item.parts.values()) + item.remainder == 90 * MS


def test_work_of_another_process_is_transfer_and_staging(tmp_path: Path) -> None:
    engine = Database(tmp_path / "profile" / "engine.sqlite")
    marks = one_hit(engine)
    engine._connection.execute("DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY")
    server = Database(tmp_path / "profile" / "lmcache.sqlite")
    server.clock(1, 99 * MS)
    server.copy(22 * MS, 40 * MS, 9_000_000)
    server.kernel(40 * MS, 43 * MS, "multi_layer_kv_transfer")
    server.copy(200 * MS, 240 * MS, 9_000_000)  # a store, after the request
    traces = {"engine": engine.close(), "lmcache": server.close()}
    (item,) = taken_apart(tmp_path, marks, request("cmpl-a", 10 * MS, 100 * MS), **traces)
    assert (item.parts["transfer"], item.parts["staging"]) == (18 * MS, 3 * MS)
    assert (item.transfer_bytes, item.rate) == (9_000_000, pytest.approx(0.5e9))


def test_a_load_without_a_visible_copy_is_unknown_and_waited_for(tmp_path: Path) -> None:
    engine = Database(tmp_path / "profile" / "engine.sqlite")
    marks = one_hit(engine)
    engine._connection.execute("DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY")
    (item,) = taken_apart(tmp_path, marks, request("cmpl-a", 10 * MS, 100 * MS), engine=engine.close())
    assert (item.parts["transfer"], item.parts["staging"], item.transfer_bytes) == (None, None, None)
    assert item.parts["load_wait"] == round((65 - 19.2) * MS)


def test_another_requests_step_is_queueing_also_while_a_load_waits_for_it(tmp_path: Path) -> None:
    engine = Database(tmp_path / "profile" / "engine.sqlite")
    marks = [
        *one_hit(engine),
        mark("arrived", 11 * MS, requests=["cmpl-b-0-9"]),
        mark("execute", 62 * MS, 64 * MS, ["cmpl-b-0-9"], tokens=[100]),
        mark("update", 64 * MS, round(64.5 * MS), ["cmpl-b-0-9"]),
        mark("outputs", 65 * MS, requests=["cmpl-b-0-9"]),
    ]
    sent = [request("cmpl-a", 10 * MS, 100 * MS), request("cmpl-b", 10 * MS, 66 * MS, index=1)]
    first, second = taken_apart(tmp_path, marks, *sent, engine=engine.close())
    assert first.parts["queue"] == 3 * MS
    assert second.parts["recompute"] == 2 * MS
    # From 11 to 62 ms, less three that the scheduler and an empty step took.
    assert second.parts["queue"] == 48 * MS
    for item in (first, second):
        assert sum(part or 0 for part in item.parts.values()) + item.remainder == item.request.ttft


def test_a_prompt_of_several_steps_is_computed_until_its_first_token(tmp_path: Path) -> None:
    engine = Database(tmp_path / "profile" / "engine.sqlite")
    engine.clock(1)
    marks = [mark("arrived", 10 * MS, requests=NAME)]
    for number, tokens in enumerate([512, 512, 1]):
        start = (20 + 10 * number) * MS
        marks += [
            mark("execute", start, start + 8 * MS, NAME, tokens=[tokens]),
            mark("update", start + 8 * MS, start + 9 * MS, NAME),
        ]
    # The token of the second step; the third makes the next one.
    marks.append(mark("outputs", 39 * MS + 1, 40 * MS, NAME))
    (item,) = taken_apart(tmp_path, marks, request("cmpl-a", 10 * MS, 45 * MS), engine=engine.close())
    assert (item.computed_tokens, item.parts["recompute"]) == (1024, 16 * MS)
    assert (item.parts["lookup"], item.loaded_tokens) == (0, 0)


def test_a_first_token_waits_for_the_step_that_is_launched_before_it_is_taken(tmp_path: Path) -> None:
    engine = Database(tmp_path / "profile" / "engine.sqlite")
    marks = [line for line in one_hit(engine) if line["name"] not in ("update", "outputs")]
    marks += [
        # As an engine that schedules asynchronously: the next step first, then the result of the one before. The front
        # end is late: it has the second result as well when it passes the first on.
        mark("execute", 97 * MS, 117 * MS, NAME, tokens=[1]),
        mark("sample", round(117.5 * MS), 118 * MS, NAME),
        mark("update", 119 * MS, 120 * MS, NAME),
        mark("update", 121 * MS, 122 * MS, NAME),
        mark("outputs", 123 * MS, requests=NAME),
    ]
    (item,) = taken_apart(tmp_path, marks, request("cmpl-a", 10 * MS, 125 * MS), engine=engine.close())
    assert item.computed_tokens == 8
    assert item.parts["next_step"] == round(20.5 * MS)
    assert item.parts["sampling"] == (120 - 96) * MS - round(20.5 * MS)
    assert item.parts["client_http"] == (4 + 5) * MS
    assert sum(part or 0 for part in item.parts.values()) + item.remainder == 115 * MS


def test_kernels_of_an_earlier_step_for_others_are_queueing(tmp_path: Path) -> None:
    engine = Database(tmp_path / "profile" / "engine.sqlite")
    engine.clock(1, 99 * MS)
    marks = [mark("arrived", 10 * MS, requests=NAME)]
    for name, start, tokens in ((["cmpl-b-0-9"], 20, 500), (NAME, 30, 1000)):
        marks += [mark("execute", start * MS, (start + 2) * MS, name, tokens=[tokens])]
        call = engine.call("cudaLaunchKernel", start * MS, start * MS + 10)
        # The device is at the first step until 60 ms; the second step's kernels wait for it.
        engine.kernel(*((20 * MS, 60 * MS) if start == 20 else (60 * MS, 90 * MS)), call=call)
    marks += [mark("update", 91 * MS, 92 * MS, NAME), mark("outputs", 93 * MS, requests=NAME)]
    (item,) = taken_apart(tmp_path, marks, request("cmpl-a", 10 * MS, 95 * MS), engine=engine.close())
    assert item.parts["queue"] == (30 - 10 + 60 - 32) * MS
    assert item.parts["recompute"] == (2 + 30) * MS
    assert item.remainder == MS


def test_a_step_whose_inputs_wait_behind_another_requests_kv_queues(tmp_path: Path) -> None:
    engine = Database(tmp_path / "profile" / "engine.sqlite")
    engine.clock(1, 99 * MS)
    other = ["cmpl-b-0-9"]
    kv = engine.call("cuMemcpyBatchAsync", 12 * MS, 12 * MS + 10)
    engine.copy(15 * MS, 40 * MS, 1 << 30, stream=33, call=kv)
    inputs = engine.call("cudaMemcpyAsync", 22 * MS, 22 * MS + 10)
    engine.copy(40 * MS, 40 * MS + 100, 4096, stream=7, call=inputs)
    first, last = (engine.call("cudaLaunchKernel", at * MS, at * MS + 10) for at in (20, 43))
    engine.kernel(20 * MS, 25 * MS, call=first)
    engine.kernel(43 * MS, 50 * MS, call=last)
    marks = [
        mark("arrived", 10 * MS, requests=[*other, *NAME]),
        mark("load", 11 * MS, 13 * MS, other),
        mark("loaded", 51 * MS, requests=other),
        mark("execute", 20 * MS, 45 * MS, NAME, tokens=[1000]),
        mark("update", 52 * MS, 53 * MS, NAME),
        mark("outputs", 54 * MS, requests=NAME),
    ]
    (item,) = taken_apart(tmp_path, marks, request("cmpl-a", 10 * MS, 55 * MS), engine=engine.close())
    # From 25 ms, when its own kernel is done, to 40 ms, when its inputs can go; and 10 ms before its step.
    assert item.parts["queue"] == (15 + 10) * MS
    assert item.parts["recompute"] == (5 + 10) * MS


def burst(tmp_path: Path, launches: int) -> list[Decomposition]:
    """Two requests whose load one mark begins, and so many copies of 10 ms, each launched for itself."""
    engine = Database(tmp_path / "profile" / "engine.sqlite")
    engine.clock(1, 99 * MS)
    names = ["cmpl-a-0-1234", "cmpl-b-0-5678"]
    for number in range(launches):
        call = engine.call("cuMemcpyBatchAsync", (12 + number) * MS, (12 + number) * MS + 10)
        engine.copy((20 + 10 * number) * MS, (30 + 10 * number) * MS, 1000 * (number + 1), call=call)
    marks = [
        mark("arrived", 10 * MS, requests=names),
        mark("load", 11 * MS, 18 * MS, names),
        mark("loaded", 61 * MS, requests=names),
        mark("execute", 62 * MS, 70 * MS, names, tokens=[1000, 1000]),
        mark("update", 71 * MS, 72 * MS, names),
        mark("outputs", 73 * MS, requests=names),
    ]
    sent = [request("cmpl-a", 10 * MS, 75 * MS), request("cmpl-b", 10 * MS, 75 * MS, index=1)]
    return taken_apart(tmp_path, marks, *sent, engine=engine.close())


def test_a_load_of_two_requests_with_two_launches_is_one_each(tmp_path: Path) -> None:
    first, second = burst(tmp_path, 2)
    assert [item.transfer_bytes for item in (first, second)] == [1000, 2000]
    assert [item.parts["transfer"] for item in (first, second)] == [10 * MS, 10 * MS]
    # Each waits while the other's is copied, and 1 ms before its load and before its step.
    assert (first.parts["queue"], second.parts["queue"]) == (12 * MS, 12 * MS)
    assert (first.until_copies, second.until_copies) == (9 * MS, 19 * MS)
    assert (first.after_copies, second.after_copies) == (31 * MS, 21 * MS)


def test_launches_that_do_not_fit_a_loads_requests_are_for_all_of_them(tmp_path: Path) -> None:
    for item in burst(tmp_path, 3):
        assert (item.transfer_bytes, item.parts["transfer"], item.transfer_calls) == (6000, 30 * MS, 3)


def test_a_request_without_marks_is_unexplained_and_says_so(tmp_path: Path) -> None:
    engine = Database(tmp_path / "profile" / "engine.sqlite")
    engine.clock(1)
    (item,) = taken_apart(tmp_path, [], request("cmpl-z", 10 * MS, 100 * MS), engine=engine.close())
    assert (set(item.parts.values()), item.remainder, item.unexplained) == ({None}, 90 * MS, 1.0)
    assert item.problem == "the marks say nothing of this request"


def test_a_request_that_failed_is_not_taken_apart(tmp_path: Path) -> None:
    failed = request("cmpl-a", 1, 2, status="failed") | {"first_token_ns": None}
    write_lines(tmp_path / "requests.jsonl", [failed, request("cmpl-b", 5, 9)])
    assert [each.id for each in assemble.requests(tmp_path / "requests.jsonl")] == ["cmpl-b"]


def test_work_is_tied_to_the_step_in_which_it_was_launched(tmp_path: Path) -> None:
    write_capture(tmp_path)
    timeline = assemble.load(tmp_path, record("native", databases={"engine": "profile/engine.sqlite"}))
    kernels = {event.name: (event.step, event.requests) for event in timeline.events if event.kind == "kernel"}
    # The sampling kernel runs when the worker's step is over; it was launched in its `sample`.
    assert kernels == {"gemm": (2, tuple(NAME)), "sample: argmax": (2, tuple(NAME))}
    copies = {event.bytes: event.requests for event in timeline.events if event.kind == "h2d"}
    assert copies == {10_000_000: tuple(NAME), 4096: ()}
    assert timeline.events[0].start >= OFFSET


@pytest.mark.parametrize(
    ("taken", "left"),
    [
        ([], [(0, 10), (20, 30)]),
        ([(0, 30)], []),
        ([(2, 3), (5, 6), (9, 21)], [(0, 2), (3, 5), (6, 9), (21, 30)]),
        ([(-5, 1), (29, 99)], [(1, 10), (20, 29)]),
    ],
)
def test_subtract(taken: list[tuple[int, int]], left: list[tuple[int, int]]) -> None:
    assert subtract([(0, 10), (20, 30)], taken) == left


def test_union_and_clip() -> None:
    assert union([(5, 9), (0, 3), (3, 4), (6, 7), (8, 8)]) == [(0, 4), (5, 9)]
    assert clip([(0, 4), (5, 9)], 3, 6) == [(3, 4), (5, 6)]


PAGE = """
vllm:time_to_first_token_seconds_sum {ttft}
vllm:time_to_first_token_seconds_count {n}
vllm:request_queue_time_seconds_sum {queue}
vllm:request_queue_time_seconds_count {n}
vllm:request_prefill_time_seconds_sum {prefill}
vllm:request_prefill_time_seconds_count {n}
"""


def window(**after: float) -> Delta:
    before = PAGE.format(n=1, ttft=1, queue=1, prefill=1)
    values = {name: 1 + after.get(name, 0) for name in ("n", "ttft", "queue", "prefill")}
    return Delta(parse_pages({"engine": before}), parse_pages({"engine": PAGE.format(**values)}))


def test_counters_alone_give_means_and_their_remainder() -> None:
    delta = window(n=2, ttft=0.4, queue=0.2, prefill=0.18)
    found = counted_parts(delta, [210 * MS, 210 * MS], 160 * MS, loads=True)
    assert found.parts == {
        "client_http": 10 * MS,
        "queue": None,
        "lookup": None,
        "load_wait": 20 * MS,
        "transfer": 80 * MS,
        "recompute": 90 * MS,
    }
    assert found.remainder == 10 * MS


def test_without_the_connectors_time_all_of_the_wait_is_waiting_for_the_load() -> None:
    found = counted_parts(window(n=1, ttft=0.2, queue=0.1, prefill=0.1), [210 * MS], None, loads=True)
    assert (found.parts["load_wait"], found.parts["transfer"], found.remainder) == (100 * MS, None, 0)


def test_a_load_inside_the_step_is_taken_from_the_steps_time() -> None:
    found = counted_parts(window(n=1, ttft=0.2, queue=0.02, prefill=0.18), [200 * MS], 90 * MS, loads=True)
    assert (found.parts["load_wait"], found.parts["transfer"], found.parts["recompute"]) == (0, 90 * MS, 110 * MS)
    assert found.remainder == 0


def test_a_cold_pass_loads_nothing() -> None:
    found = counted_parts(window(n=1, ttft=0.2, queue=0.01, prefill=0.19), [210 * MS], None, loads=False)
    assert (found.parts["transfer"], found.parts["lookup"], found.parts["queue"]) == (0, 0, 10 * MS)
    assert found.remainder == 0


def test_counters_that_are_not_there_are_unknown() -> None:
    found = counted_parts(Delta({"engine": None}, {"engine": None}), [210 * MS], None, loads=True)
    assert (set(found.parts.values()), found.remainder) == ({None}, 210 * MS)
    with pytest.raises(ValueError, match="no request has a TTFT"):
        counted_parts(window(n=1), [], None, loads=True)
