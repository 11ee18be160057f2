"""Patches to installed packages: applied once, recognised when they are, refused when they don't fit."""

from __future__ import annotations

import os
import subprocess
from itertools import pairwise
from pathlib import Path


class PatchError(RuntimeError):
    """A patch that doesn't fit; the message names the patch and the file."""


def apply(patch: Path, site: Path) -> bool:
    """Apply one patch (``-p1``) below ``site``, the folder the package is installed in.

    Returns False when it was applied before. Raises PatchError when it fits neither way.
    """
    if _git(patch, site, "--reverse", "--check").returncode == 0:
        return False
    checked = _git(patch, site, "--check")
    if checked.returncode != 0:
        files = ", ".join(targets(patch)) or "no file"
        first = (checked.stderr.strip().splitlines() or ["no message"])[0].removeprefix("error: ")
        raise PatchError(f"patch {patch} does not fit {files} below {site}: {first}")
    done = _git(patch, site)
    if done.returncode != 0:
        raise PatchError(f"patch {patch}: {done.stderr.strip()}")
    return True


def take_back(patch: Path, site: Path) -> None:
    """Undo one applied patch below ``site``. Raises PatchError where it isn't what was applied."""
    done = _git(patch, site, "--reverse")
    if done.returncode != 0:
        first = (done.stderr.strip().splitlines() or ["no message"])[0].removeprefix("error: ")
        raise PatchError(f"patch {patch} can't be taken back: {first}")


def targets(patch: Path) -> list[str]:
    """Files that a patch changes or adds, as it names them, without the leading ``b/``."""
    return [name for _, name in _headers(patch) if name is not None]


def touched(patch: Path) -> list[str]:
    """Files that a patch changes, adds or removes, each once."""
    return list(dict.fromkeys(name for pair in _headers(patch) for name in pair if name is not None))


def _headers(patch: Path) -> list[tuple[str | None, str | None]]:
    """(Before, after) of every file in a patch; None: there is no such file."""
    lines = patch.read_text(encoding="utf-8", errors="replace").splitlines()
    pairs = [pair for pair in pairwise(lines) if pair[0].startswith("--- ") and pair[1].startswith("+++ ")]
    return [(_named(before), _named(after)) for before, after in pairs]


def _named(header: str) -> str | None:
    name = header[4:].partition("\t")[0].strip()
    return None if name == "/dev/null" else name.partition("/")[2]


def _git(patch: Path, site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # Inside a repository `git apply` silently skips what lies outside its own view of the tree: hide the repository.
    environment = {**os.environ, "GIT_DIR": os.devnull, "GIT_CEILING_DIRECTORIES": str(site.parent), "LC_ALL": "C"}
    return subprocess.run(
        ["git", "apply", "-p1", "--whitespace=nowarn", *options, str(patch.absolute())],
        cwd=site,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
