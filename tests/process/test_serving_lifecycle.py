"""Servers come up in order, are read back, and leave."""

from __future__ import annotations

import re
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from serving_world import World, marked

from kvladder.serving import ports, procfs, readback
from kvladder.serving.process import Readiness, ServerFailed


def test_slow_start_waits_for_health_and_records_times(world: World) -> None:
    with world.servers(world.spec("--delay", 0.4, "--loading", 0.5)) as group:
        engine = group[0]
        assert engine.ready_ns is not None and engine.ready_ns - engine.start_ns > 0.9e9
        assert engine.alive and group.failure() is None
        with urllib.request.urlopen(f"http://127.0.0.1:{world.ports[0]}/health") as reply:
            assert reply.status == 200
        record = engine.record()
        assert record.exit_code is None and record.pid == world.pids()[0]
    assert engine.record().exit_code == -15
    assert not engine.alive and group.failure() is None, "a stopped server has not failed"
    assert group.notes == []


def test_each_is_ready_before_the_next_and_stops_in_reverse(world: World) -> None:
    side = world.spec("--delay", 0.3, name="side", ready=Readiness(port=world.ports[0], deadline_s=10))
    with world.servers(side, world.spec(place=1)) as group:
        assert group[0].ready_ns is not None and group[0].ready_ns < group[1].start_ns
        assert [process.name for process in group] == ["side", "engine"]
        assert group.named("engine") is group[1]
        assert set(world.pids()) == set(group.tree())
    order = [line.split(":")[0] for line in world.lines if line.endswith("stopping")]
    assert order == ["engine", "side"]


def test_one_beside_another_does_not_wait_for_it(world: World) -> None:
    side = world.spec("--delay", 0.1, name="side", ready=Readiness(port=world.ports[0], deadline_s=10))
    first, second = (world.spec("--delay", 0.5, place=place, name=f"engine-{place}") for place in (1, 2))
    with world.servers(side, first, replace(second, beside=True)) as group:
        ready = [process.ready_ns for process in group]
        assert None not in ready and ready[0] < group[1].start_ns, "what both need is up first"
        assert group[2].start_ns < ready[1]
        assert all(process.alive for process in group)
    order = [line.split(":")[0] for line in world.lines if line.endswith("stopping")]
    assert order == ["engine-2", "engine-1", "side"]


def test_when_one_of_two_beside_each_other_dies_the_other_is_not_waited_for(world: World) -> None:
    slow = world.spec("--delay", 60, place=1, name="slow", ready=Readiness(port=world.ports[1], deadline_s=60))
    dies = world.spec(place=2, name="dies", argv=[sys.executable, "-c", "raise SystemExit('ValueError: no memory')"])
    begin = time.monotonic()
    with pytest.raises(ServerFailed, match="no memory"), world.servers(slow, replace(dies, beside=True)):
        pytest.fail("not ready")
    assert time.monotonic() - begin < 30


def test_key_and_check_decide(world: World) -> None:
    def is_model(name: str) -> Readiness:
        return Readiness(
            port=world.ports[0],
            http_path="/v1/models",
            key="sk-trial-key",
            check=lambda body: body["data"][0]["id"] == name,
            deadline_s=1.0,
        )

    with world.servers(world.spec("--key", "sk-trial-key", ready=is_model("model-a"))):
        pass
    with (
        pytest.raises(ServerFailed, match="not what a ready server answers"),
        world.servers(world.spec("--key", "sk-trial-key", ready=is_model("model-b"))),
    ):
        pytest.fail("not ready")
    with (
        pytest.raises(ServerFailed, match=r"not ready after 1 s: GET /v1/models answered 401"),
        world.servers(world.spec("--key", "another-key", ready=is_model("model-a"))),
    ):
        pytest.fail("not ready")


def test_secrets_are_in_no_record_and_no_kept_log(world: World) -> None:
    key, token = "sk-0123456789", "hf_abcdefghij"
    spec = world.spec(
        "--key",
        key,
        "--say",
        f"non-default args: api_key={key}",
        env={"HF_TOKEN": token, "URL": f"http://user:{token}@host", "PLAIN": "1"},
        secrets=frozenset({key}),
        ready=Readiness(port=world.ports[0], http_path="/", key=key, deadline_s=10),
    )
    with world.servers(spec) as group:
        record = group[0].record()
    text = record.model_dump_json() + spec.log.read_text() + repr(spec.ready)
    assert key not in text and token not in text
    assert record.env["HF_TOKEN"] == "***" and record.env["PLAIN"] == "1"
    assert "api_key=***" in spec.log.read_text()


def test_servers_see_no_proxy_and_their_marks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with world.servers(world.spec()) as group:
        env = procfs.environ(group[0].pid)
    assert "https_proxy" not in env and "127.0.0.1" in env["NO_PROXY"].split(",")
    assert env["KVLADDER_TAG"] == world.tag
    assert env["HF_HUB_OFFLINE"] == "1" and env["PYTHONHASHSEED"] == "0"


def test_readback_finds_mapped_extensions_and_memory(world: World) -> None:
    with world.servers(world.spec("--children", "same")) as group:
        tree = group.tree()
        extension = next(path for path in procfs.mapped_files(group[0].pid) or () if ".so" in path)
        found = readback.mapped_modules(tree, [Path(extension).name, "lmcache/c_ops", re.compile(r"libc\.so|ld-musl")])
        assert found == {Path(extension).name: True, "lmcache/c_ops": False, r"libc\.so|ld-musl": True}
        memory = readback.memory(tree)
        alone = readback.memory(tree[:1])
    assert memory.rss_bytes is not None and alone.rss_bytes is not None
    assert 4e6 < alone.rss_bytes < memory.rss_bytes < 1e9
    assert readback.memory([]) == readback.Memory(None)


def test_held_lock_outlives_the_job_side(world: World) -> None:
    with ports.reserve(1, folder=world.folder) as reserved, world.servers(world.spec(), hold=reserved.fds) as group:
        supervisor = procfs.read_process(group[0].pid)
        assert supervisor is not None
        links = [str(path.readlink()) for path in Path(f"/proc/{supervisor.ppid}/fd").iterdir()]
        assert any(link.endswith(f"port-{reserved.ports[0]}.lock") for link in links)
        server_links = [str(path.readlink()) for path in Path(f"/proc/{group[0].pid}/fd").iterdir()]
        assert not any(link.endswith(".lock") for link in server_links), "a server must not keep a lease"


def test_program_that_does_not_exist(world: World) -> None:
    spec = world.spec(argv=["/no/such/program"])
    with pytest.raises(ServerFailed, match=r"can't start /no/such/program: .*No such file"), world.servers(spec):
        pytest.fail("never starts")
    assert marked(world.mark) == []


def test_names_are_unique(world: World) -> None:
    with pytest.raises(ValueError, match="repeat"):
        world.servers(world.spec(), world.spec(place=1))


def test_supervisor_is_small(world: World) -> None:
    """It sits beside every measurement: no site packages, no pydantic."""
    with world.servers(world.spec()) as group:
        parent = procfs.read_process(group[0].pid)
        assert parent is not None
        mapped = procfs.mapped_files(parent.ppid) or set()
        assert not [path for path in mapped if "pydantic" in path or "psutil" in path]
