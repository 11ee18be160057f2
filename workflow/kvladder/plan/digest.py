"""What a result depends on, by content: which code measures, and a hash that ignores comments and formatting.

Content instead of file times: a fresh clone, an archive or a re-made environment has new file times and is the same.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]

_MEASURING = ("trial", "load", "serving")
_SINGLE = (
    "counters/scrape.py",
    "counters/drain.py",
    "config/traffic.py",
    "config/records.py",
    "probes/sampler.py",
)
_SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)


def source_files(*names: str) -> list[Path]:
    """The library's files of these names, and every module and template of its folders of these names, sorted.

    Compiled files and caches are none. Raises LookupError for a name that gives no file: nothing would depend on it.
    """
    kinds = (".py", ".j2", ".css", ".js")
    found: set[Path] = set()
    for name in names:
        place = PACKAGE / name
        below = [path for path in place.rglob("*") if path.suffix in kinds and "__pycache__" not in path.parts]
        files = [place] if place.is_file() else below
        if not files:
            raise LookupError(f"{place} is no file, and no folder with source files")
        found.update(files)
    return sorted(found)


def measuring_code(setup_kind: str, workload_kinds: Iterable[str]) -> list[Path]:
    """Modules whose change makes a trial's raw data another thing.

    Of setups and workloads only those that the trial uses count, with what they import: a new setup measures nothing
    of the others again. So do the counters that a setup reads: they decide when its stores are done, and with that
    when the next pass begins.
    """
    files = set(source_files(*_MEASURING, *_SINGLE))
    files |= _used("setups", setup_kind, "counters")
    for kind in workload_kinds:
        files |= _used("workloads", kind)
    return sorted(files)


def _used(family: str, kind: str, *others: str) -> set[Path]:
    """The module of a kind, the family's base, and what they import of the same family and of ``others``."""
    todo = [PACKAGE / family / f"{kind.replace('-', '_')}.py", PACKAGE / family / "base.py"]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        for folder in (family, *others):
            todo += [PACKAGE / folder / f"{name}.py" for name in _imports(path, f"kvladder.{folder}")]
    return seen


def _imports(path: Path, package: str) -> set[str]:
    """Modules of ``package`` that a file imports, by their last name."""
    below = package + "."
    return {
        name.removeprefix(below).partition(".")[0]
        for name in _imported(path, path.stat().st_mtime_ns)
        if name.startswith(below)
    }


@cache
def _imported(path: Path, _mtime_ns: int) -> frozenset[str]:
    """Dotted names of all that a file imports. An experiment of a thousand trials asks for it tens of thousands of
    times."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return frozenset(names)


def of_names(files: Iterable[str]) -> str:
    """Twelve hex digits over which files there are, whatever is in them."""
    return hashlib.sha256("\0".join(sorted(files)).encode()).hexdigest()[:12]


def digest(files: Sequence[Path], root: Path) -> str:
    """Twelve hex digits over names (below ``root`` where they lie there) and contents."""
    total = hashlib.sha256()
    for path in files:
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        total.update(f"{name}\0{_content(path, path.stat().st_mtime_ns)}\0".encode())
    return total.hexdigest()[:12]


@cache
def _content(path: Path, _mtime_ns: int) -> str:
    data = path.read_bytes()
    if path.suffix == ".py":
        data = _meaning(data)
    return hashlib.sha256(data).hexdigest()


def _meaning(source: bytes) -> bytes:
    """A module's tokens without comments, docstrings and blank lines; the source itself where it doesn't parse."""
    lines: list[list[tuple[int, str]]] = [[]]
    try:
        for token in tokenize.tokenize(io.BytesIO(source).readline):
            if token.type in _SILENT:
                continue
            if token.type == tokenize.NEWLINE:
                lines.append([])
            else:
                lines[-1].append((token.type, "" if token.type == tokenize.INDENT else token.string))
    except (tokenize.TokenError, SyntaxError):
        return source
    kept = [line for line in lines if any(kind != tokenize.STRING for kind, _ in line)]
    return repr(kept).encode()
