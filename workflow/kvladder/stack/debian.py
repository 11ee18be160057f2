"""System packages: looked at, and installed where we may."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable

Say = Callable[[str], None]

LIBRARIES = {"libibverbs1": "libibverbs.so.1", "libpango-1.0-0": "libpango-1.0.so.0"}
"""Shared library that a package is wanted for: one that loads is as good as the package (an offline bundle's)."""


def missing(packages: Iterable[str]) -> list[str]:
    """Debian packages that are neither installed nor replaced by a library that loads.

    Empty on systems without dpkg: nothing can be said there.
    """
    if shutil.which("dpkg-query") is None:
        return []
    return [name for name in packages if not _installed(name) and not _loads(name)]


def _loads(package: str) -> bool:
    try:
        return package in LIBRARIES and bool(ctypes.CDLL(LIBRARIES[package]))
    except OSError:
        return False


def _installed(package: str) -> bool:
    done = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode == 0 and done.stdout.strip() == "installed"


def install(packages: Iterable[str], say: Say) -> str | None:
    """Install what is missing. Returns None, or why it couldn't and what to do: one message."""
    wanted = missing(packages)
    if not wanted:
        return None
    by_hand = f"install them with: apt-get install {' '.join(wanted)}"
    if os.geteuid() != 0:
        return f"Debian packages are missing, and only root can install them; {by_hand}"
    say(f"apt-get install {' '.join(wanted)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # A fresh image has no package lists, an old one may have stale ones.
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", *wanted]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0 and command[1] == "install":
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return f"Debian packages could not be installed ({last}); {by_hand}"
    return None
