"""below-the-limit and direct-io-as-asked: claims against rooflines, and what shows that a disk was a disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from trial_factory import BLOCK, FAMILIES, KV_BYTES_PER_TOKEN, MS, Rows, drop, rehash, shift, write_trial

from kvladder import tables
from kvladder.config.experiment import GateConfig
from kvladder.config.records import GateResult, HostRecord, Verdict
from kvladder.figures import percent_of_roofline
from kvladder.gates import below_the_limit, direct_io_as_asked
from kvladder.gates.base import Evidence
from kvladder.judge import judge_trial
from kvladder.report.limits import limits as section
from kvladder.setups.mooncake_store import MooncakeStore
from kvladder.tables.limits import BEYOND, REFUSED, shown
from kvladder.tables.model import CELL, Tables, frame
from kvladder.trial.page_cache import cached_bytes, disk_state

LOAD_TIME, LOAD_BYTES = "vllm:kv_offload_load_time_total", "vllm:kv_offload_load_bytes_total"
TIER_READ = "vllm:kv_offload_tiering_read_{}_total"
MEMCPY, NETWORK = "MC_STORE_MEMCPY not set, auto-detected: TCP-only environment, memcpy enabled\n", "memcpy disabled\n"
H200 = [{"name": "H200"}]
FAST = {"host_memcpy": 40e9, "tcp_loopback": 5e9, "disk_read_direct": 3e9, "disk_write_direct": 3e9}


def measured(root: Path, host_id: str | None = "host-a", gpus: Any = (), **links: float) -> None:
    """Rooflines beside the trials below ``root``, each link with one size."""
    host = (
        HostRecord(host_id=host_id, cpu="c", cores=2, memory_bytes=1, kernel="6", gpus=list(gpus)) if host_id else None
    )
    rows = [
        {"link": name, "bytes": 1 << 20, "repeats": 3, "median": rate, "min": rate, "max": rate}
        for name, rate in links.items()
    ]
    path = root / "demo" / "rooflines" / f"{host_id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"schema": 2, "host": host and host.model_dump(mode="json"), "links": rows, "cpu_other": 0.01}
    path.write_text(json.dumps(data), encoding="utf-8")


def run(folder: Path, gate: Any = below_the_limit, **config: Any) -> list[GateResult]:
    results: list[GateResult] = gate.check(Evidence.load(folder, GateConfig(**config)))
    return results


def log(folder: Path, text: str) -> None:
    with (folder / "logs" / "engine.log").open("a", encoding="utf-8") as file:
        file.write(text)
    rehash(folder)


def trial(root: Path, setup: str = "native-host", **more: Any) -> Path:
    return write_trial(root, setup=setup, host_id="host-a", **more)


@pytest.mark.parametrize("setup", ["native-host", "lmcache-mp"])
def test_rates_below_their_link_pass(tmp_path: Path, setup: str) -> None:
    measured(tmp_path, **FAST)
    results = run(trial(tmp_path, setup))
    assert {result.decision for result in results} == {"pass"}
    assert {result.workload for result in results} == {"repeat", "burst"}
    assert all("of host_memcpy" in result.seen for result in results)


def test_a_claim_that_times_the_enqueue_fails(tmp_path: Path) -> None:
    """285 GB/s over a link of 55: LMCache's log line, as a counter."""
    measured(tmp_path, host_memcpy=55e9)

    def hurry(rows: Rows) -> None:
        loaded = 2944 * KV_BYTES_PER_TOKEN
        shift(rows, LOAD_TIME, loaded / 285e9 - loaded / 4e9, since="repeat/first-hit/1:end")

    verdict = judge_trial(trial(tmp_path, edit_counters=hurry))
    assert verdict.status == "invalid"
    assert verdict.reason is not None
    assert verdict.reason.startswith("below-the-limit (repeat): expected at most 55 GB/s, as host_memcpy was measured")
    assert "seen: load at 285 GB/s by the engine's own time in first-hit 1, 518% of host_memcpy" in verdict.reason


@pytest.mark.parametrize(("ceiling", "decision"), [(4.0e9, "pass"), (3.82e9, "pass"), (3.80e9, "fail")])
def test_the_tolerance_is_of_the_ceiling(tmp_path: Path, ceiling: float, decision: str) -> None:
    measured(tmp_path, host_memcpy=ceiling)  # the trial's counters claim 4 GB/s each way
    assert {result.decision for result in run(trial(tmp_path))} == {decision}
    loose = run(trial(tmp_path), roofline_tolerance=0.2)
    assert {result.decision for result in loose} == {"pass"}


def test_bytes_in_no_time_are_above_every_link(tmp_path: Path) -> None:
    measured(tmp_path, **FAST)

    def stop(rows: Rows) -> None:
        shift(rows, LOAD_TIME, -2944 * KV_BYTES_PER_TOKEN / 4e9, since="repeat/first-hit/1:end")

    results = [result for result in run(trial(tmp_path, edit_counters=stop)) if result.decision == "fail"]
    assert len(results) == 1
    assert "B in no time" in results[0].seen


def test_hits_that_nobody_can_have_loaded_that_fast_fail(tmp_path: Path) -> None:
    """No counter of time, so only what the client saw: bytes over TTFT."""
    measured(tmp_path, host_memcpy=40e9)

    def at_once(rows: Rows) -> None:
        for row in rows:
            if row["pass"] == "warm" and row["workload"] == "repeat":
                row.update(first_token_ns=row["send_ns"] + MS, chunk_ns=[row["send_ns"] + MS] * len(row["chunk_ns"]))

    folder = trial(tmp_path, "lmcache-mp", edit_requests=at_once)
    bad = [result for result in run(folder) if result.decision == "fail"]
    assert [result.workload for result in bad] == ["repeat"]
    assert "at least, by TTFT in warm" in bad[0].seen


def test_tokens_stand_in_for_bytes_that_nobody_counts(tmp_path: Path) -> None:
    measured(tmp_path, **FAST)

    def silent(rows: Rows) -> None:
        for name in (LOAD_BYTES, LOAD_TIME):
            drop(rows, name)

    claims = below_the_limit.claims(Evidence.load(trial(tmp_path, edit_counters=silent)))
    loads = [claim for claim in claims if claim.direction == "load" and claim.workload == "repeat"]
    assert [(claim.basis, claim.bytes) for claim in loads] == [("ttft", 2944 * KV_BYTES_PER_TOKEN)] * 3


@pytest.mark.parametrize("setup", ["plain", "prefix-cache"])
def test_without_a_tier_below_the_device_there_is_nothing_to_check(tmp_path: Path, setup: str) -> None:
    measured(tmp_path, **FAST)
    assert [result.decision for result in run(trial(tmp_path, setup))] == ["not-checked"] * 2


@pytest.mark.parametrize(
    ("host_id", "gpus", "links", "why"),
    [
        ("host-b", (), FAST, "none was measured on this host since it booted"),
        (None, (), FAST, "don't say of which host they are"),
        ("host-a", (), {"tcp_loopback": 5e9}, "no roofline of host_memcpy"),
        ("host-a", (), {}, "no roofline of host_memcpy"),
    ],
)
def test_unknown_is_not_checked_and_never_a_pass(
    tmp_path: Path, host_id: str | None, gpus: Any, links: dict[str, float], why: str
) -> None:
    measured(tmp_path, host_id, gpus, **links)
    verdict = judge_trial(trial(tmp_path))
    assert verdict.status == "valid"
    results = [result for result in verdict.gates if result.gate == "below-the-limit"]
    assert {result.decision for result in results} == {"not-checked"}
    assert all(why in result.seen for result in results)


def test_rooflines_of_a_busy_machine_make_no_good_trial_invalid(tmp_path: Path) -> None:
    measured(tmp_path, host_memcpy=3e9)  # the trial's counters claim 4 GB/s
    path = tmp_path / "demo" / "rooflines" / "host-a.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"cpu_other": 0.01', '"cpu_other": 0.5'), encoding="utf-8")
    verdict = judge_trial(trial(tmp_path))
    assert verdict.status == "valid"
    seen = [result for result in verdict.gates if result.gate == "below-the-limit"]
    assert {result.decision for result in seen} == {"not-checked"}
    assert "took 50% of the CPU" in seen[0].seen


def test_no_rooflines_at_all(tmp_path: Path) -> None:
    """As an archive has none, and a run whose time was up."""
    verdict = judge_trial(trial(tmp_path))
    assert verdict.status == "valid"
    (first, *_) = [result for result in verdict.gates if result.gate == "below-the-limit"]
    assert first.seen.startswith("no roofline: none was measured (snakemake probe)")


def test_on_a_gpu_host_memory_is_pinned(tmp_path: Path) -> None:
    measured(tmp_path, gpus=H200, pinned_h2d=55e9, pinned_d2h=50e9, host_memcpy=1e9)
    folder = trial(tmp_path, edit_trial=lambda data: data["host"].update(gpus=H200))
    links = {(claim.direction, claim.link) for claim in below_the_limit.claims(Evidence.load(folder))}
    assert links == {("load", "pinned_h2d"), ("store", "pinned_d2h")}
    assert {result.decision for result in run(folder)} == {"pass"}


@pytest.mark.parametrize(
    ("text", "gpu", "protocol", "links"),
    [
        (MEMCPY, False, "tcp", ("host_memcpy",)),
        (MEMCPY + "Store segment pinned memory is disabled", True, "tcp", ("pageable",)),
        (MEMCPY, True, "tcp", ("pinned",)),
        (NETWORK, True, "tcp", ("tcp_loopback",)),
        (NETWORK, True, "rdma", ()),
        ("", False, "tcp", ("tcp_loopback", "host_memcpy")),
        ("", True, "rdma", ()),
    ],
)
def test_a_pools_link_is_what_its_engine_logs(text: str, gpu: bool, protocol: Any, links: tuple[str, ...]) -> None:
    setup = MooncakeStore(kind="mooncake-store", segment_bytes=1, buffer_bytes=1, protocol=protocol)
    assert setup.links("remote", gpu=gpu, log=text) == links


@pytest.mark.parametrize(
    ("text", "links", "decision"),
    [
        ("", {"tcp_loopback": 0.2e9, "host_memcpy": 2e9}, "pass"),  # either way: the faster one bounds it
        ("", {"tcp_loopback": 2e9}, "not-checked"),  # the other may be faster still
        (NETWORK, {"tcp_loopback": 0.2e9, "host_memcpy": 2e9}, "fail"),
        (MEMCPY, {"tcp_loopback": 0.2e9, "host_memcpy": 2e9}, "pass"),
    ],
)
def test_a_link_that_nobody_names_is_bounded_by_all(
    tmp_path: Path, text: str, links: dict[str, float], decision: str
) -> None:
    measured(tmp_path, **links)  # the trial's counters claim 1 GB/s
    folder = trial(tmp_path, "mooncake-store")
    log(folder, text)
    assert {result.decision for result in run(folder)} == {decision}


def test_a_pools_transfer_engine_is_shown_beside_and_bounds_nothing(tmp_path: Path) -> None:
    """A claim of 1 GB/s over loopback: half of what the link can do, and twice what the transfer engine did."""
    links = {"tcp_loopback": 2e9, "transfer_engine_read": 0.5e9, "transfer_engine_write": 4e9}
    measured(tmp_path, **links)
    folder = trial(tmp_path, "mooncake-store")
    log(folder, NETWORK)
    assert {result.decision for result in run(folder)} == {"pass"}
    claims = below_the_limit.claims(Evidence.load(folder))
    of_engine = {
        (claim.direction, claim.link, claim.ceiling, claim.bounds) for claim in claims if claim.basis == "engine"
    }
    assert of_engine == {
        ("load", "tcp_loopback", 2e9, True),
        ("load", "transfer_engine_read", 0.5e9, False),
        ("store", "tcp_loopback", 2e9, True),
        ("store", "transfer_engine_write", 4e9, False),
    }
    (tmp_path / "demo/rooflines/host-a.json").unlink()
    measured(tmp_path, tcp_loopback=2e9)
    without = below_the_limit.claims(Evidence.load(folder))
    assert without == [claim for claim in claims if claim.bounds], "rooflines of before it was measured"


@pytest.mark.parametrize("text", [MEMCPY, ""])
def test_a_pool_that_copies_by_itself_is_not_its_transfer_engine(text: str) -> None:
    setup = MooncakeStore(kind="mooncake-store", segment_bytes=1, buffer_bytes=1)
    beside = setup.links_beside(setup.links("remote", gpu=False, log=text))
    assert beside == (() if text else ("transfer_engine",))


# The tier on disk


def from_disk(root: Path, details: dict[str, Any] | None = None, read_s: float | None = None, **more: Any) -> Path:
    """A trial whose first hits come from files, at 2 GB/s by the engine's own time unless `read_s` says otherwise."""
    moved = 2944 * KV_BYTES_PER_TOKEN

    def files(rows: Rows) -> None:
        for row in rows:
            lines = []
            begun = row["mark"] not in ("ready", "repeat/cold/0:start", "repeat/cold/0:end", "repeat/first-hit/1:start")
            for name, value in (("bytes", moved), ("time", moved / 2e9 if read_s is None else read_s)):
                series = TIER_READ.format(name)
                lines += [f"# TYPE {series} counter", f'{series}{{engine="0",tier="1:fs"}} {value * begun!r}']
            row["pages"]["engine"] += "\n".join(lines) + "\n"

    def edit(data: Any) -> None:
        data["effective"]["details"].update({} if details is None else {"disk": details})

    config = {"kind": "native", "cpu_bytes": 1 << 30, "copier": "host", "files": {"first_hit": "files"}}
    return trial(root, "native-host-fs", setup_config=config, edit_counters=files, edit_trial=edit, **more)


DIRECT = {"filesystem": "ext4", "files": 9, "looked_at": 9, "bytes": 1000, "cached_bytes": 0}
REFUSED_LINE = "O_DIRECT is not supported at '/x'; falling back to buffered I/O for the 'fs' KV offload tier.\n"


def test_files_are_compared_with_the_disk(tmp_path: Path) -> None:
    measured(tmp_path, **FAST)
    folder = from_disk(tmp_path, DIRECT)
    good = [result for result in run(folder) if "disk_read_direct" in result.seen]
    assert [result.decision for result in good] == ["pass"]
    measured(tmp_path, **{**FAST, "disk_read_direct": 1e9})
    (bad,) = [result for result in run(folder) if result.decision == "fail"]
    assert "disk_read_direct" in bad.seen


@pytest.mark.parametrize(("gb_per_s", "decision"), [(1.4, "pass"), (1.3, "fail")])
def test_a_disk_is_no_constant_of_the_machine(tmp_path: Path, gb_per_s: float, decision: str) -> None:
    """2 GB/s from a disk that did 1.4 once, and 1.3: half as much again is allowed, no more."""
    measured(tmp_path, **{**FAST, "disk_read_direct": gb_per_s * 1e9})
    results = [result for result in run(from_disk(tmp_path, DIRECT)) if "disk_read_direct" in result.seen]
    assert [result.decision for result in results] == [decision]
    assert "+ 50%" in results[0].expected


def test_files_in_the_page_cache_are_not_compared_with_the_disk(tmp_path: Path) -> None:
    measured(tmp_path, **{**FAST, "disk_read_direct": 1e9})
    folder = from_disk(tmp_path, {**DIRECT, "cached_bytes": 1000})
    assert not [result for result in run(folder) if result.decision == "fail"]
    (cached,) = [result for result in run(folder) if "disk_read_cached" in result.seen]
    assert cached.decision == "not-checked"


@pytest.mark.parametrize(
    ("details", "text", "decision", "seen"),
    [
        (DIRECT, "", "pass", "0 of 1000 B of the files were cached"),
        ({**DIRECT, "cached_bytes": 10}, "", "pass", "10 of 1000 B"),
        ({**DIRECT, "cached_bytes": 11}, "", "fail", "page cache: 11 of 1000 B of the files were cached"),
        (DIRECT, REFUSED_LINE, "fail", "page cache: the engine logged that its file system refuses O_DIRECT"),
        (None, REFUSED_LINE, "fail", "page cache: the engine logged"),
        ({**DIRECT, "filesystem": "tmpfs"}, "", "fail", "memory: the folder is on tmpfs"),
        (None, "", "not-checked", "isn't on record"),
        ({**DIRECT, "cached_bytes": None}, "", "not-checked", "isn't on record"),
        ({**DIRECT, "files": 0, "bytes": 0, "cached_bytes": None}, "", "not-checked", "isn't on record"),
    ],
)
def test_direct_io(tmp_path: Path, details: dict[str, Any] | None, text: str, decision: str, seen: str) -> None:
    folder = from_disk(tmp_path, details)
    log(folder, text)
    (result,) = run(folder, direct_io_as_asked)
    assert result.decision == decision
    assert seen in result.seen


def test_direct_io_does_not_decide_where_nothing_is_read_from_disk(tmp_path: Path) -> None:
    folder = trial(tmp_path, "native-host-fs")  # first_hit: host
    log(folder, REFUSED_LINE)
    (result,) = run(folder, direct_io_as_asked)
    assert result.decision == "not-checked"
    assert result.seen.startswith("no pass was served from disk; page cache")


def test_direct_io_decides_where_evictions_had_the_disk_serve(tmp_path: Path) -> None:
    """Hits are to come from host memory, but some were on disk only."""

    def evicted(rows: Rows) -> None:
        name, since = "vllm:prompt_tokens_cached_by_source_total", "repeat/warm/2:end"
        shift(rows, name, -BLOCK, since=since, source="host")
        shift(rows, name, BLOCK, since=since, source="disk")

    folder = trial(tmp_path, "native-host-fs", edit_counters=evicted)  # first_hit: host
    log(folder, REFUSED_LINE)
    (result,) = run(folder, direct_io_as_asked)
    assert result.decision == "fail"


def test_a_key_that_is_ignored_is_named(tmp_path: Path) -> None:
    plain, asked = (
        trial(tmp_path, "lmcache-mp"),
        trial(
            tmp_path,
            "lmcache-mp",
            repeat=1,
            setup_config={"server_args": {"l2-adapter": '{"type":"fs","base_path":"/d","use_odirect":true}'}},
        ),
    )
    assert run(plain, direct_io_as_asked)[0].seen == "this setup has no tier on disk"
    (result,) = run(asked, direct_io_as_asked)
    assert result.decision == "not-checked"
    assert "LMCache accepts and ignores" in result.seen


def test_what_lies_in_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "k").mkdir()
    path = tmp_path / "k" / "block.bin"
    path.write_bytes(b"x" * (1 << 20))
    assert cached_bytes(path) == 1 << 20
    (tmp_path / "config.json").write_text("{}")
    state = disk_state(tmp_path)
    assert (state["files"], state["bytes"], state["cached_bytes"]) == (1, 1 << 20, 1 << 20)
    assert state["filesystem"]
    with pytest.raises(OSError, match="No such file"):
        cached_bytes(tmp_path / "gone")
    empty = disk_state(tmp_path / "nowhere")
    assert (empty["files"], empty["cached_bytes"]) == (0, None)


# The tables, the figure and the report


def judged(root: Path, folders: list[Path]) -> tables.Tables:
    for folder in folders:
        verdict = judge_trial(folder)
        (folder / "verdict.json").write_text(verdict.model_dump_json(by_alias=True), encoding="utf-8")
        assert Verdict.model_validate_json((folder / "verdict.json").read_bytes()) == verdict
    return tables.build(folders, root / "tables", baseline="plain")


def rows(built: tables.Tables, **where: Any) -> list[dict[str, Any]]:
    return built.limits.filter(*[pl.col(name) == value for name, value in where.items()]).to_dicts()


def test_a_table_of_rates_and_percents(tmp_path: Path) -> None:
    measured(tmp_path, host_memcpy=5e9)
    folders = [
        trial(tmp_path, setup, repeat=repeat) for setup in ("plain", "native-host", "lmcache-mp") for repeat in (0, 1)
    ]
    built = judged(tmp_path, folders)
    assert set(built.limits["setup"]) == {"native-host", "lmcache-mp"}
    (engine,) = rows(
        built, setup="native-host", workload="repeat", basis="engine", direction="load", **{"pass": "warm"}
    )
    assert (engine["n"], engine["link"], engine["note"]) == (2, "host_memcpy", None)
    assert engine["gb_per_s"] == pytest.approx(4.0)
    assert engine["percent"] == pytest.approx(80.0)
    best = shown(built.limits).filter(pl.col("workload") == "repeat").sort("setup", "pass").to_dicts()
    assert [(row["setup"], row["pass"], row["direction"], row["basis"]) for row in best] == [
        ("lmcache-mp", "first-hit", "load", "ttft"),
        ("lmcache-mp", "warm", "load", "ttft"),
        ("native-host", "cold", "store", "engine"),
        ("native-host", "first-hit", "load", "engine"),
        ("native-host", "warm", "load", "engine"),
    ]
    assert built.rooflines["max_gb_per_s"].to_list() == [5.0]
    assert built.rooflines["host_id"].to_list() == ["host-a"]
    texts = {text.get_text() for axis in percent_of_roofline.draw(built).axes for text in axis.texts}
    assert "80 %" in texts
    assert any(text.startswith("≥ ") for text in texts)


def test_the_figure_has_workloads_of_two_engines_and_no_sweeps(tmp_path: Path) -> None:
    measured(tmp_path, host_memcpy=5e9)
    built = judged(tmp_path, [trial(tmp_path)])
    shared = frame("sharing", [{"suite": "main", "workload": name} for name in ("repeat", "burst")])
    of_two = Tables(**{**vars(built), "sharing": shared})
    assert percent_of_roofline.applies(of_two) and len(percent_of_roofline.draw(of_two).axes) == 2
    # Where all rates are in the table alone, there is no figure that says that there are none.
    for change in (
        pl.col("workload") + CELL + "1",
        pl.lit("mixed").alias("pass"),
    ):
        assert not percent_of_roofline.applies(Tables(**{**vars(built), "limits": built.limits.with_columns(change)}))
    none = Tables(**{**vars(built), "limits": built.limits.with_columns(percent=pl.lit(None, pl.Float64))})
    assert percent_of_roofline.applies(none), "the figure says so"


def test_no_rate_above_its_roofline_is_in_the_table(tmp_path: Path) -> None:
    # The claims are 4 GB/s. Within the tolerance it is the roofline that is shown.
    measured(tmp_path, host_memcpy=3.9e9)
    folder = trial(tmp_path)
    for row in rows(judged(tmp_path, [folder]), basis="engine"):
        assert (row["gb_per_s"], row["percent"]) == (pytest.approx(3.9), pytest.approx(100.0))
        assert "at its roofline" in row["note"]
    # Beyond it the trial is invalid, and the table says only that something was refused.
    measured(tmp_path, host_memcpy=3e9)
    built = judged(tmp_path, [folder])
    assert built.trials["status"].to_list() == ["invalid"]
    assert {(row["gb_per_s"], row["percent"], row["note"]) for row in rows(built)} == {(None, None, REFUSED)}
    # And where the gate couldn't decide, because nobody knows the rooflines' host.
    (tmp_path / "demo" / "rooflines" / "host-a.json").unlink()
    measured(tmp_path, None, host_memcpy=3e9)
    built = judged(tmp_path, [folder])
    assert built.trials["status"].to_list() == ["valid"]
    for row in rows(built, basis="engine"):
        assert (row["gb_per_s"], row["percent"]) == (None, None)
        assert row["note"].startswith(REFUSED)
        assert "don't say of which host" in row["note"]
    assert all(row["gb_per_s"] <= 3.0 for row in rows(built) if row["gb_per_s"] is not None)


def test_the_table_has_a_pools_transfer_engine_beside_its_link(tmp_path: Path) -> None:
    measured(tmp_path, tcp_loopback=2e9, transfer_engine_read=0.5e9, transfer_engine_write=1.25e9)
    folder = trial(tmp_path, "mooncake-store")
    log(folder, NETWORK)
    built = judged(tmp_path, [folder])
    seen = {
        (row["direction"], row["link"]): (row["percent"], row["note"])
        for row in rows(built, workload="repeat", basis="engine")
    }
    assert seen == {
        ("load", "tcp_loopback"): (pytest.approx(50), None),
        ("load", "transfer_engine_read"): (None, BEYOND),
        ("store", "tcp_loopback"): (pytest.approx(50), None),
        ("store", "transfer_engine_write"): (pytest.approx(80), None),
    }


def test_what_is_no_limit_lowers_no_rate(tmp_path: Path) -> None:
    # The claims are 1 GB/s: above the transfer engine by less than a roofline's own noise.
    measured(tmp_path, tcp_loopback=2e9, transfer_engine_read=0.98e9, transfer_engine_write=0.98e9)
    folder = trial(tmp_path, "mooncake-store")
    log(folder, NETWORK)
    found = rows(judged(tmp_path, [folder]), workload="repeat", basis="engine")
    assert {(row["link"], row["gb_per_s"], row["note"]) for row in found} == {
        ("tcp_loopback", 1.0, None),
        ("transfer_engine_read", None, BEYOND),
        ("transfer_engine_write", None, BEYOND),
    }


def test_a_rate_above_its_link_is_not_shown_beside_another_one(tmp_path: Path) -> None:
    measured(tmp_path, None, tcp_loopback=0.5e9, transfer_engine_read=2e9, transfer_engine_write=2e9)
    folder = trial(tmp_path, "mooncake-store")
    log(folder, NETWORK)
    built = judged(tmp_path, [folder])
    assert built.trials["status"].to_list() == ["valid"], "nobody knows the rooflines' host"
    found = rows(built, basis="engine")
    assert found and {(row["link"], row["gb_per_s"]) for row in found} == {("tcp_loopback", None)}
    assert all(row["note"].startswith(REFUSED) for row in found)


class Labelled:
    """A setup as far as the section reads one."""

    def __init__(self, label: str) -> None:
        self.name = self.label = label


def test_the_reports_section(tmp_path: Path) -> None:
    measured(tmp_path, "host-b", host_memcpy=5e9)
    built = judged(tmp_path, [trial(tmp_path), trial(tmp_path, "lmcache-mp")])
    setups = {name: Labelled(name) for name in ("native-host", "lmcache-mp")}
    seen = section(built, setups)
    assert [(row["workload"], row["setup"].label) for row in seen["rows"]] == [
        (workload, name) for workload in ("repeat", "burst") for name in setups
    ]
    assert [cell["rate"] for cell in seen["rows"][0]["cells"]] == ["4.00"] * 3
    assert {cell["percent"] for cell in seen["rows"][0]["cells"]} == {"no roofline"}
    ((note, those),) = seen["notes"]
    assert "none was measured on this host" in note
    assert those == ["native-host", "lmcache-mp"]
    (roofline,) = seen["rooflines"]
    assert (roofline["link"], roofline["fastest"], roofline["host"]) == ("memory copy", "5.00", "host-b")


def test_every_setup_of_the_factory_has_claims_or_none(tmp_path: Path) -> None:
    measured(tmp_path, **FAST)
    check: Callable[[str], bool] = lambda setup: bool(below_the_limit.claims(Evidence.load(trial(tmp_path, setup))))  # noqa: E731
    assert {setup for setup in FAMILIES if check(setup)} == set(FAMILIES) - {"plain", "prefix-cache"}
