"""Published archives: the same bytes for the same raw data, nothing derived in them, nothing overwritten by them."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import polars as pl
import pytest
from trial_factory import write_experiment

from kvladder.provenance.publish import Differs, pack, rebuild, unpack
from kvladder.tables import columns


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): digest(path) for path in folder.rglob("*") if path.is_file()}


def experiment(folder: Path) -> Path:
    write_experiment(folder, setups=("plain", "native-host"), repeats=2)
    source = folder / "demo"
    (next(source.glob("trials/*/*/*")) / "verdict.json").write_text("{}", encoding="utf-8")
    # Rooflines of several boots, and of an older version.
    for name in ("rooflines/a1.json", "rooflines/b2.json", "rooflines.json"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}", encoding="utf-8")
    return source


def test_equal_raw_data_gives_an_equal_archive(tmp_path: Path) -> None:
    source = experiment(tmp_path / "a")
    assert pack(source, tmp_path / "one.tar.xz") == 4
    for path in source.rglob("*"):
        path.touch()
    pack(source, tmp_path / "two.tar.xz")
    assert digest(tmp_path / "one.tar.xz") == digest(tmp_path / "two.tar.xz")


def test_every_raw_file_comes_back_and_no_verdict(tmp_path: Path) -> None:
    source = experiment(tmp_path / "a")
    pack(source, tmp_path / "raw.tar.xz")
    unpack(tmp_path / "raw.tar.xz", tmp_path / "b")
    raw = {name: value for name, value in contents(source).items() if not name.endswith("verdict.json")}
    assert contents(tmp_path / "b") == raw
    assert any(name.endswith("requests.jsonl") for name in raw)


def test_an_unfinished_trial_is_left_out(tmp_path: Path) -> None:
    source = experiment(tmp_path / "a")
    broken = next(source.glob("trials/plain/*/*"))
    (broken / "trial.json").unlink()
    assert pack(source, tmp_path / "raw.tar.xz") == 3
    with tarfile.open(tmp_path / "raw.tar.xz") as tar:
        assert not [name for name in tar.getnames() if name.startswith(broken.relative_to(source).as_posix())]


def test_kept_columns_are_not_published(tmp_path: Path) -> None:
    source = experiment(tmp_path / "a")
    pack(source, tmp_path / "without.tar.xz")
    kept = columns.kept(next(source.glob("trials/*/*/*/trial.json")).parent, "burst", "0" * 64)
    kept.parent.mkdir()
    pl.DataFrame({"index": [0]}).write_parquet(kept)
    pack(source, tmp_path / "with.tar.xz")
    assert digest(tmp_path / "with.tar.xz") == digest(tmp_path / "without.tar.xz")


def test_what_lies_there_stays(tmp_path: Path) -> None:
    source = experiment(tmp_path / "a")
    pack(source, tmp_path / "raw.tar.xz")
    own = next(source.glob("trials/*/*/*/trial.json"))
    own.write_text("mine", encoding="utf-8")
    unpack(tmp_path / "raw.tar.xz", source)
    assert own.read_text(encoding="utf-8") == "mine"


def test_a_capture_is_published_as_its_tables_and_without_what_the_profiler_wrote(tmp_path: Path) -> None:
    capture = tmp_path / "a" / "timelines" / "captures" / "native"
    (capture / "tables").mkdir(parents=True)
    (capture / "profile").mkdir()
    (capture / "profile" / "engine.sqlite").write_bytes(b"large")
    (capture / "capture.json").write_text("{}", encoding="utf-8")
    events = pl.DataFrame({"start_ns": [1, 2], "name": ["execute", "gemm"]})
    events.write_parquet(capture / "tables" / "events.parquet")
    assert pack(tmp_path / "a", tmp_path / "raw.tar.xz") == 1
    unpack(tmp_path / "raw.tar.xz", tmp_path / "b")
    back = tmp_path / "b" / "timelines" / "captures" / "native" / "tables" / "events.parquet"
    assert [path for path in (tmp_path / "b").rglob("*") if path.is_file()] == [back]
    assert pl.read_parquet(back).equals(events)


def test_a_name_that_is_not_published_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Differs, match="'x' isn't published; there is: nothing"):
        rebuild(tmp_path, ["x"])


def test_cells_of_a_bench_come_back_without_what_their_columns_give(tmp_path: Path) -> None:
    finished = tmp_path / "a" / "cells" / "schedule" / "kvladder-1" / "p9-c2-ab" / "r0"
    unfinished = finished.with_name("r1")
    moments = {"arrival_ns": [10**15, 10**15 + 7], "write_ns": [[10**15 + 5], []]}
    frame = pl.DataFrame(moments | {"last_read_ns": [1, 2], "client_first_token_ns": [None, 3]})
    for folder in (finished, unfinished):
        folder.mkdir(parents=True)
        frame.write_parquet(folder / "requests.parquet")
        (folder / "client.log").write_text("/home/somebody", encoding="utf-8")
    (finished / "cell.json").write_text("{}", encoding="utf-8")
    assert pack(tmp_path / "a", tmp_path / "raw.tar.xz") == 1
    unpack(tmp_path / "raw.tar.xz", tmp_path / "b")
    back = tmp_path / "b" / finished.relative_to(tmp_path / "a")
    assert sorted(contents(tmp_path / "b")) == sorted(
        (back / name).relative_to(tmp_path / "b").as_posix() for name in ("cell.json", "requests.parquet")
    )
    assert pl.read_parquet(back / "requests.parquet").equals(frame.select(*moments))
    # A packed one packs to itself.
    pack(tmp_path / "b", tmp_path / "again.tar.xz")
    assert digest(tmp_path / "again.tar.xz") == digest(tmp_path / "raw.tar.xz")
