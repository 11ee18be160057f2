"""The stock variant of a stack: its pinned packages without the project's patches, beside the patched ones.

``<stack>/.venv/variants/stock`` goes in front of a stock engine's ``PYTHONPATH``. It holds the patched packages as
overlays: real folders on the way to a patched file, that file as it was before (the patches taken back), and links to
everything else. So it takes no room, needs nothing of the file system but links, and is the installed package in all
that no patch touches. Which variant an engine ran is proved by its own lines (`kvladder_engine_plugin.sources`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from kvladder.config.experiment import ExperimentConfig
from kvladder.config.stack import PatchedFile, StackConfig
from kvladder.config.yaml import ConfigError
from kvladder.stack import patching

STOCK = "stock"

WATCHED = "KVLADDER_SOURCES"
"""Environment variable with the modules that an engine reports: `kvladder_engine_plugin.sources.VARIABLE`."""

_LINE = re.compile(
    r"kvladder source: (?P<module>[\w.]+) "
    r"(?:runs sha256:(?P<sha256>[0-9a-f]{64})|is (?P<watched>watched)|was loaded (?P<unwatched>unwatched))"
)


def folder(stack: Path) -> Path:
    """Where a stack's stock variant is, below the stack's folder: what goes in front of ``PYTHONPATH``."""
    return stack / ".venv" / "variants" / STOCK


def check(config: ExperimentConfig, stack: StackConfig) -> None:
    """Refuse a stock setup on a stack that is stock anyway. Raises ConfigError."""
    for name, setup in config.setups.items():
        if setup.variant == STOCK and not stack.patches:
            raise ConfigError(
                f"setups.{name}.variant: {STOCK!r}: the stack {config.stack} has no patches, so every setup runs it "
                "stock: leave the key out"
            )


def make_stock(home: Path, patched: Sequence[tuple[Path, Path]]) -> dict[str, PatchedFile]:
    """Make ``home`` the stock variant of what is installed; what was there before is replaced.

    ``patched`` are (site folder, patch) in the order in which they were applied. Returns the files that patches touch,
    by path below their site folder. Raises PatchError when a patch can't be taken back.
    """
    scratch = home.with_name(f".{home.name}.{os.getpid()}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    sites: dict[str, Path] = {name: site for site, patch in patched for name in patching.touched(patch)}
    try:
        for name, site in sites.items():
            if (site / name).is_file():
                (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(site / name, scratch / name)
        for _, patch in reversed(patched):
            patching.take_back(patch, scratch)
        files = {
            name: PatchedFile(patched=_sha256(site / name), stock=_sha256(scratch / name))
            for name, site in sorted(sites.items())
        }
        for name in sites:
            # All of them before the first link: nothing may be made through one.
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        for name, site in sites.items():
            _link_beside(site, scratch, PurePosixPath(name), set(sites))
        shutil.rmtree(home, ignore_errors=True)
        if sites:
            home.parent.mkdir(parents=True, exist_ok=True)
            scratch.rename(home)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return files


def _link_beside(site: Path, tree: Path, name: PurePosixPath, touched: set[str]) -> None:
    """Links in ``tree`` to all that lies beside ``name``, and beside the folders that it is in, down from its package.

    Compiled files are left out there: those of a patched file are of another source.
    """
    for below in list(name.parents)[:-1]:
        for entry in (site / below).iterdir():
            place = tree / below / entry.name
            if entry.name != "__pycache__" and str(below / entry.name) not in touched and not os.path.lexists(place):
                place.symlink_to(entry.absolute())


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def modules(files: Iterable[str]) -> dict[str, str]:
    """Python modules by name, with their file, of paths below a site folder; files that are none are left out."""
    found = {}
    for name in files:
        path = PurePosixPath(name)
        if path.suffix == ".py":
            parts = path.parent.parts if path.stem == "__init__" else path.with_suffix("").parts
            found[".".join(parts)] = name
    return found


def ran(log: str, files: Mapping[str, PatchedFile]) -> dict[str, str | None]:
    """What an engine's log says of each module among ``files`` that it loaded: ``patched``, ``stock``, or a SHA-256.

    ``None``: it doesn't say, so nobody knows; several processes of one engine that differ are all named. A module that
    was watched and never loaded isn't there: an engine without it is the same in both variants.
    """
    said: dict[str, list[str]] = {}
    watched: set[str] = set()
    unwatched: set[str] = set()
    for match in _LINE.finditer(log):
        if match["sha256"] is not None:
            said.setdefault(match["module"], []).append(match["sha256"])
        else:
            (watched if match["watched"] else unwatched).add(match["module"])
    found: dict[str, str | None] = {}
    for module, name in modules(files).items():
        if module in unwatched or module not in watched:
            found[module] = None
        elif module in said:
            names = {files[name].stock: STOCK, files[name].patched: "patched"}
            found[module] = " and ".join(sorted({names.get(each, f"sha256:{each[:12]}") for each in said[module]}))
    return found
