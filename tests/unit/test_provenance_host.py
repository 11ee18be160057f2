"""What a trial's record says of the harness that made it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvladder.provenance.host import describe_harness


def test_the_revision_comes_from_git_else_from_whoever_copied_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("KVLADDER_REVISION", raising=False)
    assert describe_harness(tmp_path)["revision"] == "unknown"
    monkeypatch.setenv("KVLADDER_REVISION", "abc123")
    assert describe_harness(tmp_path)["revision"] == "abc123"

    def git(*arguments: str) -> str:
        argv = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y", *arguments]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "workflow").mkdir()
    tracked = tmp_path / "workflow" / "code.py"
    tracked.write_text("", encoding="utf-8")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")
    assert describe_harness(tmp_path)["revision"] == head
    tracked.write_text("changed", encoding="utf-8")
    assert describe_harness(tmp_path)["revision"] == f"{head}+changes"
