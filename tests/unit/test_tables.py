"""Tables from hand-made raw trials with known answers."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from table_factory import DEMO, judge, write_judged
from trial_factory import Family, Load, write_trial

from kvladder import tables
from kvladder.plan.digest import PACKAGE
from kvladder.tables.labels import setup_order, short_labels, workload_order
from kvladder.tables.model import SCHEMAS, frame

S = 1_000_000_000
MS = 1_000_000


def one(table: pl.DataFrame, **where: Any) -> dict[str, Any]:
    rows = table.filter(*[pl.col(column) == value for column, value in where.items()])
    assert rows.height == 1, rows
    return rows.row(0, named=True)


def write_by_hand(root: Path) -> Path:
    """A trial whose cold burst has two requests with times that are easy to add up."""

    def requests(rows: list[dict[str, Any]]) -> None:
        cold = [row for row in rows if row["pass"] == "cold"]
        for row, first, chunks in zip(cold, (500 * MS, 1500 * MS), ([0, 10, 30], [0, 20, 40]), strict=True):
            send = 100 * S
            times = [send + first + step * MS for step in chunks]
            row.update(eligible_ns=send - 2 * MS, send_ns=send, first_token_ns=times[0], end_ns=times[-1] + MS)
            row.update(chunk_ns=times, chunk_tokens=[1, 1, 2], output_tokens=4, usage_cached_tokens=None)

    def trial(data: dict[str, Any]) -> None:
        part = data["passes"][0]
        part.update(start_ns=100 * S, end_ns=102 * S, durable_ns=250 * MS)
        # Both in flight for 1 s, one of two eligible for 0.5 s, then one left for 0.5 s: held (2+0.5+0.5)/(2+1+0.5).
        part["in_flight"] = [(100 * S, 2, 2), (101 * S, 1, 2), (101 * S + 500 * MS, 1, 1)]

    load = {"burst": Load(requests=2, concurrency=2, output_tokens=3, warm_rounds=1)}
    folder = write_trial(root, setup="native-host", suite="s", workloads=load, edit_requests=requests, edit_trial=trial)
    judge(folder)
    return folder


def test_a_pass_by_hand(tmp_path: Path) -> None:
    built = tables.build([write_by_hand(tmp_path)], tmp_path / "out", baseline="plain")
    row = one(built.passes, **{"pass": "cold"})
    assert row["wall_s"] == 2.0
    assert (row["ttft_median_s"], row["ttft_min_s"], row["ttft_max_s"], row["ttft_mean_s"]) == (1.0, 0.5, 1.5, 1.0)
    assert (row["ttft_n"], row["ttft_p90_s"], row["ttft_p99_s"]) == (2, None, None)
    assert (row["output_tokens"], row["output_tokens_per_s"]) == (8, 4.0)
    assert row["in_flight_held"] == pytest.approx(3.0 / 3.5)
    assert (row["in_flight_max"], row["durable_s"]) == (2, 0.25)
    # Stored: 23 blocks of 128 tokens of 24,576 bytes, twice, at 4 bytes a nanosecond; nothing loaded: no rate, not 0.
    assert (row["stored_bytes"], row["store_gb_per_s"]) == (2 * 2944 * 24576, 4.0)
    assert (row["loaded_bytes"], row["load_gb_per_s"]) == (0, None)
    assert (row["tokens_computed"], row["tokens_cpu"], row["tokens_remote"]) == (6000, 0, 0)
    hit = one(built.passes, **{"pass": "first-hit"})
    assert (hit["tokens_cpu"], hit["tokens_computed"], hit["load_gb_per_s"]) == (2 * 2944, 2 * 56, 4.0)


def test_a_request_by_hand(tmp_path: Path) -> None:
    built = tables.build([write_by_hand(tmp_path)], tmp_path / "out", baseline="plain")
    row = one(built.requests.collect(), **{"pass": "cold", "index": 0})
    assert (row["queue_s"], row["ttft_s"], row["e2e_s"]) == (0.002, 0.5, 0.531)
    assert (row["itl_median_s"], row["itl_max_s"]) == (pytest.approx(0.015), 0.02)
    assert row["tpot_s"] == pytest.approx(0.03 / 3)  # 30 ms for the three tokens after the first
    assert (row["cached_tokens"], row["error"], row["anomalies"]) == (None, None, None)


def test_no_first_token_is_unknown_and_not_zero(tmp_path: Path) -> None:
    def edit(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row.update(first_token_ns=None, chunk_ns=[], chunk_tokens=[], anomalies=["no chunk carried a token"])

    folder = write_trial(tmp_path, edit_requests=edit)
    judge(folder)
    built = tables.build([folder], tmp_path / "out", baseline="plain")
    requests = built.requests.collect()
    assert requests["ttft_s"].null_count() == requests["tpot_s"].null_count() == requests.height > 0
    assert built.passes["ttft_median_s"].null_count() == built.passes.height
    assert built.summary.filter(pl.col("metric") == "ttft_s").height == 0
    assert set(requests["anomalies"]) == {"no chunk carried a token"}


def test_the_summary_pairs_in_block(tmp_path: Path) -> None:
    """Three blocks; the tier's TTFT is an exact share of the baseline's in each."""
    shares = {"plain": (4.0, 2.0, 8.0), "native-host": (1.0, 1.0, 1.0)}

    folders = []
    for setup, values in shares.items():
        for repeat, value in enumerate(values):

            def edit(rows: list[dict[str, Any]], value: float = value) -> None:
                for row in rows:
                    row["first_token_ns"] = row["send_ns"] + int(value * S)

            folder = write_trial(tmp_path, setup=setup, repeat=repeat, edit_requests=edit)
            judge(folder)
            folders.append(folder)
    built = tables.build(folders, tmp_path / "out", baseline="plain")
    row = one(built.summary, setup="native-host", workload="repeat", metric="ttft_s", **{"pass": "cold"})
    assert (row["n"], row["blocks"], row["median"], row["min"], row["max"]) == (3, 3, 1.0, 1.0, 1.0)
    # Ratios 1/4, 1/2, 1/8: the median of ratios is not the ratio of medians with every sample.
    assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == (0.25, 0.125, 0.5)
    # All three lie below 1, but near to it for a range that wide: by chance that is nothing unusual.
    assert (row["interval"], row["difference"], row["within_noise"]) == ("range", "no difference seen", True)
    assert row["mde"] is None
    base = one(built.summary, setup="plain", workload="repeat", metric="ttft_s", **{"pass": "cold"})
    assert (base["median"], base["ratio"], base["interval"]) == (4.0, None, None)


def test_trials_of_two_hosts_are_no_block(tmp_path: Path) -> None:
    folders = [
        write_trial(tmp_path, setup=setup, repeat=repeat, host_id=host)
        for setup, repeat, host in (
            ("plain", 0, "a"),
            ("plain", 1, "a"),
            ("native-host", 0, "a"),
            ("native-host", 1, "b"),
        )
    ]
    for folder in folders:
        judge(folder)
    built = tables.build(folders, tmp_path / "out", baseline="plain")
    row = one(built.summary, setup="native-host", workload="repeat", metric="ttft_s", **{"pass": "warm"})
    assert (row["n"], row["blocks"], row["interval"]) == (2, 1, "not enough data")


def test_the_control_sets_the_noise_floor(tmp_path: Path) -> None:
    built = tables.build(write_judged(tmp_path), tmp_path / "out", baseline="plain")
    assert built.context["controls"] == ["plain-2"]
    control = one(built.summary, setup="plain-2", workload="repeat", metric="ttft_s", **{"pass": "warm"})
    other = one(built.summary, setup="native-host", workload="repeat", metric="ttft_s", **{"pass": "warm"})
    assert (other["noise_low"], other["noise_high"]) == (control["ratio_low"], control["ratio_high"])
    assert control["within_noise"] is True
    assert other["within_noise"] is False


def test_a_noisy_setup_that_is_there_twice_is_a_control_of_itself(tmp_path: Path) -> None:
    """10 % slower than the baseline in every block, but its repeat lies up to 25 % beside it."""
    shares = {"native-host": (1.10, 1.10, 1.11, 1.09, 1.10, 1.11), "native-host-2": (0.9, 1.3, 1.0, 1.4, 0.9, 1.2)}

    def cold_ns(setup: str, repeat: int) -> int:
        return int(3e9 * shares.get(setup, (1.0,) * 6)[repeat])

    def cold(*names: str) -> dict[str, Any]:
        setups = {name: DEMO.get(name, DEMO["native-host"]) for name in names}
        folders = write_judged(tmp_path / names[-1], setups, repeats=6, cold_ns=cold_ns)
        built = tables.build(folders, tmp_path / "out", baseline="plain")
        assert built.context["controls"] == []
        assert built.context["repeated"] == ([list(names[1:])] if len(names) > 2 else [])
        return one(built.summary, setup="native-host", workload="repeat", metric="ttft_s", **{"pass": "cold"})

    alone, beside = cold("plain", "native-host"), cold("plain", "native-host", "native-host-2")
    assert (alone["difference"], alone["noise_low"], alone["within_noise"]) == ("higher", None, None)
    assert (beside["difference"], beside["within_noise"]) == ("higher", True)
    assert beside["noise_low"] < 0.8 and beside["noise_high"] > 1.2
    assert beside["mde"] > 0.25
    assert alone["mde"] < 0.06


def test_invalid_and_failed_trials_are_named_and_leak_nowhere(tmp_path: Path) -> None:
    folders = write_judged(
        tmp_path,
        invalid=[("native-host", 0)],
        failed=[("lmcache-mp", 1)],
        # Were they counted, the medians would show it.
        cold_ns=lambda setup, repeat: 10**12 if (setup, repeat) in {("native-host", 0), ("lmcache-mp", 1)} else 10**9,
    )
    built = tables.build(folders, tmp_path / "out", baseline="plain")
    assert built.trials.height == len(folders)
    lost = built.trials.filter(pl.col("status") != "valid").sort("setup")
    assert lost.select("setup", "repeat", "status").rows() == [
        ("lmcache-mp", 1, "failed"),
        ("native-host", 0, "invalid"),
    ]
    assert lost["reason"].null_count() == 0
    for table in (built.passes, built.requests.collect(), built.metrics):
        assert not table.filter((pl.col("setup") == "native-host") & (pl.col("repeat") == 0)).height
        assert not table.filter((pl.col("setup") == "lmcache-mp") & (pl.col("repeat") == 1)).height
    assert built.summary.filter(pl.col("metric") == "ttft_s")["max"].max() < 10
    assert one(built.summary, setup="native-host", workload="repeat", metric="ttft_s", **{"pass": "cold"})["n"] == 2
    assert "fail" in set(built.gates["decision"])


def _cut(folder: Path) -> None:
    path = folder / "repeat.requests.jsonl"
    path.write_bytes(path.read_bytes()[:-40])


def _drop_line(folder: Path) -> None:
    path = folder / "repeat.requests.jsonl"
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")


def _foreign_verdict(folder: Path) -> None:
    path = folder / "verdict.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "run": "0" * 8}), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "status", "reason"),
    [
        (lambda folder: (folder / "trial.json").unlink(), "failed", "never finished"),
        (lambda folder: (folder / "trial.json").write_text("{", encoding="utf-8"), "failed", "can't be read"),
        (lambda folder: (folder / "trial.json").write_text('{"schema": 1}', encoding="utf-8"), "failed", "experiment"),
        (lambda folder: (folder / "verdict.json").unlink(), "invalid", "not judged"),
        (lambda folder: (folder / "verdict.json").write_text("[]", encoding="utf-8"), "invalid", "can't be read"),
        (_foreign_verdict, "invalid", "another trial"),
        (lambda folder: (folder / "repeat.requests.jsonl").unlink(), "failed", "repeat.requests.jsonl is missing"),
        (_cut, "failed", "repeat.requests.jsonl"),
        (_drop_line, "failed", "isn't what the trial wrote"),
    ],
)
def test_a_damaged_trial_is_not_counted(tmp_path: Path, damage: Any, status: str, reason: str) -> None:
    folders = [write_trial(tmp_path, setup="plain", repeat=repeat) for repeat in range(2)]
    for folder in folders:
        judge(folder)
    damage(folders[1])
    built = tables.build(folders, tmp_path / "out", baseline="plain")
    row = one(built.trials, repeat=1)
    assert (row["setup"], row["suite"], row["status"]) == ("plain", "demo", status)
    assert reason in row["reason"]
    assert set(built.passes["repeat"]) == {0}
    assert set(built.requests.collect()["repeat"]) == {0}


def test_two_runs_of_one_repeat_are_refused(tmp_path: Path) -> None:
    folders = [write_trial(tmp_path, run=run) for run in ("aaaaaaaa", "bbbbbbbb")]
    with pytest.raises(ValueError, match="aaaaaaaa and as bbbbbbbb"):
        tables.build(folders, tmp_path / "out", baseline="plain")


def test_no_trial_at_all_gives_empty_tables(tmp_path: Path) -> None:
    tables.build([], tmp_path / "out", baseline="plain")
    back = tables.load(tmp_path / "out")
    for name, schema in SCHEMAS.items():
        table: pl.DataFrame = getattr(back, name).lazy().collect()
        assert table.height == 0
        assert dict(table.schema) == schema


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    folders = write_judged(tmp_path / "a", repeats=2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    others = [tmp_path / "b" / folder.relative_to(tmp_path / "a") for folder in reversed(folders)]
    built = tables.build(folders, tmp_path / "one", baseline="plain")
    tables.build(others, tmp_path / "two", baseline="plain")
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    assert tables.load(tmp_path / "one").summary.equals(built.summary)
    assert len(digest(tmp_path / "one")) == 2 * len(SCHEMAS) + 1


def test_find_trials_sees_unfinished_ones(tmp_path: Path) -> None:
    folder = write_trial(tmp_path)
    (folder / "trial.json").unlink()
    assert tables.find_trials(tmp_path / "demo" / "trials") == [folder]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\t=1"])
def test_csv_cells_are_no_formulas(tmp_path: Path, text: str) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["reason"] = text
        data["startup_ns"] = -S  # a number may be negative; it stays one

    folder = write_trial(tmp_path, failed="x", edit_trial=edit)
    built = tables.build([folder], tmp_path / "out", baseline="plain")
    assert one(built.trials)["reason"] in (text, "the trial was not judged: it has no verdict.json")
    shown = pl.read_csv(tmp_path / "out" / "trials.csv")
    assert shown["reason"].item() == "'" + text
    assert shown["startup_s"].item() == -1.0


def test_unknown_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="parity: unknown columns"):
        frame("parity", [{"setup": "a", "colour": "red"}])


def test_parity_asked_and_measured(tmp_path: Path) -> None:
    built = tables.build(write_judged(tmp_path), tmp_path / "out", baseline="plain")
    pool = one(built.parity, setup="native-host", property="device KV pool")
    assert (pool["asked"], pool["measured"], pool["agrees"]) == ("40960", "40960", True)
    hit = one(built.parity, setup="lmcache-mp", property="hit of a prompt repeated in repeat")
    assert (hit["asked"], hit["measured"], hit["agrees"]) == ("2816", "2816", True)
    size = one(built.parity, setup="mooncake-store", property="remote tier")
    assert (size["measured"], size["agrees"]) == (None, None)


@pytest.mark.parametrize(("prompt_tokens", "hit"), [(3000, 2816), (3072, 3071)])
def test_parity_asks_what_the_setup_expects(tmp_path: Path, prompt_tokens: int, hit: int) -> None:
    """LMCache in the engine's process gives a prompt of whole chunks but for its last token."""
    config = {"kind": "lmcache-v1", "cpu_bytes": 1 << 30}
    workloads = {"repeat": Load(requests=2, prompt_tokens=prompt_tokens)}
    folder = write_trial(
        tmp_path, setup="lmcache-v1", family=Family("cpu", 256), setup_config=config, workloads=workloads
    )
    judge(folder)
    row = one(
        tables.build([folder], tmp_path / "out", baseline="plain").parity,
        property="hit of a prompt repeated in repeat",
    )
    assert row["asked"] == str(hit)


def test_the_pipeline_knows_every_table() -> None:
    text = (PACKAGE.parent / "rules" / "common.smk").read_text(encoding="utf-8")
    assert set(ast.literal_eval(text.split("TABLE_NAMES = ")[1].split("\n)")[0] + ")")) == set(SCHEMAS)


def test_parity_names_what_differs_between_trials(tmp_path: Path) -> None:
    folders = [
        write_trial(
            tmp_path, repeat=repeat, edit_trial=lambda data, pool=pool: data["effective"].update(kv_pool_tokens=pool)
        )
        for repeat, pool in enumerate((40_960, 20_480))
    ]
    for folder in folders:
        judge(folder)
    row = one(
        tables.build(folders, tmp_path / "out", baseline="plain").parity,
        setup="prefix-cache",
        property="device KV pool",
    )
    assert (row["measured"], row["agrees"]) == ("20480 / 40960", False)


def test_setups_are_ordered_and_workloads_run_order_is_kept(tmp_path: Path) -> None:
    built = tables.build(
        write_judged(tmp_path, invalid=[("lmcache-mp", repeat) for repeat in range(3)]),
        tmp_path / "out",
        baseline="plain",
    )
    assert setup_order(built) == [
        "plain", "plain-2", "prefix-cache", "native-host", "native-host-fs", "mooncake-store", "lmcache-mp",
    ]  # fmt: skip
    assert workload_order(built, built.passes) == [("demo", "repeat"), ("demo", "burst")]
    assert set(setup_order(built)) == set(DEMO)


def test_short_labels_are_short_and_unique() -> None:
    names = [f"{'n' * 86}{number:04d}" for number in range(200)] + ["plain", "x" * 21 + "a", "é" * 90]
    for width in (15, 22, 40):
        labels = short_labels(names, width)
        assert len(set(labels.values())) == len(names)
        assert max(map(len, labels.values())) <= width
    # The same ends, so that only a number tells them apart.
    twins = ["a" * 20 + middle + "b" * 20 for middle in "pqrstuvwxyz"]
    assert len(set(short_labels(twins, 12).values())) == len(twins)
    assert max(map(len, short_labels(twins, 12).values())) <= 12


@pytest.mark.parametrize(
    ("asked", "measured", "agrees"),
    [("0-1", 2, True), ("0-3,8", 5, True), ("0-3", 2, False), (None, 2, None), ("auto", None, None)],
)
def test_parity_of_threads_counts_the_cores_of_a_binding(
    tmp_path: Path, asked: str | None, measured: int | None, agrees: bool | None
) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["config"].setdefault("engine", {})["cpu_threads"] = asked
        data["effective"].setdefault("details", {})["threads"] = measured

    folder = write_trial(tmp_path, edit_trial=edit)
    judge(folder)
    row = one(tables.build([folder], tmp_path / "out", baseline="plain").parity, property="engine threads")
    assert row["agrees"] is agrees
    assert row["measured"] == (None if measured is None else str(measured))


def test_a_trial_that_never_started_does_not_hide_its_setups_tier(tmp_path: Path) -> None:
    folders = [
        write_trial(tmp_path, setup="prefix-cache", family=Family("gpu", 128), repeat=0),
        write_trial(
            tmp_path, setup="prefix-cache", repeat=1, failed="x", edit_trial=lambda data: data.update(expected={})
        ),
    ]
    judge(folders[0])
    judge(folders[1], "failed", "x")
    assert tables.build(folders, tmp_path / "out", baseline="plain").tiers() == {"prefix-cache": "gpu"}


def test_an_edited_file_does_not_come_in_under_its_old_verdict(tmp_path: Path) -> None:
    folders = [write_trial(tmp_path, setup="plain", repeat=repeat) for repeat in range(2)]
    for folder in folders:
        judge(folder)
    path = folders[1] / "repeat.requests.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["first_token_ns"] = row["send_ns"] + 1000
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    built = tables.build(folders, tmp_path / "out", baseline="plain")
    assert "isn't what the trial wrote" in one(built.trials, repeat=1)["reason"]
    assert set(built.requests.collect()["repeat"]) == {0}


def test_levels_of_concurrency_are_never_pooled(tmp_path: Path) -> None:
    def two_levels(data: dict[str, Any]) -> None:
        for part in data["passes"]:
            part["concurrency"] = 2 if part["round"] >= 2 else 1

    load = {"conc": Load(requests=2, concurrency=1, warm_rounds=2)}
    folder = write_trial(tmp_path, setup="plain", suite="s", workloads=load, edit_trial=two_levels)
    judge(folder)
    built = tables.build([folder], tmp_path / "out", baseline="plain")
    assert workload_order(built, built.passes) == [("s", "conc @ 1"), ("s", "conc @ 2")]
    assert [name for _, name in sorted(built.passes.select("round", "workload").iter_rows())] == [
        "conc @ 1",
        "conc @ 1",
        "conc @ 2",
        "conc @ 2",
    ]
    assert set(built.requests.filter(pl.col("round") == 2).collect()["workload"]) == {"conc @ 2"}
    assert set(built.summary["workload"]) == {"conc @ 1", "conc @ 2"}


def test_levels_are_ordered_as_numbers(tmp_path: Path) -> None:
    built = tables.build([write_by_hand(tmp_path)], tmp_path / "out", baseline="plain")
    names = pl.DataFrame({"suite": ["s"] * 3, "workload": ["burst @ 16", "burst @ 2", "burst @ 1"]})
    assert [name for _, name in workload_order(built, names)] == ["burst @ 1", "burst @ 2", "burst @ 16"]
    cells = ["burst @ 16 × 900 tokens", "burst @ 2 × 1000 tokens", "burst @ 2 × 900 tokens"]
    names = pl.DataFrame({"suite": ["s"] * 3, "workload": cells})
    assert [name for _, name in workload_order(built, names)] == [cells[2], cells[1], cells[0]]
