"""The engine plugin's tests (``tests/plugin``), under the interpreter that engines run from: they need vLLM."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "envs" / "cpu" / ".venv" / "bin" / "python"
RUNNER = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")


def borrowed(folder: Path) -> Path:
    """Links to pytest and what it needs: the stack has none, and what servers run from isn't changed for tests."""
    for name in RUNNER:
        files = distribution(name).files or []
        for top in {file.parts[0] for file in files if not file.parts[0].startswith("..")}:
            link = folder / top
            if top != "__pycache__" and not link.exists():
                link.symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder


@pytest.mark.engine
def test_plugin_under_the_stack(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.fail("the cpu stack isn't installed: run `make setup`")
    argv = [str(PYTHON), "-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT / "tests" / "plugin"), "-q", "-rs"]
    done = subprocess.run(
        [*argv, "-p", "no:cacheprovider", str(ROOT / "tests" / "plugin")],
        env={**os.environ, "PYTHONPATH": str(borrowed(tmp_path)), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 10, done.stdout[-2000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]
