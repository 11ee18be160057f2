"""A stop ends everything the server started, wherever it hid, within its bounds."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from serving_world import World, marked, read_until, wait_for

from kvladder.serving import hygiene


def test_server_that_ignores_term_is_killed_after_the_grace(world: World) -> None:
    with world.servers(world.spec("--ignore-term"), grace_s=0.5) as group:
        began = time.monotonic()
    assert 0.5 < time.monotonic() - began < 4
    assert group[0].exit_code == -9
    assert any("had to be killed" in note for note in group.notes)


def test_descendants_in_other_sessions_and_deaf_ones_are_ended(world: World) -> None:
    with world.servers(world.spec("--children", "same,deaf,away"), grace_s=0.5) as group:
        wait_for(lambda: len(world.pids()) == 4)
        assert set(world.pids()) == set(group.tree()), "the one that left its session still counts"
    assert marked(world.mark) == []
    assert sum("had to be killed" in note for note in group.notes) == 2


def test_body_that_raises_stops_servers(world: World) -> None:
    class Oops(Exception):
        pass

    try:
        with world.servers(world.spec()):
            raise Oops
    except Oops:
        assert marked(world.mark) == []
    else:
        raise AssertionError("the body's own exception must come through")


def test_own_shm_left_overs_are_deleted_and_foreign_ones_kept(world: World) -> None:
    before = Path("/dev/shm") / f"vllm_offload_before_{world.mark}"
    foreign = Path("/dev/shm") / f"psm_foreign_{world.mark}"
    before.write_text("older")
    try:
        # Killed by force, so that it can't tidy up itself.
        mapped = f"vllm_offload_{world.mark}"
        with world.servers(world.spec("--ignore-term", "--shm", mapped), grace_s=0.2) as group:
            foreign.write_text("of somebody else, made meanwhile")
            tagged = Path("/dev/shm") / f"lmcache-{world.tag}"
            tagged.write_text("carries our tag")
            assert (Path("/dev/shm") / mapped).exists()
        assert before.read_text() == "older"
        assert foreign.exists()
        assert not tagged.exists() and not (Path("/dev/shm") / mapped).exists()
        assert f"left-over deleted: /dev/shm/{mapped}" in group.notes
        assert any(note.endswith(foreign.name) for note in group.notes)
    finally:
        before.unlink(missing_ok=True)
        foreign.unlink(missing_ok=True)


def test_orphans_of_a_killed_job_and_supervisor_are_found_by_the_next_trial(world: World) -> None:
    job = world.job(world.spec("--children", "away"))
    supervisors = read_until(job, "SUPERVISORS")[-1].split()[1:]
    os.kill(int(supervisors[0]), signal.SIGSTOP)  # can't act on its job's death
    job.kill()
    job.communicate()
    os.kill(int(supervisors[0]), signal.SIGKILL)
    wait_for(lambda: len(marked(world.mark)) == 1)
    ended = hygiene.end_orphans(patience_s=0.5)
    assert len(ended) == 1
    assert marked(world.mark) == []
