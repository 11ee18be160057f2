"""Published results can be rebuilt without the machine that they were measured on, byte for byte."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

NAMES = sorted(path.parent.name for path in (ROOT / "results" / "published").glob("*/raw.tar.xz"))


def rebuild(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvladder.provenance.publish", "rebuild", name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "workflow")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("name", NAMES)
def test_tables_and_figures_come_out_byte_for_byte(name: str, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    skip = shutil.ignore_patterns("*.pyc.*", ".venv", ".cache", "*.egg-info")
    for part in ("workflow", "envs", "patches"):
        shutil.copytree(ROOT / part, clone / part, ignore=skip)
    shutil.copytree(ROOT / "results" / "published" / name, clone / "results" / "published" / name)
    done = rebuild(clone, name)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    page = Path("reports", "published", f"{name}.html")
    assert (clone / page).read_bytes() == (ROOT / page).read_bytes(), f"{page} isn't what `make published` builds"
    # Fonts of the system are embedded in the PDF, so its bytes are this machine's.
    assert (clone / page.with_suffix(".pdf")).read_bytes().startswith(b"%PDF")
    # The check itself: another byte in a published sum is noticed.
    sums = clone / "results" / "published" / name / "derived.sha256"
    text = sums.read_text(encoding="utf-8")
    sums.write_text(("0" if text[0] != "0" else "1") + text[1:], encoding="utf-8")
    again = rebuild(clone, name)
    assert again.returncode != 0
    assert "other bytes than published" in again.stderr
