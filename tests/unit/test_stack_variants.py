"""The stock variant of a stack: what lies in it, and how an engine's lines prove which variant ran."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from config_factory import experiment
from trial_factory import rehash, write_trial

from kvladder.config.experiment import ExperimentConfig, run_id
from kvladder.config.stack import PatchedFile, StackConfig, StackStamp
from kvladder.config.yaml import ConfigError
from kvladder.gates import config_readback
from kvladder.gates.base import Evidence
from kvladder.judge import judge_trial
from kvladder.stack import patching, variants
from kvladder.trial.session import Stack

ROOT = Path(__file__).resolve().parents[2]

CHANGED = "--- a/pkg/deep/x.py\n+++ b/pkg/deep/x.py\n@@ -1,3 +1,3 @@\n WORD = (\n-    'stock'\n+    'patched'\n )\n"
AGAIN = "--- a/pkg/deep/x.py\n+++ b/pkg/deep/x.py\n@@ -1,3 +1,3 @@\n WORD = (\n-    'patched'\n+    'twice'\n )\n"
ADDED = "--- /dev/null\n+++ b/pkg/new/y.py\n@@ -0,0 +1 @@\n+WORD = 'added'\n"
REMOVED = "--- a/pkg/gone.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-WORD = 'gone'\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An installed package with compiled files, data, and a folder that no patch touches."""
    folder = tmp_path / "site"
    files = {
        "pkg/__init__.py": "",
        "pkg/gone.py": "WORD = 'gone'\n",
        "pkg/deep/__init__.py": "from pkg.other import NAME\n",
        "pkg/deep/x.py": "WORD = (\n    'stock'\n)\n",
        "pkg/deep/data.txt": "data\n",
        "pkg/other/__init__.py": "NAME = __name__\n",
        "pkg/deep/__pycache__/x.cpython-311.pyc": "of another source",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def patched(site: Path, *texts: str) -> list[tuple[Path, Path]]:
    """Patches of these texts, applied in order."""
    pairs = []
    for number, text in enumerate(texts):
        patch = site.parent / f"{number:02}.patch"
        patch.write_text(f"Why: a test.\n\n{text}", encoding="utf-8")
        assert patching.apply(patch, site)
        pairs.append((site, patch))
    return pairs


def word(path: Path, module: str) -> str:
    """What an interpreter with this first on its path reads from a module; nothing may be written beside it."""
    code = f"import {module} as m, pkg.deep; print(m.WORD, pkg.deep.NAME)"
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def listing(folder: Path) -> dict[str, str]:
    """Every file and link below a folder: its content, or where it leads."""
    return {
        path.relative_to(folder).as_posix(): f"-> {path.readlink()}" if path.is_symlink() else path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_only_patched_files_differ_and_everything_else_is_a_link(site: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv" / "variants" / "stock"
    before = (site / "pkg/deep/x.py").read_bytes()
    files = variants.make_stock(home, patched(site, CHANGED, AGAIN))
    assert word(site, "pkg.deep.x") == "twice pkg.other"
    assert word(home, "pkg.deep.x") == "stock pkg.other"
    assert (home / "pkg/deep/x.py").read_bytes() == before
    assert listing(home) == {
        "pkg/__init__.py": f"-> {site / 'pkg/__init__.py'}",
        "pkg/gone.py": f"-> {site / 'pkg/gone.py'}",
        "pkg/other": f"-> {site / 'pkg/other'}",
        "pkg/deep/__init__.py": f"-> {site / 'pkg/deep/__init__.py'}",
        "pkg/deep/data.txt": f"-> {site / 'pkg/deep/data.txt'}",
        "pkg/deep/x.py": before.decode(),
    }
    now = hashlib.sha256((site / "pkg/deep/x.py").read_bytes()).hexdigest()
    assert files == {"pkg/deep/x.py": PatchedFile(patched=now, stock=hashlib.sha256(before).hexdigest())}


def test_files_that_a_patch_adds_or_removes(site: Path, tmp_path: Path) -> None:
    installed = set(site.rglob("*"))
    files = variants.make_stock(tmp_path / "stock", patched(site, ADDED, REMOVED))
    assert word(site, "pkg.new.y") == "added pkg.other"
    assert "No module named 'pkg.new.y'" in word(tmp_path / "stock", "pkg.new.y")
    assert "No module named 'pkg.gone'" in word(site, "pkg.gone")
    assert word(tmp_path / "stock", "pkg.gone") == "gone pkg.other"
    assert (files["pkg/new/y.py"].stock, files["pkg/gone.py"].patched) == (None, None)
    # Nothing was made through a link: the installed package is as the patches left it.
    assert set(site.rglob("*")) - installed == {site / "pkg/new", site / "pkg/new/y.py"}


def test_made_again_it_is_the_same_and_without_patches_it_goes(site: Path, tmp_path: Path) -> None:
    home = tmp_path / "stock"
    pairs = patched(site, CHANGED)
    first = variants.make_stock(home, pairs), listing(home)
    (home / "pkg/left.py").write_text("over", encoding="utf-8")
    assert (variants.make_stock(home, pairs), listing(home)) == first
    assert variants.make_stock(home, []) == {}
    assert not home.exists()
    assert not list(tmp_path.glob(".*partial"))


def test_a_patch_that_is_not_applied_cannot_be_taken_back(site: Path, tmp_path: Path) -> None:
    ((_, patch),) = patched(site, CHANGED)
    (site / "pkg/deep/x.py").write_text("something else\n", encoding="utf-8")
    with pytest.raises(patching.PatchError, match=r"00\.patch can't be taken back"):
        variants.make_stock(tmp_path / "stock", [(site, patch)])
    assert not (tmp_path / "stock").exists()


def test_modules_of_paths() -> None:
    names = ["vllm/v1/a.py", "vllm/__init__.py", "vllm/config.json", "top.py"]
    assert list(variants.modules(names)) == ["vllm.v1.a", "vllm", "top"]


FILES = {"pkg/x.py": PatchedFile(patched="a" * 64, stock="b" * 64)}
WATCHED = "kvladder source: pkg.x is watched\n"
UNWATCHED = "kvladder source: pkg.x was loaded unwatched\n"


def runs(digit: str) -> str:
    return f"(EngineCore pid=7) kvladder source: pkg.x runs sha256:{digit * 64} from /somewhere/pkg/x.py\n"


@pytest.mark.parametrize(
    ("log", "variant"),
    [
        (WATCHED, {}),
        (WATCHED + runs("a"), {"pkg.x": "patched"}),
        (WATCHED + runs("b") + WATCHED + runs("b"), {"pkg.x": "stock"}),
        (WATCHED + runs("a") + WATCHED + runs("b"), {"pkg.x": "patched and stock"}),
        (WATCHED + runs("c"), {"pkg.x": "sha256:cccccccccccc"}),
        # Nobody watched, or not from the start: whatever ran is unknown.
        ("", {"pkg.x": None}),
        (UNWATCHED, {"pkg.x": None}),
        (WATCHED + runs("b") + UNWATCHED, {"pkg.x": None}),
    ],
)
def test_the_engines_lines_say_which_variant_ran(log: str, variant: dict[str, str | None]) -> None:
    assert variants.ran(log, FILES) == variant


@pytest.mark.parametrize(
    ("asked", "log", "decision", "words"),
    [
        ("stock", WATCHED + runs("b"), "pass", "variant of pkg.x stock"),
        ("patched", WATCHED + runs("a"), "pass", "variant of pkg.x patched"),
        ("stock", WATCHED + runs("a"), "fail", "variant of pkg.x stock"),
        ("patched", WATCHED + runs("b"), "fail", "variant of pkg.x patched"),
        ("stock", WATCHED + runs("c"), "fail", "variant of pkg.x stock"),
        ("stock", "", "not-checked", "variant of pkg.x stock"),
        # Without the patched module the two variants are one.
        ("stock", WATCHED, "pass", "connector"),
    ],
)
def test_the_wrong_variant_fails_the_trial(tmp_path: Path, asked: str, log: str, decision: str, words: str) -> None:
    folder = write_trial(tmp_path, setup="native-host")
    path = folder / "trial.json"
    data = json.loads(path.read_text())
    data["stack"]["patched_files"] = {name: entry.model_dump() for name, entry in FILES.items()}
    data["config"]["setup"]["variant"] = asked
    path.write_text(json.dumps(data))
    with (folder / "logs" / "engine.log").open("a") as file:
        file.write(log)
    rehash(folder)
    (result,) = config_readback.check(Evidence.load(folder))
    assert (result.decision, words in result.expected) == (decision, True), result
    assert judge_trial(folder).status == ("valid" if decision == "pass" else "invalid")


def test_a_trial_of_a_stack_without_patches_is_asked_nothing(tmp_path: Path) -> None:
    (result,) = config_readback.check(Evidence.load(write_trial(tmp_path, setup="native-host")))
    assert result.decision == "pass"
    assert "variant" not in result.expected


# The setup's key


def plain(**setup: Any) -> ExperimentConfig:
    return experiment("s", plain={"kind": "plain", **setup})


def test_a_stock_setup_is_another_trial_and_the_default_is_the_old_one() -> None:
    ids = {run_id(plain(**more), "plain", "repeat") for more in ({}, {"variant": "patched"})}
    assert ids == {"825d217a"}, "what was measured before the key existed keeps its name"
    assert run_id(plain(variant="stock"), "plain", "repeat") not in ids


def test_the_title_says_stock() -> None:
    def title(**more: Any) -> str | None:
        shown: str | None = plain(**more).setups["plain"].shown_title("plain")
        return shown

    assert title() is None
    assert title(title="Plain") == "Plain"
    assert title(variant="stock") == "plain (stock)"
    assert title(variant="stock", title="Plain") == "Plain (stock)"
    assert title(variant="stock", title="Stock vLLM") == "Stock vLLM"


def test_stock_needs_a_stack_with_patches() -> None:
    stack = StackConfig(python="any", device="none", engine="e", engine_version="1")
    variants.check(plain(), stack)
    variants.check(plain(variant="stock"), stack.model_copy(update={"patches": {"pkg": "pkg"}}))
    with pytest.raises(ConfigError, match=r"setups\.plain\.variant: 'stock': the stack s has no patches"):
        variants.check(plain(variant="stock"), stack)


def stack(tmp_path: Path, source: str, **files: PatchedFile) -> Stack:
    config = StackConfig(python="any", device="none", engine="e", engine_version="1")
    stamp = StackStamp.model_validate(
        {
            "stack": "s",
            "lock_sha256": "",
            "python": "3",
            "interpreter": "python",
            "source": source,
            "packages": {},
            "patches": {},
            "patched_files": {name.replace("__", "/") + ".py": entry for name, entry in files.items()},
        }
    )
    return Stack(tmp_path, config, stamp)


def test_a_stock_engine_gets_its_packages_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/bundle")
    mine = stack(tmp_path, "preinstalled", pkg__x=FILES["pkg/x.py"])
    watched = {"KVLADDER_SOURCES": "pkg.x"}
    assert mine.environment("patched") == {"PYTHONPATH": "/bundle", **watched}
    with pytest.raises(FileNotFoundError, match="variants/stock is missing"):
        mine.environment("stock")
    home = tmp_path / ".venv/variants/stock"
    home.mkdir(parents=True)
    assert mine.environment("stock") == {"PYTHONPATH": f"{home}:/bundle", **watched}
    assert stack(tmp_path, "venv", pkg__x=FILES["pkg/x.py"]).environment("stock") == {
        "PYTHONPATH": str(home),
        **watched,
    }
    # Engines of a stack without patches get nothing that they didn't get before.
    assert stack(tmp_path, "venv").environment("patched") == {}


def test_the_plugin_reads_the_variable_that_the_stack_sets() -> None:
    text = (ROOT / "envs/plugin/kvladder_engine_plugin/sources.py").read_text(encoding="utf-8")
    assert f'VARIABLE = "{variants.WATCHED}"' in text
