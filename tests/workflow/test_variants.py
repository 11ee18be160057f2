"""Stock against patched in one experiment: which one ran is proved, and trials of patched setups stay as they were."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from .conftest import CONFIG, Done, Project

NATIVE = CONFIG["setups"]["native+cpu"]
SETUPS = {"prefix-cache": CONFIG["setups"]["prefix-cache"], "native": NATIVE}
STOCK = {**NATIVE, "variant": "stock"}
PATCH = "--- a/pkg/x.py\n+++ b/pkg/x.py\n@@ -1 +1 @@\n-WORD = 'stock'\n+WORD = 'patched'\n"


class Patched:
    """A clone whose stack has a package ``pkg`` with a patch, on the interpreter's path as in the offline bundle."""

    def __init__(self, project: Project) -> None:
        self.project, self.site = project, project.folder / "site"
        information = self.site / "pkg-2.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: pkg\nVersion: 2.0\n", encoding="utf-8")
        (self.site / "pkg").mkdir()
        (self.site / "pkg/__init__.py").write_text("", encoding="utf-8")
        (self.site / "pkg/x.py").write_text("WORD = 'stock'\n", encoding="utf-8")
        patch = project.folder / "stacks/stub/patches/pkg/2.0/01-word.patch"
        patch.parent.mkdir(parents=True)
        patch.write_text(PATCH, encoding="utf-8")
        project.append("stacks/stub/stack.yaml", 'packages: {pkg: "2.0"}\npatches: {pkg: pkg}\n')

    def configure(self, **setups: Any) -> None:
        self.project.config(repeats=1, baseline="prefix-cache", setups={**SETUPS, **setups})

    def run(self, *arguments: str) -> Done:
        path = f"{self.project.folder / 'workflow'}:{self.site}"
        return self.project.snakemake(*arguments, PYTHONPATH=path)

    def verdicts(self) -> dict[str, dict[str, Any]]:
        found = {}
        for path in (self.project.folder / "results/tiny/trials").glob("*/*/*/verdict.json"):
            verdict = json.loads(path.read_text(encoding="utf-8"))
            found[verdict["setup"]] = verdict
        return found


def log(project: Project, setup: str) -> str:
    (path,) = (project.folder / "results/tiny/trials" / setup).glob("*/*/logs/engine.log")
    return path.read_text(encoding="utf-8")


@pytest.fixture
def patched(project: Project) -> Patched:
    return Patched(project)


def test_stock_and_patched_side_by_side(patched: Patched) -> None:
    project = patched.project
    patched.configure()
    done = patched.run("--cores", "4", "measure")
    assert done.code == 0, done.text
    before = project.trials()
    assert (patched.site / "pkg/x.py").read_text(encoding="utf-8") == "WORD = 'patched'\n"

    # The stack's path given by hand wins over the variant's: an engine that runs what it isn't asked for.
    wrong = {**STOCK, "env": {"PYTHONPATH": f"{project.folder / 'workflow'}:{patched.site}"}}
    patched.configure(**{"native-as-pinned": STOCK, "native-wrong": wrong})
    done = patched.run("--cores", "4")
    assert done.code == 0, done.text
    assert done.jobs()["measure_trial"] == 2, "a stock setup measures nothing of the others again"
    after = project.trials()
    assert {name: after[name] for name in before} == before

    verdicts = patched.verdicts()
    assert {name: verdict["status"] for name, verdict in verdicts.items()} == {
        "prefix-cache": "valid",
        "native": "valid",
        "native-as-pinned": "valid",
        "native-wrong": "invalid",
    }
    assert verdicts["native-wrong"]["reason"] == (
        "config-readback: expected variant of pkg.x stock; seen: variant of pkg.x patched"
    )
    stock = project.folder / "stacks/stub/.venv/variants/stock/pkg/x.py"
    assert f" from {stock}\n" in log(project, "native-as-pinned")
    for name in ("native", "native-wrong"):
        assert f" from {patched.site / 'pkg/x.py'}\n" in log(project, name)
    (trial,) = [trial for trial in after.values() if trial["setup"] == "native-as-pinned"]
    assert trial["expected"]["title"] == "native-as-pinned (stock)"
    hashes = trial["stack"]["patched_files"]["pkg/x.py"]
    assert len(set(hashes.values())) == 2
    assert f"sha256:{hashes['stock']}" in log(project, "native-as-pinned")
    html = (project.folder / "reports/tiny.html").read_text(encoding="utf-8")
    assert "native-as-pinned (stock)" in html
    assert "Nothing to be done" in patched.run("-n").text


def test_an_engine_that_cannot_find_its_variant_is_not_started(patched: Patched) -> None:
    patched.configure(native=STOCK)
    assert patched.run("--cores", "2", "env").code == 0
    shutil.rmtree(patched.project.folder / "stacks/stub/.venv/variants")
    done = patched.run("--cores", "2", "start")
    assert done.code != 0
    assert "variants/stock is missing: run `snakemake env --forcerun install_stack`" in done.text, done.text
    done = patched.run("--cores", "2", "env", "--forcerun", "install_stack")
    assert done.code == 0, done.text
    assert patched.run("--cores", "2", "start").code == 0


def test_a_stack_without_patches_has_no_stock_variant(project: Project) -> None:
    project.config(setups={**CONFIG["setups"], "native-as-pinned": STOCK})
    done = project.snakemake("--cores", "2")
    assert done.code != 0
    assert done.messages == [
        "kvladder: setups.native-as-pinned.variant: 'stock': the stack stub has no patches, so every setup runs it "
        "stock: leave the key out"
    ]
    assert not (project.folder / "results").exists()
