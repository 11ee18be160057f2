"""The Makefile and the harness's installer, with stand-ins for what they run."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from .conftest import ROOT

RUN = """#!/bin/bash
echo "begin $*" >>ran.txt
case "$*" in
  *"snakemake --cores"*) echo "installing" && sleep "${SETUP_S:-0.2}" ;;
  *) sleep 0.2 ;;
esac
echo "end $*" >>ran.txt
case "$*" in
  *"-m ruff"*) exit "${LINT_CODE:-0}" ;;
  *"snakemake --cores"*) exit "${SETUP_CODE:-0}" ;;
  *"-m engine"*) exit "${ENGINE_CODE:-0}" ;;
esac
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The Makefile and what calls it, among programs that only say that they ran."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    program(tmp_path / ".ci/run", (ROOT / ".ci/run").read_text(encoding="utf-8"))
    program(tmp_path / "envs/harness/install.sh", RUN)
    program(tmp_path / "envs/harness/.venv/bin/python", RUN)
    return tmp_path


def run(folder: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(argv, cwd=folder, env=kept | environment, capture_output=True, text=True, check=False)


def make(folder: Path, *arguments: str, **environment: str) -> int:
    return run(folder, "make", *arguments, **environment).returncode


def ran(folder: Path) -> list[str]:
    return (folder / "ran.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("target", ["test", "test-all"])
def test_tests_that_are_not_there_fail(folder: Path, target: str) -> None:
    assert make(folder, target) == 0
    assert make(folder, target, ENGINE_CODE="5") != 0, "pytest's code where no test was collected"


def test_one_thing_after_the_other(folder: Path) -> None:
    assert make(folder, "-j8", "test", "lint") == 0
    lines = ran(folder)
    assert [line.replace("begin", "end") for line in lines[::2]] == lines[1::2]


SETUP, ENGINE = "-m snakemake --cores all env", "-m pytest -n 2 --dist loadfile -m engine and not slow"


def test_ci_has_the_engines_before_it_tests_them(folder: Path) -> None:
    done = run(folder, ".ci/run", SETUP_S="5")
    assert done.returncode == 0, done.stderr
    lines = ran(folder)
    between = lines[lines.index(f"begin {SETUP}") : lines.index(f"end {SETUP}")]
    assert any("not engine" in line for line in between), "the other tests don't wait for them"
    assert lines.index(f"end {SETUP}") < lines.index(f"begin {ENGINE}")
    assert run(folder, ".ci/run", ENGINE_CODE="1").returncode != 0


def test_ci_without_engines_fails_and_says_why(folder: Path) -> None:
    done = run(folder, ".ci/run", SETUP_CODE="3")
    assert done.returncode != 0
    assert "installing" in done.stdout
    assert not any(ENGINE in line for line in ran(folder))


def test_ci_that_fails_early_ends_the_installation(folder: Path) -> None:
    done = run(folder, ".ci/run", LINT_CODE="1", SETUP_S="600")
    assert done.returncode != 0
    assert not any("pytest" in line for line in ran(folder))
    deadline = time.monotonic() + 30
    while left := [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


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
