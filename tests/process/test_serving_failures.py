"""A dead server is noticed at once, with its log's own line."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from serving_world import World, wait_for

from kvladder.serving.process import Readiness, ServerFailed

ENGINE_DEATH = """\
(APIServer pid=10) INFO 11-29 16:35:00 [api_server.py:1] vLLM API server version 0.32.0
(EngineCore pid=11) ERROR 11-29 16:35:01 [core.py:840] EngineCore failed to start.
(EngineCore pid=11) ERROR 11-29 16:35:01 [core.py:840] Traceback (most recent call last):
(EngineCore pid=11) ERROR 11-29 16:35:01 [core.py:840]   File "core.py", line 831, in run_engine_core
(EngineCore pid=11) ERROR 11-29 16:35:01 [core.py:840] ValueError: No available memory for the cache blocks.
(EngineCore pid=11) Process EngineCore:
(APIServer pid=10) Traceback (most recent call last):
(APIServer pid=10)   File "api_server.py", line 9, in <module>
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_crash_at_start_fails_at_once_with_the_root_cause(world: World) -> None:
    text = world.folder / "death"
    text.write_text(ENGINE_DEATH)
    spec = world.spec("--crash-at-start", text, ready=Readiness(port=world.ports[0], http_path="/", deadline_s=60))
    began = time.monotonic()
    with pytest.raises(ServerFailed) as caught, world.servers(spec):
        pytest.fail("never ready")
    assert time.monotonic() - began < 30, "not at the deadline of 60 s"
    assert caught.value.reason == "ValueError: No available memory for the cache blocks."
    assert caught.value.name == "engine" and caught.value.log == spec.log


def test_an_older_run_in_the_same_log_is_not_quoted(world: World) -> None:
    spec = world.spec(argv=["/bin/false"])
    spec.log.write_text("ValueError: of yesterday\n")
    with pytest.raises(ServerFailed, match="exited with code 1 and wrote no error line"), world.servers(spec):
        pytest.fail("never ready")
    assert "of yesterday" in spec.log.read_text()


def test_crash_in_the_middle_reaches_watcher_and_check(world: World) -> None:
    seen: list[tuple[str, ServerFailed]] = []
    with (
        pytest.raises(ServerFailed, match="KeyError: 'cmpl-17'"),
        world.servers(world.spec("--crash-after", 0.6, "--children", "same,away")) as group,
        group.watch(lambda failure: seen.append((threading.current_thread().name, failure))),
    ):
        group.check_alive()
        wait_for(lambda: seen)
        thread, failure = seen[0]
        assert thread != threading.current_thread().name
        assert failure.reason == "KeyError: 'cmpl-17'"
        group.check_alive()
    assert group[0].record().exit_code == 1
    assert len(seen) == 1


def test_side_process_that_dies_in_the_middle(world: World) -> None:
    side = world.spec(name="side")
    with (
        pytest.raises(ServerFailed, match="side: killed by SIGKILL"),
        world.servers(side, world.spec(place=1)) as group,
    ):
        os.kill(group[0].pid, signal.SIGKILL)
        wait_for(group.failure)
        assert group[1].alive
        group.check_alive()


def test_side_process_that_dies_while_the_engine_starts(world: World) -> None:
    side = world.spec("--crash-after", 0.4, name="side")
    engine = world.spec("--delay", 30, place=1)
    with pytest.raises(ServerFailed, match="side: KeyError: 'cmpl-17'"), world.servers(side, engine):
        pytest.fail("never ready")


def test_deadline_says_what_was_missing(world: World) -> None:
    spec = world.spec(
        "--delay", 30, "--say", "ERROR: still mapping", ready=Readiness(world.ports[0], "/", deadline_s=1)
    )
    with (
        pytest.raises(ServerFailed, match=r"not ready after 1 s: nothing listens on port \d+; last error .* mapping"),
        world.servers(spec),
    ):
        pytest.fail("never ready")


def test_watch_that_sees_nothing_ends(world: World) -> None:
    with world.servers(world.spec()) as group, group.watch(lambda failure: pytest.fail(str(failure))):
        assert any(thread.name == "kvladder-watch" for thread in threading.enumerate())
    assert not any(thread.name == "kvladder-watch" for thread in threading.enumerate())


def test_killed_supervisor_is_a_failure_and_leaves_nothing(world: World) -> None:
    with (
        pytest.raises(ServerFailed, match="supervisor process was killed"),
        world.servers(world.spec("--children", "same,away", "--shm", f"psm_{world.mark}")) as group,
    ):
        wait_for(lambda: group.failure() or group[0].seen_shm)
        assert len(group.tree()) == 3
        supervisor = group[0]._supervisor
        assert supervisor is not None
        supervisor.kill()
        wait_for(group.failure)
        group.check_alive()
    assert len([note for note in group.notes if note.startswith("orphan killed")]) == 2
    assert f"left-over deleted: /dev/shm/psm_{world.mark}" in group.notes
