"""The Makefile and the harness's installer, with stand-ins for what they run."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from .conftest import ROOT

RUN = """#!/bin/bash
echo "begin $*" >>ran.txt
sleep 0.2
echo "end $*" >>ran.txt
case "$*" in
  *"-m engine"*) exit "${ENGINE_CODE:-0}" ;;
esac
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The Makefile among programs that only say that they ran."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    program(tmp_path / "envs/harness/install.sh", RUN)
    program(tmp_path / "envs/harness/.venv/bin/python", RUN)
    return tmp_path


def make(folder: Path, *arguments: str, **environment: str) -> int:
    kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(["make", *arguments], cwd=folder, env=kept | environment, capture_output=True, check=False)
    return done.returncode


@pytest.mark.parametrize("target", ["test", "test-all"])
def test_tests_that_are_not_there_fail(folder: Path, target: str) -> None:
    assert make(folder, target) == 0
    assert make(folder, target, ENGINE_CODE="5") != 0, "pytest's code where no test was collected"


def test_one_thing_after_the_other(folder: Path) -> None:
    assert make(folder, "-j8", "test", "lint") == 0
    lines = (folder / "ran.txt").read_text(encoding="utf-8").splitlines()
    assert [line.replace("begin", "end") for line in lines[::2]] == lines[1::2]


def test_an_old_python_is_told_which_one_is_needed(tmp_path: Path) -> None:
    program(tmp_path / "envs/harness/install.sh", (ROOT / "envs/harness/install.sh").read_text(encoding="utf-8"))
    program(tmp_path / "python3.9", "#!/bin/sh\nexit 1\n")
    done = subprocess.run(
        [str(tmp_path / "envs/harness/install.sh")],
        env={**os.environ, "PYTHON": str(tmp_path / "python3.9")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "3.11 itself for the cpu stack" in done.stderr
    assert "PYTHON=python3.11" in done.stderr
