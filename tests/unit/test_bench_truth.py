"""Bias, gap errors, concurrency and goals, from logs whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import polars as pl
import pytest
from bench_factory import cell

from kvladder.bench import tables
from kvladder.bench.cell import _write_requests, assign
from kvladder.bench.clients.base import Observation
from kvladder.bench.server import Served
from kvladder.bench.truth import Pair, gap_errors, held, pair, ttft_bias
from kvladder.bench.usage import cpu_between
from kvladder.config.base import Strict
from kvladder.config.bench import BenchConfig, BenchGoals, CellRecord, Fault, UsageSample, plan
from kvladder.config.records import HostRecord
from kvladder.config.sources import read_bench
from kvladder.config.yaml import ConfigError

ROOT = Path(__file__).parents[2]
MS = 1_000_000
TTFT, ITL = 50 * MS, 10 * MS
FILES = [*(f"{name}.{kind}" for name in ("cells", "goals", "machines") for kind in ("parquet", "csv")), "summary.md"]
HOST = HostRecord(host_id="h", cpu="c", cores=2, memory_bytes=1, kernel="k")


def served(number: int, arrival: int, tokens: int = 4, late: int = 0, **changes: Any) -> Served:
    """A request that came at ``arrival`` and was answered on schedule, ``late`` behind it."""
    due = arrival + TTFT
    writes = [due + k * ITL + late for k in range(tokens)]
    fields: dict[str, Any] = {
        "number": number,
        "connection": number % 2,
        "request_id": f"id-{number}",
        "bytes": 6000,
        "state": "complete",
        "arrival_ns": arrival,
        "first_read_ns": arrival,
        "last_read_ns": arrival,
        "due_ns": due,
        "end_ns": writes[-1],
        "tokens": tokens,
        "write_ns": writes,
        "written_ns": [at + 4000 for at in writes],
    }
    return Served(**fields | changes)


def seen(request: Served, bias: int, gap_error: int = 0, **names: Any) -> Observation:
    """What a client says that is off by ``bias`` at the first token and by ``gap_error`` at each gap."""
    truth = request.write_ns[0] - request.arrival_ns
    gaps = [later - earlier + gap_error for earlier, later in zip(request.write_ns, request.write_ns[1:], strict=False)]
    return Observation(ok=True, ttft_ns=truth + bias, gaps_ns=gaps, **names or {"number": request.number})


def bias_of(one: Pair) -> int | None:
    return None if one.seen is None else ttft_bias(one.seen.ttft_ns, one.served.arrival_ns, one.served.write_ns)


def errors_of(one: Pair) -> list[int] | None:
    return None if one.seen is None else gap_errors(one.seen.gaps_ns, one.served.write_ns)


def test_bias_is_what_the_client_adds_whatever_the_server_did() -> None:
    """A server that answers 7 ms late is no client's fault; one that reads late isn't either."""
    request = served(3, arrival=1000, late=7 * MS, first_read_ns=1000 + 2 * MS)
    (one,) = pair([request], [seen(request, bias=300_000, gap_error=-5)])
    assert bias_of(one) == 300_000
    assert errors_of(one) == [-5, -5, -5]


def test_pairs_by_number_or_by_request_id_in_order_of_arrival() -> None:
    log = [served(0, 5000), served(1, 3000), served(2, 9000)]
    words = [seen(log[2], 3, request_id="id-2"), seen(log[1], 2), seen(log[0], 1, request_id="id-0", number=None)]
    pairs = pair(log, words)
    assert [(p.served.number, bias_of(p)) for p in pairs] == [(1, 2), (0, 1), (2, 3)]


def test_what_has_no_name_stays_unpaired_and_unknown() -> None:
    log = [served(0, 0), served(1, 1)]
    failed = Observation(ok=False, ttft_ns=None, gaps_ns=[])
    stranger = Observation(ok=True, ttft_ns=5, gaps_ns=[], request_id="never sent")
    pairs = pair(log, [failed, stranger, seen(log[1], 4)])
    assert pairs[0].seen is None
    assert [bias_of(p) for p in pairs] == [None, 4]


@pytest.mark.parametrize(("numbers", "message"), [((0, 0), "request 0 twice"), ((0, 9), "request 9 that the server")])
def test_pairing_is_exact_or_refused(numbers: tuple[int, ...], message: str) -> None:
    words = [Observation(ok=True, ttft_ns=1, gaps_ns=[], number=number) for number in numbers]
    with pytest.raises(ValueError, match=message):
        pair([served(0, 0), served(1, 1)], words)


def test_gaps_of_another_number_of_chunks_are_unknown() -> None:
    request = served(0, 0)
    merged = Observation(ok=True, ttft_ns=TTFT, gaps_ns=[2 * ITL, ITL], number=0)
    silent = Observation(ok=True, ttft_ns=TTFT, gaps_ns=None, number=0)
    for word in (merged, silent):
        (one,) = pair([request], [word])
        assert bias_of(one) == 0
        assert errors_of(one) is None


def test_what_was_never_written_has_no_bias() -> None:
    assert ttft_bias(5, 0, []) is None
    assert ttft_bias(None, 0, [7]) is None
    assert gap_errors([], []) == gap_errors([], [7]) == []


def test_concurrency_held() -> None:
    """Two slots, one of which stands empty for a tenth of each turn."""
    arrivals = [0, 0, 100, 110, 200, 220]
    ends = [100, 100, 200, 210, 300, 320]
    # From 0, when the second slot is filled, to 220: 100 + 100, 100 + 100, 20 + 0.
    assert held(arrivals, ends, 2) == pytest.approx((200 + 200 + 20) / 220)
    assert held(arrivals[:2], ends[:2], 2) is None
    assert held([0, 0, 0], [5, 5, 5], 2) is None


def test_cpu_between_samples() -> None:
    samples = [UsageSample(t_ns=t, cpu_ns=cpu, rss_bytes=1) for t, cpu in ((0, 0), (100, 10), (200, 110))]
    assert cpu_between(samples, 50, 150) == pytest.approx((60 - 5) / 1e9)
    assert cpu_between(samples, 50, 201) is None
    assert cpu_between([], 0, 1) is None


def test_cores() -> None:
    assert assign([3, 5, 8], 1) == ([3], [5])
    assert assign([3, 5, 8], 2) == ([3], [5, 8])
    assert assign([0, 1], 2) == ([0], [0, 1])
    with pytest.raises(ValueError, match="3 cores, and there are 2"):
        assign([0, 1], 3)


def config(**block: Any) -> BenchConfig:
    return BenchConfig.model_validate(
        {"experiment": "x", "blocks": [{"clients": ["kvladder", "vllm"], "concurrency": [1, 16]} | block]}
    )


def test_plan() -> None:
    cells = plan(config(faults=["none", "stall"]).model_copy(update={"repeats": 2}))
    assert len(cells) == 16
    assert [cell.repeat for cell in cells] == [0] * 8 + [1] * 8
    assert {cell.requests for cell in cells} == {513, 528}
    assert len({cell.folder for cell in cells}) == 16
    again = plan(config(faults=["stall", "none"]))
    assert {cell.folder for cell in again} == {cell.folder for cell in cells if cell.repeat == 0}
    twice = config()
    assert len(plan(twice.model_copy(update={"blocks": twice.blocks * 2}))) == 4


def test_the_published_bench_covers_what_the_goals_are_about() -> None:
    cells = plan(read_bench([ROOT / "config" / "client-truth.yaml"]))
    own = [cell for cell in cells if cell.client == "kvladder" and cell.cores == 1]
    points = {(cell.prompt_tokens, cell.concurrency) for cell in own if cell.kind == "schedule"}
    assert points >= {(tokens, slots) for tokens in (1000, 40_000) for slots in (1, 16, 64, 256, 512)}
    assert any(cell.kind == "rate" for cell in own)
    # A 99th percentile needs 500 requests beyond the first wave.
    assert all(cell.requests - cell.concurrency >= 500 for cell in own if cell.kind in ("schedule", "rate"))
    assert {cell.fault for cell in own} == set(get_args(Fault))
    for client in ("vllm", "aiperf", "guidellm"):
        theirs = [cell for cell in cells if cell.client == client]
        assert {cell.cores for cell in theirs} == {1, 2}
        assert {cell.concurrency for cell in theirs if cell.kind == "schedule"} == {1, 16, 64, 256, 512}


def test_points_are_at_least_one() -> None:
    for name in ("concurrency", "cores", "prompt_tokens"):
        with pytest.raises(ValueError, match=f"blocks.0.{name}.0"):
            config(**{name: [0]})


def test_another_definition_is_another_folder() -> None:
    base = plan(config())[0]
    for name, value in (("ttft_ms", 51.0), ("requests", 99), ("seed", 2), ("cores", 2), ("timeout_s", 3.0)):
        assert base.model_copy(update={name: value}).folder != base.folder
    assert base.model_copy(update={"repeat": 1}).folder.parent == base.folder.parent


def test_config_that_can_not_be_used(tmp_path: Path) -> None:
    path = tmp_path / "bench.yaml"
    path.write_text("experiment: x\nblocks: [{clients: [ab], concurrency: [1]}]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"blocks\.0\.clients\.0.*'ab'"):
        read_bench([path])
    assert read_bench([path], ["blocks=[{clients: [vllm], concurrency: [1]}]"]).blocks[0].clients == ["vllm"]


def write_cell(root: Path, client: str, bias: int, **changes: Any) -> Path:
    """A cell of 600 requests, 16 in flight: its first wave is off by 1.5 ms more than the rest."""
    point = {name: changes.pop(name) for name in ("concurrency", "fault") if name in changes}
    measured = cell(client=client, **point)
    turn = TTFT + 3 * ITL
    log = [served(i, (i // 16) * turn + i % 16, late=2 * MS if i % 2 else 0) for i in range(600)]
    words = [
        seen(r, bias + (1_500_000 if r.number < 16 else 0), 20_000, number=r.number, send_ns=r.arrival_ns - 10_000)
        for r in log
    ]
    folder = root / measured.folder
    folder.mkdir(parents=True)
    _write_requests(folder / "requests.parquet", pair(log, words))
    record = CellRecord(
        cell=measured,
        client_version="1",
        host=HOST,
        server_cores=[0],
        client_cores=[1],
        server_cpu_s=0.5,
        shared_core=False,
        start_ns=0,
        wall_s=1,
        exit_code=0,
        error=None,
        cpu_s=1,
        peak_rss_bytes=50_000_000,
        samples=[UsageSample(t_ns=t, cpu_ns=t // 10, rss_bytes=1) for t in (-1000, 10**12)],
        client_ok=600,
        client_failed=0,
    )
    record = record.model_copy(update=changes)
    assert isinstance(record, Strict)
    (folder / "cell.json").write_text(record.model_dump_json(by_alias=True), encoding="utf-8")
    return folder


def test_a_row_says_what_the_cell_holds(tmp_path: Path) -> None:
    row = tables.read_cell(write_cell(tmp_path, "vllm", bias=250_000))
    assert set(tables.CELLS) >= set(row)
    for name, value in {
        "kind": "schedule",
        "served": 600,
        "paired": 600,
        "ttft_bias_p50_ms": 0.25,
        "ttft_bias_p99_ms": 0.25,
        "ttft_bias_max_ms": 0.25,
        "ttft_bias_all_p99_ms": 1.75,
        "first_wave_bias_max_ms": 1.75,
        "send_lead_p50_ms": 0.01,
        "gaps": 1800,
        "gap_error_p99_ms": 0.02,
        "longest_gap_written_ms": 10.0,
        "longest_gap_seen_ms": 10.02,
        "server_jitter_p50_ms": 1.0,
        "server_jitter_max_ms": 2.0,
        "server_write_p99_ms": 0.004,
        "peak_rss_mb": 50.0,
        "extra_mb_per_1000": None,
        "stopped": False,
    }.items():
        assert row[name] == (value if value is None else pytest.approx(value)), name
    span_s = (37 * (TTFT + 3 * ITL) + 7 + TTFT + 3 * ITL + 2 * MS) / 1e9
    assert row["rate_per_s"] == pytest.approx(600 / span_s, rel=1e-6)
    assert row["cpu_s_per_1000"] == pytest.approx(0.1 * span_s / 0.6, rel=1e-6)
    assert 0.9 < row["held_share"] <= 1.03


def test_goals_are_met_missed_or_not_checked(tmp_path: Path) -> None:
    own = tables.read_cell(write_cell(tmp_path, "kvladder", 250_000, pass_cpu_s=0.3, extra_rss_bytes=60_000_000))
    judged = {goal["goal"]: goal for goal in tables.judge([own], BenchGoals())}
    met = {name: goal["met"] for name, goal in judged.items()}
    assert met == {
        "TTFT bias, p50, ms": True,
        "TTFT bias, p99, up to 256 in flight, ms": True,
        "TTFT bias, p99, above 256 in flight, ms": None,
        "TTFT bias, p99, first wave included, ms": True,
        "gap error, p99, ms": True,
        "concurrency held, share": own["held_share"] >= 0.98,
        "CPU seconds per 1,000 requests": False,  # 0.3 s for 600
        "MB beyond the payload per 1,000 requests": False,
        "requests a second without delay": None,
    }
    assert judged["CPU seconds per 1,000 requests"]["worst"] == pytest.approx(0.5)
    assert judged["TTFT bias, p50, ms"]["where"] == "16 in flight, 1,000 ids"
    # A cell that can't be judged leaves a kept limit open, and a broken one broken.
    unknown = own | {"ttft_bias_p50_ms": None, "cpu_s_per_1000": None}
    both = {goal["goal"]: goal["met"] for goal in tables.judge([own, unknown], BenchGoals())}
    assert both["TTFT bias, p50, ms"] is None
    assert both["CPU seconds per 1,000 requests"] is False


def test_the_worst_cell_decides_and_peers_do_not(tmp_path: Path) -> None:
    rows = [tables.read_cell(write_cell(tmp_path, "kvladder", bias)) for bias in (100_000,)]
    rows += [tables.read_cell(write_cell(tmp_path / "b", "kvladder", 900_000, concurrency=64))]
    rows += [tables.read_cell(write_cell(tmp_path, "vllm", 9_000_000))]
    first = tables.judge(rows, BenchGoals())[0]
    assert (first["met"], first["worst"], first["where"]) == (False, pytest.approx(0.9), "64 in flight, 1,000 ids")
    early = tables.judge([rows[0] | {"ttft_bias_p50_ms": -0.4}, rows[0]], BenchGoals())[0]
    assert (early["met"], early["worst"]) == (False, -0.4)


def test_a_better_peer_is_named(tmp_path: Path) -> None:
    own = tables.read_cell(write_cell(tmp_path, "kvladder", 250_000))
    peer = tables.read_cell(write_cell(tmp_path, "aiperf", -100_000, peak_rss_bytes=900_000_000))
    compared = {each.column: each for each in tables.comparisons([own, peer])}
    assert compared["ttft_bias_p50_ms"].better and not compared["peak_rss_mb"].better
    assert "rate_per_s" not in compared  # on a schedule it is the server's
    text = tables.summary([own, peer], [])
    assert "- aiperf, 16 in flight, 1,000 ids: median TTFT bias -0.1 against 0.25" in text
    worse = tables.read_cell(write_cell(tmp_path, "guidellm", -300_000))
    assert not any(each.better for each in tables.comparisons([own, worse]) if "ttft" in each.column)


def test_tables_are_built_from_raw_files_alone(tmp_path: Path) -> None:
    folders = [write_cell(tmp_path, "kvladder", 100_000), write_cell(tmp_path, "vllm", 200_000)]
    folders += [write_cell(tmp_path, "vllm", 0, fault="endless", exit_code=None, client_ok=None, client_failed=None)]
    for out in ("one", "two"):
        tables.build(folders[:: 1 if out == "one" else -1], BenchGoals(), tmp_path / out)
    for name in FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    cells = pl.read_parquet(tmp_path / "one" / "cells.parquet")
    assert dict(cells.schema) == {
        name: kind() if isinstance(kind, type) else kind for name, kind in tables.CELLS.items()
    }
    assert cells["client"].to_list() == ["kvladder", "vllm", "vllm"]
    loaded = tables.load(tmp_path / "one")
    assert loaded.machines.rows() == [("h", "c", 2, 1, "k", 3)]
    assert loaded.goals.filter(pl.col("column") == "ttft_bias_p99_ms").select("above", "up_to", "cells").rows() == [
        (None, 256, 1),
        (256, None, 0),
    ]
    text = (tmp_path / "one" / "summary.md").read_text(encoding="utf-8")
    assert "| endless | vllm 1 | no result |" in text and "stopped after 1 s" in text
    assert "| TTFT bias, p50, ms | 0.3 | 0.1 | 16 in flight, 1,000 ids | met |" in text


def test_records_carry_their_version(tmp_path: Path) -> None:
    folder = write_cell(tmp_path, "vllm", 0)
    assert json.loads((folder / "cell.json").read_text(encoding="utf-8"))["schema"] == 1
