"""A clone of the project that tests may edit, with the stand-in engine as its stack, and real snakemake on it."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from . import forked

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "tests" / "stub_engine"

CONFIG: dict[str, Any] = {
    "experiment": "tiny",
    "stack": "stub",
    "repeats": 2,
    "model": {
        "weights": "dummy",
        "shape": {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 1000,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    },
    "engine": {"max_model_len": 1024, "kv_pool_bytes": "2MiB", "block_size": 128, "ready_s": 30, "stop_s": 5},
    "load": {"quiet_s": 0.05, "drain_s": 5, "request_s": 20, "stall_s": 5},
    "probe_interval_s": 0.2,
    # Test machines are busy, and that is no fault of the pipeline.
    "gates": {"advisory": ["client-not-saturated", "quiet-host", "concurrency-held"]},
    "setups": {
        "plain": {"kind": "plain"},
        "prefix-cache": {"kind": "prefix-cache"},
        "native+cpu": {"kind": "native", "cpu_bytes": "4MiB"},
    },
    "workloads": {"repeat": {"kind": "repeat", "prompt_tokens": 513, "warm_passes": 2}},
}

_JOB = re.compile(r"^\s*(?:local)?(?:rule|checkpoint) (\w+):|^Job \d+: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Done:
    """What a run of snakemake gave: exit code, and all it printed."""

    code: int
    text: str

    @property
    def messages(self) -> list[str]:
        """kvladder's own lines."""
        return [line for line in self.text.splitlines() if line.startswith("kvladder: ")]

    def jobs(self) -> dict[str, int]:
        """Jobs by rule, from the table that snakemake prints before anything runs; aggregate rules left out."""
        table = re.search(r"^job +count\n-+ +-+\n(.*?)^total", self.text, re.MULTILINE | re.DOTALL)
        if table is None:
            return {}
        rows = (line.split() for line in table[1].splitlines())
        return {name: int(count) for name, count in rows if name not in AGGREGATES}


AGGREGATES = {"all", "env", "model", "start", "measure", "judge", "tables", "figures", "report"}


@dataclass(frozen=True)
class Project:
    """A clone of the project in a folder of its own."""

    folder: Path

    def config(self, **changes: Any) -> dict[str, Any]:
        """Write ``config/config.yaml``: the tiny experiment with these keys replaced. Returns it."""
        data = copy.deepcopy(CONFIG) | changes
        self.write_config(yaml.safe_dump(data, sort_keys=False))
        return data

    def write_config(self, text: str) -> None:
        """Write ``config/config.yaml`` as it stands."""
        path = self.folder / "config" / "config.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def environment(self, **extra: str) -> dict[str, str]:
        """Environment of a run: the clone's library before the installed one, the stand-in's stack in sight."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVLADDER_")}
        # A run starts dozens of interpreters, and each would compile the library again.
        kept.pop("PYTHONDONTWRITEBYTECODE", None)
        own = {
            "PYTHONPATH": str(self.folder / "workflow"),
            "KVLADDER_STACKS": str(self.folder / "stacks"),
            # Where a preinstalled stack's programs are looked for: the stand-ins of LMCache's server and the like.
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        }
        return kept | own | extra

    def command(self, *arguments: str) -> list[str]:
        """argv of snakemake."""
        return [sys.executable, "-m", "snakemake", *arguments]

    def snakemake(
        self,
        *arguments: str,
        timeout: float = 600,
        before: Sequence[str] = (),
        preexec_fn: Callable[[], None] | None = None,
        **environment: str,
    ) -> Done:
        """Run snakemake in the clone; ``before`` is a command that runs it.

        With that, with ``preexec_fn`` and with what an interpreter reads at its start it is a new interpreter.
        """
        variables = self.environment(**environment)
        if not before and preexec_fn is None and all(name.startswith("KVLADDER_") for name in environment):
            return Done(*forked.snakemake(arguments, self.folder, variables, timeout))
        done = subprocess.run(
            [*before, *self.command(*arguments)],
            cwd=self.folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            check=False,
            timeout=timeout,
            preexec_fn=preexec_fn,
        )
        return Done(done.returncode, done.stdout)

    def processes(self) -> list[psutil.Process]:
        """Processes that belong to the clone: jobs and servers."""
        found = []
        for process in psutil.process_iter(["cmdline", "cwd"]):
            text = " ".join(process.info["cmdline"] or []) + " " + (process.info["cwd"] or "")
            if str(self.folder) in text and process.pid != os.getpid():
                found.append(process)
        return found

    def plan(self, *arguments: str, **environment: str) -> dict[str, int]:
        """Jobs by rule that a dry run lists."""
        done = self.snakemake("-n", *arguments, **environment)
        assert done.code == 0, done.text
        return done.jobs()

    def trials(self) -> dict[str, dict[str, Any]]:
        """Records of finished trials by their folder below ``trials/``."""
        root = self.folder / "results" / "tiny" / "trials"
        return {
            path.parent.relative_to(root).as_posix(): json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(root.glob("*/*/*/trial.json"))
        }

    def copy(self, folder: Path) -> Project:
        """The same with all file times, in another folder."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Project(folder)

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace text in a file of the clone; the text must be there."""
        path = self.folder / name
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{name} has no {old!r}"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    def append(self, name: str, text: str) -> None:
        """Add text at the end of a file of the clone."""
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(text)


def clone(folder: Path) -> Project:
    """Copy what a checkout has, without environments and results.

    With what Python compiled of it (it fits: file times are copied as well), but for what it is writing just now.
    """
    ignore = shutil.ignore_patterns("*.pyc.*", ".venv", "*.egg-info", ".cache")
    shutil.copytree(ROOT / "workflow", folder / "workflow", ignore=ignore)
    shutil.copytree(ROOT / "envs", folder / "envs", ignore=ignore)
    shutil.copytree(ROOT / "patches", folder / "patches", ignore=ignore)
    shutil.copytree(STUB / "stacks", folder / "stacks", ignore=ignore)
    project = Project(folder)
    project.edit("stacks/stub/stack.yaml", "{stack}/../../server.py", str(STUB / "server.py"))
    (folder / "bin").mkdir()
    for program, kind in (("lmcache", "lmcache"), ("mooncake_master", "mooncake")):
        script = folder / "bin" / program
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STUB / "pool.py"}" {kind} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    project.config()
    return project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A clone in which nothing has run."""
    return clone(tmp_path / "clone")


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Done]:
    """A clone in which the tiny experiment ran to its report, once for all test workers; not to be changed."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "whole-run"
    shared.mkdir(exist_ok=True)
    project, output = Project(shared / "clone"), shared / "output.txt"
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.is_file():
            done = clone(project.folder).snakemake("--cores", "8")
            output.write_text(f"{done.code}\n{done.text}", encoding="utf-8")
    code, _, text = output.read_text(encoding="utf-8").partition("\n")
    assert code == "0", text
    return project, Done(int(code), text)


@pytest.fixture
def finished(whole_run: tuple[Project, Done], tmp_path: Path) -> Project:
    """A copy of the finished clone that the test may change."""
    return whole_run[0].copy(tmp_path / "finished")
