"""Tiers on disk: where their files lie, how a server is told, and what of it is read back and predicted."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_trial_engine import context, setup, value
from trial_factory import write_trial

from kvladder.config.experiment import ExperimentConfig, validate
from kvladder.config.traffic import PassName
from kvladder.config.yaml import load_file
from kvladder.gates import direct_io_as_asked
from kvladder.gates.base import Evidence
from kvladder.stack import doctor
from kvladder.stats.oracle import Access, Reset, replay
from kvladder.trial.page_cache import disk_state
from kvladder.trial.readback import _settings

LADDER = Path(__file__).parents[2] / "config" / "ladder.yaml"
NATIVE = {"kind": "native", "cpu_bytes": "1GiB", "copier": "host"}
LMCACHE = {"kind": "lmcache-mp", "cpu_bytes": "1GiB", "chunk_tokens": 256}
PASSES: tuple[PassName, ...] = ("cold", "first-hit", "warm", "mixed")

FS_LINE = "INFO:     Initialized FSL2Adapter with base_path=/x/tier, relative_tmp_dir=None, read_ahead_size=None, "
NATIVE_LINE = "INFO:     Created FS native L2 adapter: /x/tier (workers=4, odirect=True, read_ahead=None)\n"


def server_argv(one: Any, folder: Path) -> list[str]:
    (spec,) = one.side_processes(context(folder))
    return list(spec.argv)


@pytest.mark.parametrize("base", [NATIVE, LMCACHE])
def test_files_lie_in_a_folder_of_the_trials_own(tmp_path: Path, base: dict[str, Any]) -> None:
    own, elsewhere, none = (setup(**base, **more) for more in ({"files": {}}, {"files": {"path": "/disk"}}, {}))
    assert own.disk_folder(context(tmp_path)) == tmp_path / "tier"
    assert elsewhere.disk_folder(context(tmp_path)) == Path("/disk/exp-x-r0-1234")
    assert none.disk_folder(context(tmp_path)) is None and none.file_access(128) is None


@pytest.mark.parametrize("base", [NATIVE, LMCACHE])
def test_the_first_hit_comes_from_disk_unless_told_otherwise(base: dict[str, Any]) -> None:
    disk, host = setup(**base, files={}), setup(**base, files={"first_hit": "host"})
    assert [disk.hit_tier(name) for name in PASSES] == ["cpu", "nvme", "cpu", "cpu"]
    assert [disk.reset_before(name) for name in PASSES] == [None, "host", None, None]
    assert {host.hit_tier(name) for name in PASSES} == {"cpu"}
    assert {host.reset_before(name) for name in PASSES} == {None}


@pytest.mark.parametrize(
    ("files", "spec", "threads"),
    [
        ({}, {"type": "fs", "use_odirect": True}, 8),
        ({"direct_io": False}, {"type": "fs", "use_odirect": False}, 8),
        ({"adapter": "fs_native", "workers": 3}, {"type": "fs_native", "use_odirect": True, "num_workers": 3}, 3),
    ],
)
def test_lmcache_is_told_its_adapter(tmp_path: Path, files: dict[str, Any], spec: dict[str, Any], threads: int) -> None:
    one = setup(**LMCACHE, files=files)
    argv = server_argv(one, tmp_path)
    assert json.loads(value(argv, "--l2-adapter")) == spec | {"base_path": str(tmp_path / "tier")}
    assert value(argv, "--l2-prefetch-policy") == "retain"
    access = one.file_access(128)
    assert (access.chunk_tokens, access.threads, access.direct) == (256, threads, spec["use_odirect"])
    assert "--l2-adapter" not in server_argv(setup(**LMCACHE), tmp_path)


def test_a_second_word_about_the_files_is_refused() -> None:
    adapter = {"l2-adapter": '{"type":"fs","base_path":"/d"}'}
    assert setup(**LMCACHE, server_args=adapter).files is None
    for args in (adapter, {"l2-prefetch-policy": "default"}, {"l2-store-policy": "skip_l1"}):
        with pytest.raises(ValueError, match=f"{next(iter(args))} is set by the setup's own 'files'"):
            setup(**LMCACHE, files={}, server_args=args)


def test_engines_that_share_a_pool_share_its_files(tmp_path: Path) -> None:
    """They are removed once, by the name that the server knows; native's are each engine's own."""
    second = dataclasses.replace(context(tmp_path), engines=2).of_engine(1)
    assert setup(**LMCACHE, files={}).disk_folder(second) is None
    assert setup(**NATIVE, files={}).disk_folder(second) == tmp_path / "engine-2" / "tier"


def test_the_servers_pool_is_emptied_by_the_server(tmp_path: Path) -> None:
    assert setup(**LMCACHE, files={}).host_reset(context(tmp_path)) == (21002, "/cache/clear")
    assert setup(**NATIVE, files={}).host_reset(context(tmp_path)) is None


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (FS_LINE + "use_odirect=True (fs_l2_adapter.py:267)\n", {"adapter": "fs", "direct_io": True}),
        (FS_LINE + "use_odirect=False\n", {"adapter": "fs", "direct_io": False}),
        (NATIVE_LINE, {"adapter": "fs_native", "direct_io": True}),
        ("INFO: Starting StoreController...\n", {"adapter": None, "direct_io": None}),
    ],
)
def test_the_adapter_that_runs_is_read_back(log: str, said: dict[str, Any]) -> None:
    one = setup(**LMCACHE, files={})
    assert one.settings() == {"adapter": "fs", "direct_io": True}
    assert _settings(one, log) == said
    assert _settings(setup(**LMCACHE), log) == {}


def test_what_the_pool_has_lost_the_files_give() -> None:
    """Chunks of two blocks: emptied, the pool's hits come from disk, and are in the pool afterwards."""
    tiers = setup(**LMCACHE, files={}).hierarchy(128, {"cpu": 8 * 256}, "0.32.0")
    assert tiers.names == ("cpu", "nvme") and not tiers.known
    prompt = Access(range(4), 4 * 128 + 1)
    found = replay([prompt, Reset("host"), prompt, Reset("nothing"), prompt], tiers)
    assert found.hits == [{"cpu": 0, "nvme": 0}, {"cpu": 0, "nvme": 512}, {"cpu": 512, "nvme": 0}]
    assert setup(**LMCACHE).hierarchy(128, {}, None).below is None


@pytest.mark.parametrize(
    ("direct", "cached", "decision", "seen"),
    [
        (True, 0, "pass", "0 of 1000 B of the files were cached"),
        (True, 1000, "fail", "page cache: 1000 of 1000 B"),
        (False, 1000, "not-checked", "the page cache was asked for; page cache: 1000 of 1000 B"),
    ],
)
def test_a_page_cache_that_was_asked_for_is_no_fault(
    tmp_path: Path, direct: bool, cached: int, decision: str, seen: str
) -> None:
    def edit(data: Any) -> None:
        data["effective"]["details"]["disk"] = {"filesystem": "ext4", "bytes": 1000, "cached_bytes": cached}

    config = LMCACHE | {"files": {"direct_io": direct}}
    folder = write_trial(tmp_path, setup="lmcache-mp", setup_config=config, edit_trial=edit)
    (result,) = direct_io_as_asked.check(Evidence.load(folder))
    assert result.decision == decision and result.seen.startswith(seen)


def test_files_of_both_engines_are_looked_at(tmp_path: Path) -> None:
    """LMCache's are called otherwise than vLLM's; one that is being written isn't a block yet."""
    for name in ("a.bin", "m@0x01000100@0@ab.data", "m@0x01000100@0@cd.tmp", "config.json"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    assert disk_state(tmp_path)["files"] == 2


def ladder(folder: Path, **files: Any) -> ExperimentConfig:
    """The ladder with its files in a folder."""
    data = load_file(LADDER)
    for each in data["setups"].values():
        if "files" in each:
            each["files"] |= {"path": str(folder)} | files
    return validate(data)


def test_the_doctor_looks_at_the_disk_of_a_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ladder(tmp_path / "not" / "yet")
    (found,) = doctor._tiers_on_disk(config, tmp_path, tmp_path)
    assert found.state in ("ok", "warn") and f"GB free at {tmp_path}" in found.seen

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(doctor, "os", SimpleNamespace(**vars(os) | {"open": refuse}))
    (found,) = doctor._tiers_on_disk(config, tmp_path, tmp_path)
    assert found.state == "warn" and "no O_DIRECT" in found.seen
    monkeypatch.setattr(doctor, "os", SimpleNamespace(**vars(os) | {"access": lambda *_: False}))
    (found,) = doctor._tiers_on_disk(config, tmp_path, tmp_path)
    assert (found.state, found.seen) == ("fail", f"{tmp_path} can't be written")
