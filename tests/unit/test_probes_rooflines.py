"""Rooflines of this machine, with small sizes; and which of them say something about a trial."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from config_factory import experiment

from kvladder.config import rooflines as files
from kvladder.config.records import HostRecord
from kvladder.config.rooflines import Rooflines
from kvladder.probes import ceilings, rooflines

MIB = 2**20
HOST = HostRecord(host_id="a1", cpu="c", cores=2, memory_bytes=1, kernel="6")
H200 = HOST.model_copy(update={"gpus": [{"name": "H200"}]})


def test_the_first_call_is_not_counted_and_the_median_is_of_rates() -> None:
    seconds = iter([100.0, 1.0, 2.0, 4.0])
    result = rooflines.measure("x", 8, 3, lambda: next(seconds))
    assert (result["min"], result["median"], result["max"]) == (2.0, 4.0, 8.0)


def test_a_slow_link_is_repeated_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooflines, "PATIENCE_S", 0.0)
    assert rooflines.measure("x", 8, 7, lambda: 1.0)["repeats"] == rooflines.LEAST_REPEATS


def test_memory_is_copied_whole_by_all_threads() -> None:
    found = list(rooflines.host_copies(2))
    assert {link["threads"] for link in found} == {1, 2}
    assert all(0 < link["min"] <= link["median"] <= link["max"] for link in found)


def test_streams_over_loopback() -> None:
    one, two = rooflines.loopback(2)
    assert (one["threads"], two["threads"]) == (1, 2)
    assert one["bytes"] == two["bytes"] == 256 * MIB


@pytest.mark.parametrize("chunk", [MIB, 5000])
def test_disk_moves_every_byte_and_cleans_up(tmp_path: Path, chunk: int) -> None:
    found = list(rooflines.disk(tmp_path, chunk=chunk, total=4 * MIB, threads=2))
    assert [link["threads"] for link in found] == [1, 1, 2, 2]
    for write, read in (found[:2], found[2:]):
        assert write["bytes"] == read["bytes"] <= 4 * MIB
        assert write["chunk"] % 4096 == 0
        assert write["link"].startswith("disk_write_")
        assert read["link"].removeprefix("disk_read") == write["link"].removeprefix("disk_write")
    assert not list(tmp_path.iterdir())


def test_without_direct_io_the_name_says_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rooflines.os.open

    def refuses(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & rooflines.os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(rooflines.os, "open", refuses)
    assert [link["link"] for link in rooflines.disk(tmp_path, MIB, MIB)] == ["disk_write_cached", "disk_read_cached"]


@pytest.mark.slow
def test_as_a_file_it_needs_no_package_and_what_fails_costs_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "rooflines.json"
    argv = [sys.executable, "-I", rooflines.__file__, "--out", str(out), "--device-bytes", "1024"]
    subprocess.run([*argv, "--folder", str(tmp_path / "nowhere")], check=True, timeout=120)
    found = json.loads(out.read_text())
    assert {link["link"] for link in found["links"]} == {"host_memcpy", "tcp_loopback"}
    assert [problem.partition(":")[0] for problem in found["problems"]] == ["device", "disk"]


# The file


def test_a_measurement_that_ends_without_a_result_is_a_file_without_links(tmp_path: Path) -> None:
    false = Path("/bin/false")
    found = ceilings.measure(experiment(), false, "cpu", {}, [], tmp_path)
    assert found.links == []
    assert "ended without a result" in found.problems[0]
    assert found.host is not None
    assert Rooflines.model_validate_json(found.model_dump_json(by_alias=True)) == found


def test_the_disk_is_measured_as_the_tiers_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv: list[str] = []
    monkeypatch.setattr(ceilings.subprocess, "run", lambda given, **_: argv.extend(given))
    tier = {"path": str(tmp_path / "disk"), "read_threads": 4, "write_threads": 2}
    native = {"kind": "native", "cpu_bytes": "1MiB", "copier": "host", "files": tier}
    ceilings.measure(experiment(native=native), Path("python"), "cpu", {}, [], tmp_path)
    options = dict(zip(argv[2::2], argv[3::2], strict=False))
    # 128 tokens of 2 (K, V) × 2 layers × 2 heads × 16 × 2 bytes.
    assert options["--chunk"] == str(128 * 256)
    assert (options["--folder"], options["--disk-threads"]) == (str(tmp_path / "disk"), "6")
    assert options["--device-bytes"] == "0"


def link(size: int, rate: float, threads: int = 1) -> dict[str, Any]:
    return {
        "link": "m",
        "bytes": size,
        "threads": threads,
        "repeats": 3,
        "median": rate / 2,
        "min": rate / 4,
        "max": rate,
    }


@pytest.mark.parametrize(
    ("moved", "rate"),
    [(10, 40.0), (100, 40.0), (150, 40.0), (999, 40.0), (1000, 9.0), (5000, 9.0), (10_000, 8.0), (99_999, 8.0)],
)
def test_the_ceiling_is_of_copies_no_smaller_than_what_moved(moved: int, rate: float) -> None:
    sizes = {100: (30.0, 40.0), 1000: (7.0, 9.0), 10_000: (8.0, 6.0)}
    links = [link(size, rate, 1 + place) for size, rates in sizes.items() for place, rate in enumerate(rates)]
    found = Rooflines.model_validate({"links": links}).ceiling("m", moved)
    assert found is not None
    assert found.max == rate
    assert Rooflines.model_validate({"links": links}).ceiling("other", moved) is None


def write(experiment_folder: Path, name: str, host: HostRecord | None, rate: float = 1.0) -> None:
    path = experiment_folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        Rooflines.model_validate({"host": host, "links": [link(1, rate)], "cpu_other": 0.01}).model_dump_json(
            by_alias=True
        )
    )


def test_only_the_same_host_boot_and_gpu_decide(tmp_path: Path) -> None:
    assert files.of_host(files.load(tmp_path), HOST) == (None, "no roofline: none was measured (snakemake probe)")
    write(tmp_path, "rooflines/b2.json", HOST.model_copy(update={"host_id": "b2"}))
    found, why = files.of_host(files.load(tmp_path), HOST)
    assert found is None
    assert why == "no roofline: none was measured on this host since it booted"
    write(tmp_path, "rooflines/a1.json", HOST)
    assert files.of_host(files.load(tmp_path), HOST)[1] is None
    # Measured on the host, but not with this GPU; and a machine without an id is never known to be the same.
    assert files.of_host(files.load(tmp_path), H200)[0] is None
    write(tmp_path, "rooflines/unknown.json", HOST.model_copy(update={"host_id": "unknown"}))
    assert files.of_host(files.load(tmp_path), HOST.model_copy(update={"host_id": "unknown"}))[0] is None


def test_what_was_measured_beside_other_work_decides_nothing(tmp_path: Path) -> None:
    """A busy machine's links look slow, and a good trial would lie above them."""
    quiet = Rooflines.model_validate({"host": HOST, "links": [link(1, 1.0)], "cpu_other": 0.1})
    busy = quiet.model_copy(update={"cpu_other": 0.42})
    assert files.of_host([quiet], HOST) == (quiet, None)
    found, why = files.of_host([busy], HOST)
    assert found is busy
    assert why is not None
    assert why.startswith("other processes took 42% of the CPU while the rooflines were measured")
    assert files.of_host([quiet.model_copy(update={"cpu_other": None})], HOST)[1] is not None
    assert ceilings._others((100.0, 50.0, 10.0), (120.0, 65.0, 20.0)) == 0.25
    assert ceilings._others((1.0, 1.0, 1.0), (1.0, 1.0, 1.0)) is None


def test_an_old_file_names_no_host_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    old = {"schema": 1, "links": [{**link(1, 2.0)}]}
    del old["links"][0]["threads"]  # type: ignore[attr-defined]
    (tmp_path / "rooflines.json").write_text(json.dumps(old))
    found, why = files.of_host(files.load(tmp_path), HOST)
    assert found is not None
    assert found.links[0].threads == 1
    assert why is not None
    assert "don't say of which host" in why
    write(tmp_path, "rooflines/a1.json", HOST, 7.0)
    found, why = files.of_host(files.load(tmp_path), HOST)
    assert found is not None
    assert (found.links[0].max, why) == (7.0, None), "a file that names the host goes before one that names none"
    (tmp_path / "rooflines/a1.json").write_text("{")
    assert len(files.load(tmp_path)) == 1


@pytest.mark.parametrize(
    "damage",
    [
        {"max": float("inf")},
        {"max": float("nan")},
        {"max": 0.0},
        # A ceiling that the link's own median broke.
        {"median": 9.0},
        {"min": 8.0},
    ],
)
def test_a_rate_that_bounds_nothing_is_no_ceiling(tmp_path: Path, damage: dict[str, float]) -> None:
    """Every claim lies below an infinite one."""
    write(tmp_path, "rooflines/a1.json", HOST, 7.0)
    path = tmp_path / "rooflines/a1.json"
    data = json.loads(path.read_text())
    data["links"][0].update(damage)
    path.write_text(json.dumps(data))
    assert files.load(tmp_path) == []


@pytest.mark.parametrize("share", [float("nan"), -0.5, float("inf")])
def test_a_share_of_the_cpu_that_cannot_be_is_no_quiet_machine(tmp_path: Path, share: float) -> None:
    write(tmp_path, "rooflines/a1.json", HOST)
    path = tmp_path / "rooflines/a1.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cpu_other": share}))
    assert files.load(tmp_path) == []
