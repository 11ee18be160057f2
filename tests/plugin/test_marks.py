"""What the engine writes down for timelines, without an engine."""

import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvladder_engine_plugin import marks as module
from kvladder_engine_plugin.marks import Marks, jobs
from kvladder_engine_plugin.profiled import follow


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_span_is_on_disk_as_soon_as_it_is_over(tmp_path: Path) -> None:
    log = Marks(tmp_path)
    before = time.monotonic_ns()
    with log.span("execute", {"r1": 5, "r2": 1}, tokens=[5, 1]):
        time.sleep(0.01)
    (line,) = lines(tmp_path / f"marks-{os.getpid()}.jsonl")
    assert before <= line["start"] <= line["end"] - 10_000_000 <= time.monotonic_ns() - 10_000_000
    assert (line["name"], line["requests"], line["tokens"]) == ("execute", ["r1", "r2"], [5, 1])
    assert (line["pid"], line["tid"]) == (os.getpid(), threading.get_native_id())


def test_a_span_that_fails_is_written_too(tmp_path: Path) -> None:
    log = Marks(tmp_path)
    with pytest.raises(RuntimeError), log.span("load"):
        raise RuntimeError
    assert [line["name"] for line in lines(tmp_path / f"marks-{os.getpid()}.jsonl")] == ["load"]


def test_a_forked_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    log = Marks(tmp_path)
    log.moment("accepted", ["a"])
    child = os.fork()
    if child == 0:
        log.moment("arrived", ["a"])
        os._exit(0)
    os.waitpid(child, 0)
    assert [line["name"] for line in lines(tmp_path / f"marks-{os.getpid()}.jsonl")] == ["accepted"]
    assert [line["name"] for line in lines(tmp_path / f"marks-{child}.jsonl")] == ["arrived"]


def test_nothing_is_written_unless_a_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(module.FOLDER, raising=False)
    module.marks.cache_clear()
    assert module.marks() is None
    module.mark_engine()  # imports no engine, wraps nothing


@dataclass
class Job:
    req_id: str


@dataclass
class Metadata:
    load_jobs: dict = field(default_factory=dict)
    store_jobs: dict = field(default_factory=dict)


def test_jobs_of_each_connectors_metadata() -> None:
    offloading = Metadata(load_jobs={1: Job("a")}, store_jobs={2: Job("b"), 3: Job("c")})
    assert jobs(offloading) == {"load": ["a"], "store": ["b", "c"]}
    directions = [("a", "RETRIEVE"), ("b", "STORE")]
    lmcache = SimpleNamespace(requests=[SimpleNamespace(request_id=name, direction=way) for name, way in directions])
    assert jobs(lmcache) == {"load": ["a"], "store": ["b"]}
    loads = [SimpleNamespace(can_load=True), SimpleNamespace(can_load=False), None]
    mooncake = SimpleNamespace(
        requests=[SimpleNamespace(req_id=name, load_spec=spec) for name, spec in zip("abc", loads, strict=True)]
    )
    assert jobs(mooncake) == {"load": ["a"], "store": ["b", "c"]}
    assert jobs(object()) == {"load": [], "store": []}


def test_a_side_process_is_profiled_while_the_switch_is_there(tmp_path: Path) -> None:
    switch, said = tmp_path / "recording", []
    thread = threading.Thread(
        target=follow, args=(switch, lambda: said.append("start"), lambda: said.append("stop"), said.append)
    )
    thread.start()
    time.sleep(0.1)
    assert said == []
    switch.touch()
    time.sleep(0.3)
    switch.unlink()
    thread.join(timeout=10)
    now = time.monotonic_ns()
    assert (said[0], said[-1]) == ("start", "stop")
    clock = int(said[1].removeprefix(module.CLOCK))
    assert now - 5_000_000_000 < clock < now


def test_wrapped_methods_write_what_they_do_and_return_what_they_did(tmp_path: Path) -> None:
    log = Marks(tmp_path)

    class Scheduler:
        def add_request(self, request: SimpleNamespace) -> str:
            return "added"

        def schedule(self) -> SimpleNamespace:
            return SimpleNamespace(num_scheduled_tokens={"r": 7})

        def update_from_output(self, output: SimpleNamespace, result: int) -> int:
            return result

    class Connector:
        def get_num_new_matched_tokens(self, request: SimpleNamespace, computed: int) -> tuple[int, bool]:
            return 96 - computed, True

    module._scheduler(log, Scheduler)
    connector = Connector()
    module._scheduler_side(log, connector)
    scheduler, request = Scheduler(), SimpleNamespace(request_id="r", num_prompt_tokens=100)
    assert scheduler.add_request(request) == "added"
    output = scheduler.schedule()
    assert connector.get_num_new_matched_tokens(request, 0) == (96, True)
    assert scheduler.update_from_output(output, 3) == 3
    found = lines(tmp_path / f"marks-{os.getpid()}.jsonl")
    assert [(line["name"], line["requests"], line.get("tokens")) for line in found] == [
        ("arrived", ["r"], 100),
        ("schedule", ["r"], None),
        ("lookup", ["r"], 96),
        ("update", ["r"], None),
    ]


def test_a_connector_notes_only_steps_that_load_or_finish_something(tmp_path: Path) -> None:
    log = Marks(tmp_path)

    class Connector:
        def bind_connector_metadata(self, metadata: object) -> None:
            pass

        def start_load_kv(self) -> str:
            return "begun"

        def wait_for_save(self) -> None:
            pass

        def get_finished(self, ended: set) -> tuple[set | None, set]:
            return None, ended

    connector = Connector()
    module._worker_side(log, connector)
    connector.bind_connector_metadata(Metadata())
    connector.start_load_kv()
    connector.get_finished(set())
    connector.bind_connector_metadata(Metadata(load_jobs={1: Job("a")}))
    assert connector.start_load_kv() == "begun"
    connector.wait_for_save()
    assert connector.get_finished({"a"}) == (None, {"a"})
    found = lines(tmp_path / f"marks-{os.getpid()}.jsonl")
    assert [(line["name"], line["requests"]) for line in found] == [("load", ["a"]), ("loaded", ["a"])]
