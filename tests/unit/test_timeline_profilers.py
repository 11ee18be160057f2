"""How servers are put under a profiler, and how a profile that isn't there is found out."""

from __future__ import annotations

import gzip
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvladder.serving.process import ProcessSpec, Readiness, ServerGroup
from kvladder.timeline import profilers
from kvladder.timeline.profilers import Nsys, NsysTools, Torch, TraceMissing, await_traces, is_whole

PYTHON = Path("/stack/bin/python")
TRACE = gzip.compress(json.dumps({"traceEvents": []}).encode())


def spec(name: str, *argv: str, folder: Path) -> ProcessSpec:
    return ProcessSpec(name, list(argv), {"A": "1"}, folder, folder / "log", Readiness(port=1, deadline_s=1))


def no_group() -> ServerGroup:
    return ServerGroup([], "test", caches=Path())


def test_torch_profiles_the_engine_alone(tmp_path: Path) -> None:
    profiler = Torch(tmp_path / "profile", 1)
    engine = profiler.prepare(spec("engine", "python", "-m", "vllm", folder=tmp_path), PYTHON)
    assert engine.argv[:-1] == ["python", "-m", "vllm", "--profiler-config"]
    assert json.loads(engine.argv[-1])["torch_profiler_dir"] == str(tmp_path / "profile")
    assert engine.env["KVLADDER_MARKS"] == str(tmp_path / "profile")
    assert (engine.env["KVLADDER_MARKS_RANGES"], engine.env["A"]) == ("torch", "1")
    side = profiler.prepare(spec("lmcache", "lmcache", "server", folder=tmp_path), PYTHON)
    assert side.argv == ["lmcache", "server"]


def test_nsys_goes_before_every_process_that_copies_on_the_gpu(tmp_path: Path) -> None:
    profiler = Nsys(tmp_path / "profile", 1, NsysTools(Path("/opt/nsys")), ("lmcache",))
    engine = profiler.prepare(spec("engine", "python", "-m", "vllm", folder=tmp_path), PYTHON)
    assert list(engine.argv[:2]) == ["/opt/nsys", "profile"]
    assert f"--output={tmp_path / 'profile' / 'engine'}" in engine.argv
    assert engine.argv[-5:] == ["python", "-m", "vllm", "--profiler-config", '{"profiler":"cuda"}']
    side = profiler.prepare(spec("lmcache", "/bin/lmcache", "server", folder=tmp_path), PYTHON)
    switch = str(tmp_path / "profile" / "recording")
    assert side.argv[-6:] == [str(PYTHON), "-m", "kvladder_engine_plugin.profiled", switch, "/bin/lmcache", "server"]
    other = profiler.prepare(spec("mooncake", "mooncake_master", folder=tmp_path), PYTHON)
    assert other.argv == ["mooncake_master"]


def test_the_second_window_needs_a_file_of_its_own(tmp_path: Path) -> None:
    """A stand-in for a profiler whose first stop writes a trace, and whose second says 200 and writes nothing."""
    profiler = Torch(tmp_path, 0.3)
    profiler.began()
    (tmp_path / "rank0.1.pt.trace.json.gz").write_bytes(TRACE)
    assert profiler.ended("cold", no_group()).files == (tmp_path / "rank0.1.pt.trace.json.gz",)
    profiler.began()
    with pytest.raises(TraceMissing, match=r"no trace for window warm within 0\.3 s"):
        profiler.ended("warm", no_group())


def test_a_rank_without_a_trace_is_missed(tmp_path: Path) -> None:
    (tmp_path / "rank0.1.pt.trace.json.gz").write_bytes(TRACE)
    with pytest.raises(TraceMissing, match="1 of 2 traces for window cold"):
        await_traces(tmp_path, set(), ranks=2, deadline_s=0.1, window="cold")


def test_of_two_ranks_the_one_whose_trace_is_cut_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank0.1.pt.trace.json.gz").write_bytes(TRACE)
    (tmp_path / "rank1.1.pt.trace.json.gz").write_bytes(TRACE[: len(TRACE) // 2])
    with pytest.raises(TraceMissing, match=r"window cold: cut or unreadable: rank1\.1\.pt\.trace\.json\.gz$"):
        await_traces(tmp_path, set(), ranks=2, deadline_s=0.1, window="cold")


def test_a_trace_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "rank0.1.pt.trace.json.gz"
    path.write_bytes(TRACE[:20])

    def finish() -> None:
        time.sleep(0.3)
        path.write_bytes(TRACE)

    writer = threading.Thread(target=finish)
    writer.start()
    assert await_traces(tmp_path, set(), ranks=1, deadline_s=10, window="cold") == (path,)
    writer.join()


@pytest.mark.parametrize(
    ("data", "whole"), [(b"", False), (b"{}", True), (b'{"a": 1}\n\n', True), (b'{"a": [1', False), (b"{}" * 9, True)]
)
def test_whole(tmp_path: Path, data: bytes, *, whole: bool) -> None:
    path = tmp_path / "rank0.pt.trace.json"
    path.write_bytes(data)
    assert is_whole(path) is whole


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


EXPORT = """
import pathlib, sys
source, target = pathlib.Path(sys.argv[-1]), pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
assert sys.argv[1:4] == ["export", "--type", "sqlite"] and source.suffix == ".nsys-rep"
target.write_text("db of " + source.read_text())
"""
IMPORT = """
import os, pathlib, sys
source, target = (pathlib.Path(sys.argv[sys.argv.index(flag) + 1]) for flag in ("-i", "-o"))
assert os.environ["LD_LIBRARY_PATH"].split(":")[0] == str(pathlib.Path(__file__).parent)
target.write_text("imported " + source.read_text())
"""


def test_a_raw_recording_is_imported_first(tmp_path: Path) -> None:
    tools = NsysTools(program(tmp_path / "target" / "nsys", EXPORT), program(tmp_path / "host" / "Importer", IMPORT))
    raw, report = tmp_path / "engine.qdstrm", tmp_path / "lmcache.nsys-rep"
    raw.write_text("raw", encoding="utf-8")
    report.write_text("report", encoding="utf-8")
    assert tools.database(raw, 20).read_text(encoding="utf-8") == "db of imported raw"
    assert tools.database(report, 20).read_text(encoding="utf-8") == "db of report"


def test_a_tool_that_makes_nothing_is_quoted(tmp_path: Path) -> None:
    tools = NsysTools(program(tmp_path / "nsys", "print('no licence'); raise SystemExit(3)"))
    (tmp_path / "a.nsys-rep").touch()
    with pytest.raises(TraceMissing, match=r"nsys made no a\.sqlite \(exit 3\): no licence"):
        tools.database(tmp_path / "a.nsys-rep", 20)
    (tmp_path / "b.qdstrm").touch()
    with pytest.raises(TraceMissing, match=r"b\.qdstrm needs QdstrmImporter"):
        tools.database(tmp_path / "b.qdstrm", 20)


def test_tools_are_found_on_the_path_or_where_nsight_compute_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(profilers, "_NSIGHT", str(tmp_path / "nvidia"))
    assert NsysTools.find() is None
    home = tmp_path / "nvidia" / "nsight-compute" / "2025.3" / "host"
    nsys = program(home / "target-linux-x64" / "nsys", "")
    importer = program(home / "linux-desktop-glibc_2_11_3-x64" / "QdstrmImporter", "")
    assert NsysTools.find() == NsysTools(nsys, importer)
    on_path = program(tmp_path / "bin" / "nsys", "")
    assert NsysTools.find() == NsysTools(on_path, importer)


def test_the_program_is_told_from_the_profiler_before_it() -> None:
    argv = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = subprocess.Popen(argv)
    try:
        end = time.monotonic() + 10
        # The kernel has the arguments a moment after the program.
        while not profilers._running([child.pid], argv) and time.monotonic() < end:
            time.sleep(0.01)
        assert profilers._running([child.pid, os.getpid(), 2**22 + 1], argv) == [child.pid]
        assert profilers._running([child.pid], ["nsys", *argv]) == []
    finally:
        child.kill()
        child.wait()
