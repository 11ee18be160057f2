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
_SINGLE = ("counters/scrape.py", "counters/drain.py", "config/traffic.py", "config/records.py")
_SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)


def source_files(*folders: str) -> list[Path]:
    """Every module and template of the library's folders, sorted; compiled files and caches are none."""
    kinds = (".py", ".j2", ".css", ".js")
    found = [path for folder in folders for path in (PACKAGE / folder).rglob("*") if path.suffix in kinds]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def measuring_code(setup_kind: str, workload_kinds: Iterable[str]) -> list[Path]:
    """Modules whose change makes a trial's raw data another thing.

    Of setups and workloads only those that the trial uses count, with what they import: a new setup measures nothing
    of the others again.
    """
    files = set(source_files(*_MEASURING)) | {PACKAGE / name for name in _SINGLE}
    files |= _used("setups", setup_kind)
    for kind in workload_kinds:
        files |= _used("workloads", kind)
    return sorted(path for path in files if path.is_file())


def _used(family: str, kind: str) -> set[Path]:
    """The module of a kind, the family's base, and what they import of the same family."""
    todo = [PACKAGE / family / f"{kind.replace('-', '_')}.py", PACKAGE / family / "base.py"]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        todo += [PACKAGE / family / f"{name}.py" for name in _imports(path, f"kvladder.{family}")]
    return seen


def _imports(path: Path, package: str) -> set[str]:
    """Modules of ``package`` that a file imports, by their last name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module == package:
                names |= {alias.name for alias in node.names}
            elif node.module.startswith(package + "."):
                names.add(node.module.removeprefix(package + ".").partition(".")[0])
        elif isinstance(node, ast.Import):
            names |= {
                alias.name.removeprefix(package + ".").partition(".")[0]
                for alias in node.names
                if alias.name.startswith(package + ".")
            }
    return names


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
