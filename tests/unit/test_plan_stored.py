"""The results folder of a run: one run at a time, and a clear word where it can't be had."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvladder.plan import stored

CLAIM = "import sys; from pathlib import Path; from kvladder.plan import stored; held = stored.claim(Path(sys.argv[1]))"


def claim_elsewhere(results: Path, after: str = "") -> subprocess.Popen[str]:
    """Another process that claims the folder and then does what `after` says."""
    command = [sys.executable, "-c", f"{CLAIM}\n{after}", str(results)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_one_run_at_a_time_and_the_next_after_it_however_it_ended(tmp_path: Path) -> None:
    results = tmp_path / "results" / "tiny"
    other = claim_elsewhere(results, "print('claimed', flush=True); sys.stdin.read()")
    assert other.stdout is not None
    assert other.stdout.readline() == "claimed\n"
    with pytest.raises(stored.NotOurs, match=rf"{results} is in use by another run \(snakemake on .*pid {other.pid}, "):
        stored.claim(results)
    other.kill()
    other.wait()
    stored.claim(results).release()


def test_a_job_of_the_run_does_not_keep_the_claim(tmp_path: Path) -> None:
    held = stored.claim(tmp_path)
    code = "print('runs', flush=True); input()"
    job = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
    # Until then the kernel may still be closing what the new program doesn't inherit.
    assert job.stdout is not None
    assert job.stdout.readline() == b"runs\n"
    held.release()
    stored.claim(tmp_path).release()
    job.communicate(b"\n")


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    with pytest.raises(stored.NotOurs, match=r"results/tiny can't be written: Not a directory"):
        stored.claim(tmp_path / "results" / "tiny")


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    stored.claim(tmp_path)
    assert (tmp_path / stored.LOCK).is_file(), "it can be written, and that is all that can be known"
