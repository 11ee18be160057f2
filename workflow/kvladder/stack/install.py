"""Make a stack ready to serve from, and say so in its stamp.

A stack with ``source: venv`` gets its own virtual environment, installed from the lock alone (no resolving), plus the
engine plugin, less what is unwanted, with its patches applied and, beside it, what they changed as it was (`variants`).
A ``preinstalled`` stack is the interpreter that runs this: its versions are checked. So is any stack whose pinned
versions the running interpreter has already (an offline bundle on its path): where no network is, nothing could be
installed. Doing it again installs nothing. The stamp is written last: an environment without one is half-made and is
made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kvladder.config import stack as stacks
from kvladder.config.stack import PatchedFile, StackConfig, StackStamp
from kvladder.stack import debian, patching, variants
from kvladder.stack.paths import PLUGIN, patch_files, plugin_files, stamp_of, version_of

Say = Callable[[str], None]

_PLUGIN = "kvladder-engine-plugin"
_MARK = "kvladder-made"
"""File that says whose environment it is; with a stamp beside it, it is whole."""

_VERSIONS = (
    "import importlib.metadata as m, json, platform; "
    "print(json.dumps([platform.python_version(), {d.metadata['Name']: d.version for d in m.distributions()}]))"
)
_SITE = "import importlib.metadata as m; print(m.distribution({!r}).locate_file(''))"
_PLUGIN_HOME = "import importlib.util as u; print(u.find_spec('kvladder_engine_plugin').submodule_search_locations[0])"


class InstallError(RuntimeError):
    """A stack that can't be made ready; the message says what is missing and how to provide it."""


def install(folder: Path, say: Say, copy: Path | None = None) -> StackStamp:
    """Install the stack of ``folder`` as far as it isn't, verify it, write its stamp, and ``copy`` of it.

    Raises InstallError, PatchError or ConfigError; then there is no stamp.
    """
    stack = stacks.load(folder)
    stamp_path = stamp_of(folder)
    old = _read_stamp(stamp_path)
    if stack.source == "venv" and not (folder / ".venv" / "bin").exists() and _has_all(stack):
        say(f"stack {folder.name}: {sys.executable} has {stack.engine} {stack.engine_version}: used as it is")
        stack = stack.model_copy(update={"source": "preinstalled"})
    problem = debian.install(stack.debian, say)
    if problem is not None:
        raise InstallError(f"stack {folder.name}: {problem}")
    if stack.source == "venv":
        python = _venv(folder, stack, old, say)
    else:
        python = Path(sys.executable)
        if not stack.python_fits(sys.version_info[:2]):
            raise InstallError(
                f"stack {folder.name}: python: {stack.python} is wanted, {python} is "
                f"{sys.version_info.major}.{sys.version_info.minor}"
            )
        stamp_path.unlink(missing_ok=True)
    if stack.device != "none":
        _plugin(python, say)
    patched = _patch(folder, stack, python, old, say)
    stamp = _stamp(folder, stack, python, variants.make_stock(variants.folder(folder), patched))
    _check(folder, stack, stamp)
    for other in stamp_path.parent.glob("kvladder-stamp-*.json"):
        other.unlink()
    _write(stamp_path, stamp)
    if copy is not None:
        _write(copy, stamp)
    return stamp


def _has_all(stack: StackConfig) -> bool:
    """Whether the interpreter that runs this fits, and has every version that ``stack.yaml`` names."""
    if stack.device == "none" or not stack.python_fits(sys.version_info[:2]):
        return False
    return not wrong_versions(stack, _versions(Path(sys.executable))[1])


def _venv(folder: Path, stack: StackConfig, old: StackStamp | None, say: Say) -> Path:
    """The stack's own interpreter, with exactly the lock's packages."""
    home = folder / ".venv"
    python = home / "bin" / "python"
    lock = folder / "requirements.lock"
    pins = _pins(lock)  # a lock that can't be used is refused before anything is made or removed
    if old is not None and old.lock_sha256 == _sha256(lock) and _runs(python) and not _differences(lock, python, stack):
        say(f"stack {folder.name}: {home} holds what {lock.name} says")
        stamp_of(folder).unlink()
        return python
    if home.exists():
        if old is None and not (home / _MARK).exists() and any(home.iterdir()):
            raise InstallError(f"{home} was not made by kvladder, so it is not touched: move it away")
        say(f"stack {folder.name}: {'the lock changed' if old else 'half-made'}: {home} is made again")
        shutil.rmtree(home)
    home.mkdir()
    (home / _MARK).touch()
    base = _base_python(folder, stack)
    say(f"stack {folder.name}: {home} with Python {stack.python}")
    done = subprocess.run([base, "-m", "venv", "--clear", str(home)], capture_output=True, text=True, check=False)
    (home / _MARK).touch()
    if done.returncode != 0:
        raise InstallError(
            f"stack {folder.name}: {base} can't make a virtual environment; on Debian: apt-get install python3-venv"
        )
    _install_lock(folder, stack, python, pins, say)
    return python


def _base_python(folder: Path, stack: StackConfig) -> str:
    if stack.python_fits(sys.version_info[:2]):
        return str(Path(sys.base_prefix) / "bin" / f"python{stack.python}")
    found = shutil.which(f"python{stack.python}")
    if found is None:
        raise InstallError(f"stack {folder.name}: Python {stack.python} is needed: put python{stack.python} on PATH")
    return found


def _install_lock(folder: Path, stack: StackConfig, python: Path, pins: dict[str, str], say: Say) -> None:
    """Install the lock's pins with --no-deps; local versions ('+cpu') first: they decide which index is needed."""
    lines = [f"{name}=={version}" for name, version in pins.items()]
    local = [line for line in lines if "+" in line]
    rest = [line for line in lines if "+" not in line]
    done = 0
    for part in (local, rest):
        if not part:
            continue
        errors = []
        for extra in ([], ["--extra-index-url", stack.extra_index] if stack.extra_index else None):
            if extra is None:
                continue
            if extra:
                say(f"not all found where pip looks by itself: trying {stack.extra_index} as well")
            error = _pip(python, ["install", "--no-deps", *extra, *part], say, done, len(lines))
            if error is None:
                break
            errors.append(error)
        else:
            tried = "the package index that pip is configured for" + (
                f" and {stack.extra_index}" if stack.extra_index else ""
            )
            raise InstallError(
                f"stack {folder.name}: {folder / 'requirements.lock'} can't be installed from {tried}: {errors[0]}. "
                "Provide an index or a folder that has it (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) and run again"
            )
        done += len(part)
    unwanted = [name for name in stack.unwanted if _normal(name) in _versions(python)[1]]
    if unwanted:
        _pip(python, ["uninstall", "-y", *unwanted], say, 0, 0)


def _pip(python: Path, arguments: Sequence[str], say: Say, done: int, total: int) -> str | None:
    """Run pip with progress lines. Returns its error line, None on success."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    environment = {**os.environ, "PIP_PROGRESS_BAR": "off", "PYTHONUNBUFFERED": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    error = "pip gave no reason"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, encoding="utf-8"
    ) as process:
        assert process.stdout is not None  # noqa: S101
        for line in process.stdout:
            if line.startswith("ERROR:"):
                error = line.removeprefix("ERROR:").strip()
            elif line.startswith(("Collecting ", "Processing ")):
                done += 1
                say(f"  {done}/{total} {line.split()[1]}" if total else f"  {line.strip()}")
            elif line.startswith("Installing collected packages"):
                say("  unpacking")
    return None if process.returncode == 0 else error


def _plugin(python: Path, say: Say) -> None:
    """Install the engine plugin from a copy: building it where it lies would litter the tree."""
    if _PLUGIN in _versions(python)[1] and _same_plugin(Path(_output(python, _PLUGIN_HOME).strip())):
        return
    say("engine plugin")
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "plugin"
        shutil.copytree(PLUGIN, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--force-reinstall"]
        error = _pip(python, ["install", *options, str(copy)], lambda _: None, 0, 0)
    if error is not None:
        raise InstallError(f"the engine plugin can't be installed into {python}: {error}")


def _same_plugin(installed: Path) -> bool:
    """Whether an installed plugin has the sources that lie here, and the same ones."""
    package = PLUGIN / "kvladder_engine_plugin"
    pairs = [(path, installed / path.relative_to(package)) for path in package.rglob("*.py")]
    return all(there.is_file() and _sha256(there) == _sha256(here) for here, there in pairs)


def _patch(folder: Path, stack: StackConfig, python: Path, old: StackStamp | None, say: Say) -> list[tuple[Path, Path]]:
    """Apply the patches; a package whose set of patches changed is installed afresh first.

    Returns (site folder, patch) in the order applied.
    """
    wanted = patch_files(folder, stack)
    if old is not None and old.patches and old.patches != _patch_hashes(wanted):
        for distribution in sorted({name for name, _ in wanted} | set(stack.patches.values())):
            pin = f"{distribution}=={version_of(stack, distribution)}"
            say(f"{distribution}: its patches changed, so it is installed afresh")
            error = _pip(python, ["install", "--no-deps", "--force-reinstall", pin], say, 0, 0)
            if error is not None:
                raise InstallError(f"stack {folder.name}: {pin} can't be installed afresh: {error}")
    patched = []
    for distribution, patch in wanted:
        # A preinstalled package may lie on the interpreter's path, and not in its own folder.
        site = Path(_output(python, _SITE.format(distribution)).strip())
        if patching.apply(patch, site):
            say(f"{distribution}: {patch.name} applied to {', '.join(patching.targets(patch))}")
        patched.append((site, patch))
    return patched


def _patch_hashes(patches: Sequence[tuple[str, Path]]) -> dict[str, str]:
    return {f"{patch.parent.parent.name}/{patch.parent.name}/{patch.name}": _sha256(patch) for _, patch in patches}


def _stamp(folder: Path, stack: StackConfig, python: Path, patched_files: dict[str, PatchedFile]) -> StackStamp:
    version, packages = _versions(python)
    lock = folder / "requirements.lock"
    interpreter = Path(os.path.abspath(python))  # noqa: PTH100 (a venv's python is a link that must stay one)
    here = Path.cwd()
    named = {_normal(name) for name in (stack.engine, *stack.packages, *stack.patches.values())}
    return StackStamp(
        stack=folder.name,
        lock_sha256=_sha256(lock) if lock.is_file() else "",
        python=version,
        interpreter=str(interpreter.relative_to(here) if interpreter.is_relative_to(here) else interpreter),
        source=stack.source,
        packages={n: v for n, v in sorted(packages.items()) if stack.source == "venv" or n in named},
        patches=_patch_hashes(patch_files(folder, stack)),
        plugin_sha256=_plugin_sha256() if stack.device != "none" else "",
        patched_files=patched_files,
    )


def _check(folder: Path, stack: StackConfig, stamp: StackStamp) -> None:
    """The versions that ``stack.yaml`` and the lock promise. Raises InstallError with every difference."""
    wrong = wrong_versions(stack, stamp.packages)
    if wrong:
        raise InstallError(f"stack {folder.name}: {'; '.join(wrong)}")


def wrong_versions(stack: StackConfig, installed: dict[str, str]) -> list[str]:
    """Differences between the versions that ``stack.yaml`` names and those installed.

    A build's local part ('+cu130') counts only where the wanted version has one, as in a requirement. A stand-in has
    no versions.
    """
    if stack.device == "none":
        return []
    wanted = {stack.engine: stack.engine_version, **stack.packages}
    found = {name: installed.get(_normal(name)) for name in wanted}
    return [
        f"{name} {version} is wanted, {found[name] or 'none'} is installed"
        for name, version in wanted.items()
        if version not in (found[name], (found[name] or "").partition("+")[0])
    ]


def _differences(lock: Path, python: Path, stack: StackConfig) -> bool:
    installed = _versions(python)[1]
    pins = {_normal(name): version for name, version in _pins(lock).items()}
    return any(installed.get(name) != version for name, version in pins.items()) or bool(
        wrong_versions(stack, installed)
    )


def _pins(lock: Path) -> dict[str, str]:
    pins = {}
    for line in lock.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, equals, version = text.partition("==")
        if not equals or not re.fullmatch(r"[A-Za-z0-9._-]+", name.strip()):
            raise InstallError(f"{lock}: expected name==version, found {text!r}")
        pins[name.strip()] = version.strip()
    return pins


def _versions(python: Path) -> tuple[str, dict[str, str]]:
    version, packages = json.loads(_output(python, _VERSIONS))
    return version, {_normal(name): found for name, found in packages.items() if name}


def _output(python: Path, code: str) -> str:
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False, encoding="utf-8")
    if done.returncode != 0:
        raise InstallError(f"{python} does not run: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout


def _runs(python: Path) -> bool:
    try:
        return subprocess.run([str(python), "-c", ""], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _plugin_sha256() -> str:
    total = hashlib.sha256()
    for path in plugin_files():
        total.update(f"{path.relative_to(PLUGIN).as_posix()}\0{_sha256(path)}\0".encode())
    return total.hexdigest()


def _read_stamp(path: Path) -> StackStamp | None:
    try:
        return StackStamp.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write(path: Path, stamp: StackStamp) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(stamp.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
    partial.rename(path)
