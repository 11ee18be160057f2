"""Leases keep trials apart, and end with their holder."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from serving_world import wait_for

from kvladder.serving import devices, locks
from kvladder.serving.errors import LeaseTimeout
from kvladder.serving.lease import lease

TWO = {"CUDA_VISIBLE_DEVICES": "0,1"}
HOLD = """
import sys, time
from pathlib import Path
from kvladder.serving.lease import lease
with lease(int(sys.argv[2]), holder='other trial', folder=Path(sys.argv[1]), environ={'CUDA_VISIBLE_DEVICES': '0,1'},
           host_slots=int(sys.argv[3])) as held:
    print(','.join(held.devices), flush=True)
    time.sleep(600)
"""


def other(folder: Path, gpus: int, slots: int = 8) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(gpus), str(slots)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.answer = process.stdout.readline().strip()  # type: ignore[attr-defined]
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_machine_is_held_by_one_and_freed_by_sigkill(tmp_path: Path) -> None:
    holder = other(tmp_path, 0, slots=1)
    words: list[str] = []
    try:
        with (
            pytest.raises(LeaseTimeout, match=rf"this machine \(held by other trial, pid {holder.pid}, for \d+ s"),
            lease(0, holder="me", folder=tmp_path, deadline_s=0.5, progress=words.append),
        ):
            pytest.fail("held twice")
        assert len(words) == 1 and "waiting for this machine" in words[0]
        threading.Timer(0.4, holder.kill).start()
        start = time.monotonic()
        with lease(0, holder="me", folder=tmp_path, deadline_s=10) as held:
            assert held.devices == [] and held.env["CUDA_VISIBLE_DEVICES"] == ""
            assert 0.2 < time.monotonic() - start < 5
    finally:
        end(holder)


def test_first_free_visible_device_is_chosen(tmp_path: Path) -> None:
    holder = other(tmp_path, 1)
    try:
        assert holder.answer == "0"  # type: ignore[attr-defined]
        with lease(1, holder="me", folder=tmp_path, environ=TWO, host_slots=8) as held:
            assert held.devices == ["1"]
            assert held.env == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        with (
            pytest.raises(LeaseTimeout, match="1 more of GPU 0"),
            lease(2, holder="me", folder=tmp_path, environ=TWO, host_slots=8, deadline_s=0.3),
        ):
            pytest.fail("device 0 is taken")
        # Nothing of the failed try is kept.
        with lease(1, holder="me", folder=tmp_path, environ=TWO, host_slots=8, deadline_s=0) as held:
            assert held.devices == ["1"]
    finally:
        end(holder)


def test_one_that_wants_the_machine_alone_and_sharers_exclude_each_other(tmp_path: Path) -> None:
    with lease(0, holder="a", folder=tmp_path, host_slots=2), lease(0, holder="b", folder=tmp_path, host_slots=2):
        for slots, reason in ((1, "this machine"), (2, "slot 0 held by a, .*slot 1 held by b")):
            with (
                pytest.raises(LeaseTimeout, match=reason),
                lease(0, holder="c", folder=tmp_path, host_slots=slots, deadline_s=0),
            ):
                pytest.fail("no room")


def test_two_that_want_two_devices_both_get_them_in_turn(tmp_path: Path) -> None:
    done: list[float] = []

    def work() -> None:
        with lease(2, holder="w", folder=tmp_path, environ=TWO, host_slots=4, deadline_s=20):
            began = time.monotonic()
            time.sleep(0.1)
            done.append(began)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    done.sort()
    assert len(done) == 3 and all(b - a >= 0.1 for a, b in itertools.pairwise(done))


def test_lock_passed_on_outlives_its_first_holder(tmp_path: Path) -> None:
    with lease(0, holder="me", folder=tmp_path) as held:
        child = subprocess.Popen(["/bin/sleep", "600"], pass_fds=held.fds)
    with pytest.raises(LeaseTimeout), lease(0, holder="next", folder=tmp_path, deadline_s=0):
        pytest.fail("servers of the last trial still run")
    child.kill()
    child.wait()
    with lease(0, holder="next", folder=tmp_path, deadline_s=0):
        pass


def test_more_devices_than_visible(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"3 GPUs asked for, 2 visible \(0, 1\)"),
        lease(3, holder="me", folder=tmp_path, environ=TWO),
    ):
        pytest.fail("no such devices")


@pytest.mark.parametrize(
    ("listed", "expected"),
    [("0,2", ["0", "2"]), ("", []), ("-1", []), ("1,-1,2", ["1"]), ("GPU-ab,GPU-cd", ["GPU-ab", "GPU-cd"])],
)
def test_visible_devices_are_read_as_cuda_reads_them(listed: str, expected: list[str]) -> None:
    assert devices.visible({"CUDA_VISIBLE_DEVICES": listed}) == expected


def test_lock_names_are_file_names() -> None:
    assert "/" not in devices.lock_name("MIG-GPU-ab/1/0")


def test_runtime_folder_of_a_user_without_name_or_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(locks, "_BASES", (str(tmp_path / "missing"), str(tmp_path)))
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.delenv("USER", raising=False)
    folder = locks.runtime_folder("ports")
    assert folder.parent.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    shared = locks.runtime_folder("leases", shared=True)
    assert shared.stat().st_mode & 0o7777 == 0o1777
    lock = locks.LockFile(shared / "x.lock")
    assert lock.acquire("me") and (shared / "x.lock").stat().st_mode & 0o777 == 0o666
    lock.release()


def test_foreign_runtime_folder_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(locks, "_BASES", (str(tmp_path),))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kvladder-shared").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="is not a folder"):
        locks.runtime_folder("leases", shared=True)


def test_holder_text_of_another_process_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.write_text('{"holder": "\\u001b[31mred' + "x" * 500 + '", "pid": 3, "since": 0}')
    text = locks.LockFile(path).holder()
    assert "\x1b" not in text and len(text) < 260
    path.write_text("nonsense")
    assert locks.LockFile(path).holder() == "an unknown process"


def test_wait_ends_soon_after_release(tmp_path: Path) -> None:
    got: list[object] = []
    with lease(0, holder="me", folder=tmp_path):
        thread = threading.Thread(target=lambda: got.append(lease(0, holder="b", folder=tmp_path).__enter__()))
        thread.start()
        time.sleep(0.3)
        assert not got
    wait_for(lambda: got, seconds=3)
    thread.join()
