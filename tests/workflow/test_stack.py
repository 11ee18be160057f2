"""Making a stack ready: its own environment, patches, versions, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from kvladder.config import stack as stacks
from kvladder.config.sources import read
from kvladder.config.stack import StackStamp
from kvladder.config.yaml import ConfigError
from kvladder.stack import debian, doctor, patching, paths
from kvladder.stack import install as installing
from kvladder.stack.install import InstallError, install

from .conftest import ROOT, Project

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
VENV = f'python: "{VERSION}"\ndevice: none\nengine: nothing\nengine_version: "1"\n'


def empty(folder: Path) -> Path:
    """A stack with its own environment and nothing in it."""
    folder.mkdir()
    (folder / "stack.yaml").write_text(VENV, encoding="utf-8")
    (folder / "requirements.lock").write_text("# nothing\n", encoding="utf-8")
    return folder


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """An empty stack, not installed."""
    return empty(tmp_path / "empty")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty stack, installed: making an environment takes seconds. What it holds and says isn't to be changed."""
    folder = empty(tmp_path_factory.mktemp("installed") / "empty")
    install(folder, lambda _: None)
    return folder


def test_an_environment_is_made_once(installed: Path) -> None:
    stamp = StackStamp.model_validate_json(paths.stamp_of(installed).read_text(encoding="utf-8"))
    assert stamp.source == "venv"
    python = installed / ".venv/bin/python"
    assert Path(os.path.abspath(stamp.interpreter)) == python  # noqa: PTH100
    made = python.lstat().st_mtime_ns
    lines: list[str] = []
    again = install(installed, lines.append)
    assert again == stamp
    assert python.lstat().st_mtime_ns == made
    assert lines == [f"stack empty: {installed / '.venv'} holds what requirements.lock says"]


def test_a_half_made_environment_is_made_again(stack: Path) -> None:
    rest = stack / ".venv/lib/rest.txt"
    rest.parent.mkdir(parents=True)
    rest.touch()
    (stack / ".venv/kvladder-made").touch()
    lines: list[str] = []
    install(stack, lines.append)
    assert any("half-made" in line for line in lines)
    assert not rest.exists()
    assert paths.stamp_of(stack).is_file()


def test_an_environment_of_somebody_else_is_left_alone(stack: Path) -> None:
    mine = stack / ".venv" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("x", encoding="utf-8")
    with pytest.raises(InstallError, match="was not made by kvladder"):
        install(stack, lambda _: None)
    assert mine.read_text(encoding="utf-8") == "x"


def test_a_changed_definition_takes_the_old_copies_of_the_stamp_along(installed: Path) -> None:
    install(installed, lambda _: None, paths.stamp_of(installed, "aaa"))
    assert paths.stamp_of(installed, "aaa").exists()
    install(installed, lambda _: None, paths.stamp_of(installed, "bbb"))
    assert not paths.stamp_of(installed, "aaa").exists()
    copy = json.loads(paths.stamp_of(installed, "bbb").read_text(encoding="utf-8"))
    assert copy == json.loads(paths.stamp_of(installed).read_text(encoding="utf-8"))


def test_packages_that_nobody_has(stack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stack / "requirements.lock").write_text("kvladder-no-such-package==1.0+cpu\n", encoding="utf-8")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(InstallError, match=r"can't be installed from.*kvladder-no-such-package.*PIP_EXTRA_INDEX_URL"):
        install(stack, lambda _: None)
    assert not paths.stamp_of(stack).exists()


def test_the_lock_pins_everything(stack: Path) -> None:
    (stack / "requirements.lock").write_text("numpy>=2\n", encoding="utf-8")
    with pytest.raises(InstallError, match=r"expected name==version, found 'numpy>=2'"):
        install(stack, lambda _: None)
    assert not (stack / ".venv").exists(), "nothing is made for it"


def test_preinstalled_versions_are_checked(stack: Path) -> None:
    text = f'python: "{VERSION}"\ndevice: cpu\nsource: preinstalled\nengine: pydantic\nengine_version: 0.0.1\n'
    (stack / "stack.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(InstallError, match=r"pydantic 0\.0\.1 is wanted, .* is installed"):
        install(stack, lambda _: None)


def test_another_python(stack: Path) -> None:
    (stack / "stack.yaml").write_text(VENV.replace(VERSION, "3.99"), encoding="utf-8")
    with pytest.raises(InstallError, match=r"python3\.99"):
        install(stack, lambda _: None)


def test_system_packages_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "missing", list)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    problem = debian.install(["libibverbs1"], lambda _: None)
    assert problem is not None
    assert "apt-get install libibverbs1" in problem


PATCH = "--- a/pkg/x.py\n+++ b/pkg/x.py\n@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An installed package, below a folder that a repository ignores."""
    folder = tmp_path / "site" / "pkg"
    folder.mkdir(parents=True)
    (folder / "x.py").write_text("a\nb\nc\n", encoding="utf-8")
    (tmp_path / "01-x.patch").write_text(PATCH, encoding="utf-8")
    return folder.parent


def test_a_patch_is_applied_once(site: Path, tmp_path: Path) -> None:
    assert patching.apply(tmp_path / "01-x.patch", site)
    assert (site / "pkg/x.py").read_text(encoding="utf-8") == "a\nB\nc\n"
    assert not patching.apply(tmp_path / "01-x.patch", site)


def test_a_patch_that_does_not_fit(site: Path, tmp_path: Path) -> None:
    (site / "pkg/x.py").write_text("other\n", encoding="utf-8")
    with pytest.raises(patching.PatchError, match=r"01-x\.patch does not fit pkg/x\.py"):
        patching.apply(tmp_path / "01-x.patch", site)
    assert (site / "pkg/x.py").read_text(encoding="utf-8") == "other\n"


def test_unknown_stacks_are_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"unknown 'nope'; stacks are: .*cpu"):
        paths.find("nope")


def test_every_patch_belongs_to_a_stack() -> None:
    applied = {
        patch
        for definition in (ROOT / "envs").glob("*/stack.yaml")
        for _, patch in paths.patch_files(definition.parent, stacks.load(definition.parent))
    }
    assert applied == set((ROOT / "patches").glob("*/*/*.patch"))


@pytest.mark.parametrize("source", ["venv", "preinstalled"])
def test_a_stack_gets_its_patches(
    stack: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    # As in the offline bundle: the package lies in a folder on the interpreter's path.
    information = site / "pkg-2.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: pkg\nVersion: 2.0\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(site))
    patch = stack / "patches/pkg/2.0/01-x.patch"
    patch.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "01-x.patch", patch)
    text = VENV.replace('engine: nothing\nengine_version: "1"', 'engine: pkg\nengine_version: "2.0"')
    (stack / "stack.yaml").write_text(text + f"source: {source}\npatches: {{pkg: pkg}}\n", encoding="utf-8")
    lines: list[str] = []
    for _ in range(2):
        installing._patch(stack, stacks.load(stack), Path(sys.executable), None, lines.append)
    assert (site / "pkg/x.py").read_text(encoding="utf-8") == "a\nB\nc\n"
    assert lines == ["pkg: 01-x.patch applied to pkg/x.py"]


def test_the_doctor_looks_before_anything_is_installed(project: Project) -> None:
    done = project.snakemake("doctor", "--cores", "1")
    assert done.code != 0, done.text
    assert "fail  stack stub: not installed: run `snakemake env`" in done.text
    assert "install_stack" not in done.jobs()
    assert not (project.folder / "stacks/stub/.venv").exists()
    assert project.snakemake("env", "--cores", "1").code == 0
    done = project.snakemake("doctor", "--cores", "1")
    assert "ok    stack stub: " in done.text


Usage = namedtuple("Usage", "total used free")


def test_the_doctor_knows_how_much_disk_is_needed(
    stack: Path, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read([ROOT / "config/config.yaml"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**11, 95 * 10**9, 5 * 10**9))
    (before,) = doctor._disk(config, stack, tmp_path / "results")
    assert (before.state, before.seen) == ("warn", f"5.0 GB free at {tmp_path}, about 8 GB are needed")
    (after,) = doctor._disk(config, installed, tmp_path / "results")
    assert after.state == "ok", "the engines are most of it"


def test_the_doctor_looks_where_engines_put_their_caches(
    stack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read([ROOT / "config/config.yaml"])
    (stack / ".cache").mkdir()
    denied = {stack / ".cache", Path("/nowhere")}
    monkeypatch.setattr(os, "access", lambda path, _mode: path not in denied)
    monkeypatch.setenv("HOME", "/nowhere")
    findings = {finding.what: finding for finding in doctor._user(config, stack, tmp_path)}
    assert findings["home"].seen == f"/nowhere can't be written: servers get {stack / '.cache/home'}"
    assert findings["caches of the engines"].state == "fail"
    assert str(stack / ".cache") in findings["caches of the engines"].seen
