"""Checks around a trial: refuse what collides, note what doesn't, delete only what is ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving_world import World

from kvladder.serving import devices, hygiene
from kvladder.serving.errors import NotClean

SHM = Path("/dev/shm")


def test_collision_in_shm_is_refused_and_kept(world: World) -> None:
    path = SHM / f"pool-{world.mark}"
    path.write_text("somebody's")
    try:
        with pytest.raises(NotClean, match=f"/dev/shm/{path.name} exists already"):
            hygiene.before_start(tag=world.tag, shm_names=[f"pool-{world.mark[:20]}*"])
        baseline = hygiene.before_start(tag=world.tag, shm_names=["other-*"])
        assert any("entries before the start, kept" in note for note in baseline.notes)
        assert not any(path.name in note for note in hygiene.after_stop(baseline, tag=world.tag))
        assert path.read_text() == "somebody's"
    finally:
        path.unlink()


def test_own_tag_from_an_earlier_try_is_deleted(world: World) -> None:
    path = SHM / f"lmcache-{world.tag}-l1"
    path.write_text("ours")
    baseline = hygiene.before_start(tag=world.tag, shm_names=[path.name])
    assert not path.exists()
    assert any(path.name in note and "deleted" in note for note in baseline.notes)


def test_earlier_attempt_of_the_same_trial_is_deleted_and_no_other(world: World) -> None:
    """Each attempt has a random end of its own; what a killed one left must still be known for ours."""
    killed = SHM / f"lmcache_l1_pool_kvladder-{world.tag}-r0-0123abcd"
    used = SHM / f"{world.tag}-r0-89abcdef_dp0"
    others = [SHM / f"{world.tag}-{end}" for end in ("r1-0123abcd", "r0-x", "r0-0123abcdef", "r0-2-0123abcd")]
    paths = [killed, used, *others]
    for path in paths:
        path.write_text("x")
    try:
        tag = f"{world.tag}-r0-ffffffff"
        with used.open():
            notes = hygiene.before_start(tag=tag, earlier=f"{world.tag}-r0-").notes
            assert not killed.exists() and used.exists()
        assert f"left-over of an earlier try deleted: {killed}" in notes
        assert f"left-over of an earlier try still in use: {used}" in notes
        assert all(path.exists() for path in others)
        hygiene.before_start(tag=tag, earlier=f"{world.tag}-r0-")
        assert not used.exists()
        with pytest.raises(ValueError, match="dash"):
            hygiene.before_start(tag=tag, earlier=world.tag)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_too_little_shared_memory_is_refused(world: World) -> None:
    with pytest.raises(NotClean, match="bytes free, the setup needs 1000000000000000"):
        hygiene.before_start(tag=world.tag, shm_bytes=10**15)


def test_after_stop_tells_tagged_from_foreign(world: World) -> None:
    baseline = hygiene.before_start(tag=world.tag)
    foreign = SHM / f"psm_{world.mark}"
    foreign.write_text("x")
    (SHM / f"{world.tag}.sock").write_text("x")
    used = SHM / f"{world.tag}.used"
    try:
        with used.open("w"):
            notes = hygiene.after_stop(baseline, tag=world.tag)
            assert used.exists()
        assert f"left-over deleted: /dev/shm/{world.tag}.sock" in notes
        assert f"left-over still in use: /dev/shm/{world.tag}.used" in notes
        assert any(note.endswith(foreign.name) and "kept" in note for note in notes)
    finally:
        foreign.unlink()
        used.unlink()


def test_short_tag_proves_nothing(world: World) -> None:
    baseline = hygiene.before_start(tag="a")
    path = SHM / f"a-{world.mark}"
    path.write_text("x")
    hygiene.after_stop(baseline, tag="a")
    assert path.exists()
    path.unlink()


def test_process_of_ours_on_a_device(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [devices.GpuProcess("0", 4711, "VLLM::EngineCore", 1), devices.GpuProcess("0", 99, "other", None)]
    monkeypatch.setattr(hygiene.gpu, "processes", lambda ids: listed if ids else [])
    monkeypatch.setattr(hygiene, "_GPU_PATIENCE_S", 0.1)
    baseline = hygiene.before_start(tag=world.tag, devices=["0"])
    assert "GPU 0 is also used by pid 99 (other)" in baseline.notes
    with pytest.raises(NotClean, match=r"pid 4711 .* still holds GPU 0"):
        hygiene.after_stop(baseline, tag=world.tag, devices=["0"], pids=[4711])
    hygiene.after_stop(baseline, tag=world.tag, devices=["0"], pids=[12])


def test_fake_nvml_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boards answer NotSupported, and older bindings answer bytes."""
    import sys
    import types

    class NVMLError(Exception):
        pass

    fake = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: b"GPU-ab",
    )

    def refuse(_: object) -> None:
        raise NVMLError

    fake.nvmlDeviceGetComputeRunningProcesses = refuse
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert devices.visible({}) == ["0", "1"]
    assert devices.lock_name("0") == "gpu-GPU-ab"
    assert devices.processes(["0", "1"]) == []
