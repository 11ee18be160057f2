"""Snakemake without its imports: runs are forked from a server that has imported it once.

Importing snakemake takes a second of a processor, more than most runs of these tests need for what they are about. A
forked run is a process of its own like any other: its folder, environment, arguments, output and exit code are those of
``python -m snakemake``. Only the library itself is imported afresh, from the clone that the run is in.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

# What a run imports that isn't ours.
_PRELOAD = (
    "nbformat",
    "numpy",
    "prometheus_client.parser",
    "psutil",
    "pydantic",
    "requests",
    "snakemake.cli",
    "snakemake.dag",
    "snakemake.executors.dryrun",
    "snakemake.executors.local",
    "snakemake.logging",
    "snakemake.report.html_reporter",
    "snakemake.scheduling.greedy",
    "snakemake.scheduling.milp",
    "snakemake.script",
)


@cache
def _server() -> multiprocessing.context.ForkServerContext:
    """How to fork from the server; it starts with the first run and ends with the test process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    return context


@cache
def _installed() -> list[str]:
    """Where an interpreter of this environment looks for modules if nothing else is asked for."""
    code = "import sys; print(*sys.path[1:], sep='\\0', end='')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).split("\0")


def snakemake(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float
) -> tuple[int, str]:
    """Run ``python -m snakemake`` in a folder; its exit code and all it printed. Raises subprocess.TimeoutExpired."""
    path = [str(folder), *environment["PYTHONPATH"].split(os.pathsep), *_installed()]
    with tempfile.TemporaryFile() as output:
        name = f"/proc/{os.getpid()}/fd/{output.fileno()}"
        process = _server().Process(target=_run, args=(arguments, str(folder), dict(environment), path, name))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["snakemake", *arguments], timeout)
        output.seek(0)
        return process.exitcode, output.read().decode("utf-8")


def _run(arguments: Sequence[str], folder: str, environment: dict[str, str], path: list[str], output: str) -> None:
    """The forked process: become what ``python -m snakemake`` would be."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
    sys.path[:] = path
    sys.argv[:] = ["snakemake", *arguments]
    # Where it was imported is where it would say that it was started.
    Workflow = sys.modules["snakemake.workflow"].Workflow
    Workflow._rundir = folder
    multiprocessing.set_start_method(None, force=True)
    try:
        runpy.run_module("snakemake", run_name="__main__", alter_sys=True)
    finally:
        # This module's own process ends without.
        atexit._run_exitfuncs()
