"""The report on which source a module runs from: what it says is what runs, also where cached bytecode would differ."""

import hashlib
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

RUN = "from kvladder_engine_plugin.sources import watch_sources as w; w(); w(); import pkg.x; print(pkg.x.WORD)"


def said(code: str, path: Path, modules: str = "pkg.x,pkg.never") -> tuple[str, list[str]]:
    """Standard output of ``code`` with ``path`` first on its path, and the report's lines."""
    env = {**os.environ, "KVLADDER_SOURCES": modules, "PYTHONPATH": f"{path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip(), [line for line in done.stderr.splitlines() if line.startswith("kvladder source: ")]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "x.py").write_text("WORD = 'one'\n")
    return tmp_path


def line(path: Path) -> str:
    return f"kvladder source: pkg.x runs sha256:{hashlib.sha256(path.read_bytes()).hexdigest()} from {path}"


WATCHED = ["kvladder source: pkg.never is watched", "kvladder source: pkg.x is watched"]


def test_what_ran_is_reported_once(site: Path) -> None:
    assert said(RUN, site) == ("one", [*WATCHED, line(site / "pkg/x.py")])


def test_stale_bytecode_neither_runs_nor_is_reported(site: Path) -> None:
    """Bytecode that isn't checked against its source would run, and the source's hash would be a lie."""
    path = site / "pkg/x.py"
    py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    path.write_text("WORD = 'two'\n")
    assert said("import pkg.x; print(pkg.x.WORD)", site)[0] == "one", "this is what is to be ruled out"
    assert said(RUN, site) == ("two", [*WATCHED, line(path)])


def test_a_link_is_read_where_it_leads(site: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "pkg").symlink_to(site / "pkg")
    word, lines = said(RUN, overlay)
    assert word == "one"
    assert lines[-1] == line(site / "pkg/x.py").replace(str(site), str(overlay))


def test_a_module_that_was_there_before_is_not_vouched_for(site: Path) -> None:
    _, lines = said(f"import pkg.x; {RUN}", site)
    assert lines == [WATCHED[0], "kvladder source: pkg.x was loaded unwatched"]


def test_without_the_variable_nothing_is_watched(site: Path) -> None:
    assert said(RUN, site, modules="") == ("one", [])
