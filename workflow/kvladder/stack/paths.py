"""Where stacks, their patches and the engine plugin lie."""

from __future__ import annotations

import os
from pathlib import Path

from kvladder.config.stack import StackConfig
from kvladder.config.yaml import ConfigError

ROOT = Path(__file__).resolve().parents[3]
"""The repository: the library is used from its tree (an editable install)."""

PLUGIN = ROOT / "envs" / "plugin"
EXTRA_STACKS = "KVLADDER_STACKS"
"""Environment variable: further folders that hold stacks, separated as in PATH; looked at after ``envs/``."""


def homes() -> list[Path]:
    """Folders that hold stacks."""
    extra = [Path(entry).absolute() for entry in os.environ.get(EXTRA_STACKS, "").split(os.pathsep) if entry]
    return [ROOT / "envs", *extra]


def find(name: str) -> Path:
    """Folder of a stack. Raises ConfigError, naming the stacks there are."""
    for home in homes():
        if (home / name / "stack.yaml").is_file():
            return home / name
    known = sorted({path.parent.name for home in homes() for path in home.glob("*/stack.yaml")})
    raise ConfigError(f"stack: unknown {name!r}; stacks are: {', '.join(known)} (folders of envs/ with a stack.yaml)")


def stamp_of(folder: Path, content: str = "") -> Path:
    """Where the stamp of a stack is; with ``content``, the hash of its definition, the copy that rules wait for."""
    return folder / ".venv" / f"kvladder-stamp{'-' if content else ''}{content}.json"


def folder_of(stamp: Path) -> Path:
    """The stack's folder whose stamp this is."""
    return stamp.parent.parent


def version_of(stack: StackConfig, distribution: str) -> str | None:
    """Pinned version of a distribution, as far as ``stack.yaml`` has it."""
    return stack.engine_version if distribution == stack.engine else stack.packages.get(distribution)


def patch_files(folder: Path, stack: StackConfig) -> list[tuple[str, Path]]:
    """(distribution, patch) in the order they are applied: ``patches/<package>/<version>/*.patch``, sorted by name.

    A stack's own folder may have a ``patches`` folder, which comes first. Raises ConfigError when a patch is missing.
    """
    found: list[tuple[str, Path]] = []
    for package, distribution in stack.patches.items():
        version = version_of(stack, distribution)
        if version is None:
            raise ConfigError(
                f"{folder / 'stack.yaml'}: patches.{package}: {distribution!r} is neither the engine nor in "
                "`packages`, so its version isn't known"
            )
        for base in (folder / "patches", ROOT / "patches"):
            patches = sorted((base / package / version).glob("*.patch"))
            if patches:
                found += [(distribution, patch) for patch in patches]
                break
        else:
            raise ConfigError(
                f"{folder / 'stack.yaml'}: patches.{package}: no patch in patches/{package}/{version}: "
                "add it, or take the package out of `patches`"
            )
    return found


def plugin_files() -> list[Path]:
    """Sources of the engine plugin."""
    return sorted([PLUGIN / "pyproject.toml", *(PLUGIN / "kvladder_engine_plugin").rglob("*.py")])


def definition_files(folder: Path, stack: StackConfig) -> list[Path]:
    """All that defines a stack: its own files, its patches, the plugin.

    Raises ConfigError when a patch or the lock is missing.
    """
    own = [folder / "stack.yaml"]
    lock = folder / "requirements.lock"
    if lock.is_file():
        own.append(lock)
    elif stack.source == "venv":
        raise ConfigError(f"{lock}: is missing, a stack with source: venv is installed from it")
    own += sorted(path for path in folder.glob("*.py"))
    plugin = plugin_files() if stack.device != "none" else []
    return own + [patch for _, patch in patch_files(folder, stack)] + plugin
