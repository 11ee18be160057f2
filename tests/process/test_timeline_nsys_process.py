"""A server below a stand-in for ``nsys profile``: it is ready, its report is waited for, and all of it ends.

The stand-in does what nsys does with processes: it starts the program as its child, and writes its report either while
that runs or when it has ended.
"""

from __future__ import annotations

import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from serving_world import World, marked

from kvladder.serving.process import ProcessSpec
from kvladder.timeline.profilers import Nsys, NsysTools, TraceMissing

PROFILER = """#!{python}
import pathlib, subprocess, sys, threading, time
when = "{when}"
options = [word for word in sys.argv[2:] if word.startswith("--")]
report = next(word.removeprefix("--output=") for word in options if word.startswith("--output="))
words = sys.argv[2:]
while words[0].startswith("--"):
    words = words[1:]
child = subprocess.Popen(words)
def write():
    pathlib.Path(report + "{ending}").write_text("report")
if when == "running":
    threading.Timer(0.5, write).start()
code = child.wait()
if when == "ended":
    write()
sys.exit(code if code >= 0 else 0)
"""


def profiled(world: World, when: str, ending: str = ".nsys-rep", deadline_s: float = 3) -> tuple[Nsys, ProcessSpec]:
    """A profiler that writes its report then, and the stand-in server below it."""
    path = world.folder / "nsys"
    path.write_text(PROFILER.format(python=sys.executable, when=when, ending=ending), encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    profiler = Nsys(world.folder / "profile", deadline_s, NsysTools(path))
    plain = world.spec()
    spec = profiler.prepare(plain, Path(sys.executable))
    # The stand-in server takes no --profiler-config.
    profiler._programs["engine"] = list(plain.argv)
    return profiler, replace(spec, argv=list(spec.argv[:-2]))


@pytest.mark.parametrize(("when", "ending"), [("running", ".nsys-rep"), ("ended", ".qdstrm")])
def test_a_report_is_waited_for_and_the_program_asked_to_end_where_none_comes(
    world: World, when: str, ending: str
) -> None:
    profiler, spec = profiled(world, when, ending)
    with world.servers(spec) as group:
        assert len(group.tree()) == 2, "the profiler and the program"
        profiler.began()
        assert profiler.switch.exists()
        window = profiler.ended("all", group)
        assert window.files == (world.folder / "profile" / f"engine{ending}",)
        assert not profiler.switch.exists()
        assert (group.failure() is None) == (when == "running")
    assert marked(world.mark) == []


def test_a_profiler_that_writes_nothing_is_said_to(world: World) -> None:
    profiler, spec = profiled(world, "never", deadline_s=0.5)
    with (
        world.servers(spec) as group,
        pytest.raises(TraceMissing, match="nsys wrote no report of engine within 1 s"),
    ):
        profiler.ended("all", group)
    assert marked(world.mark) == []
