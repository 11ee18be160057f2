"""Patches to installed packages: applied once, recognised when they are, refused when they don't fit."""

from __future__ import annotations

import os
import subprocess
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


def targets(patch: Path) -> list[str]:
    """Files that a patch changes, as it names them, without the leading ``b/``."""
    lines = patch.read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line[4:].partition("\t")[0].strip() for line in lines if line.startswith("+++ ")]
    return [name.partition("/")[2] for name in names if name != "/dev/null"]


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
