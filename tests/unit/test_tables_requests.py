"""What tables take of requests, against the same in plain Python, one request after the other."""

from __future__ import annotations

import hashlib
import json
import math
import random
import runpy
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from table_factory import SWEEPS, SWEPT, judge, write_judged
from trial_factory import Load, write_trial

from kvladder.config.records import Verdict
from kvladder.stats.samples import median, quantile
from kvladder.tables import columns
from kvladder.tables import requests as module
from kvladder.tables.build import build
from kvladder.tables.model import SCHEMAS

Rows = list[dict[str, Any]]
S = 1_000_000_000


def by_hand(folder: Path) -> Rows:
    """Rows of the table ``requests`` of one trial."""
    record = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    rows: Rows = []
    for path in sorted(folder.glob("*.requests.jsonl"), key=lambda path: path.name.removesuffix(".requests.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for line in sorted(lines, key=lambda line: (line["round"], line["index"])):
            rows.append({name: record[name] for name in ("setup", "suite", "repeat", "run")} | _row(line))
    return rows


def _row(line: dict[str, Any]) -> dict[str, Any]:
    copied = ("workload", "pass", "round", "index", "key", "status", "error")
    counted = ("prompt_tokens", "asked_tokens", "output_tokens")
    gaps = [later - earlier for earlier, later in zip(line["chunk_ns"], line["chunk_ns"][1:], strict=False)]
    tokens = line["output_tokens"]
    after_first = tokens - line["chunk_tokens"][0] if tokens is not None and line["chunk_tokens"] else 0
    decode = line["chunk_ns"][-1] - line["chunk_ns"][0] if line["chunk_ns"] else None

    def since(end: str, start: str) -> float | None:
        return None if None in (line[end], line[start]) else (line[end] - line[start]) / S

    return {name: line[name] for name in (*copied, *counted)} | {
        "cached_tokens": line["usage_cached_tokens"],
        "queue_s": since("send_ns", "eligible_ns"),
        "ttft_s": since("first_token_ns", "send_ns"),
        "itl_median_s": statistics.median(gaps) / S if gaps else None,
        "itl_max_s": max(gaps) / S if gaps else None,
        "tpot_s": decode / after_first / S if decode is not None and after_first > 0 else None,
        "e2e_s": since("end_ns", "send_ns"),
        "anomalies": "; ".join(line["anomalies"]) or None,
    }


def same(a: Any, b: Any) -> bool:
    """Equal; floats but for the last bit, because polars may multiply by 1/10⁹ where Python divides."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=4e-16)
    return bool(a == b)


def odd(rows: Rows) -> None:
    """All that a client may record, in a file whose lines are in no order."""
    rng = random.Random(0)
    nothing = {"first_token_ns": None, "chunk_ns": [], "chunk_tokens": [], "output_tokens": 0, "token_ids": []}
    kinds: list[dict[str, Any]] = [
        nothing | {"anomalies": ["no chunk carried a token", "no [DONE]"]},
        nothing | {"status": "failed", "error": "HTTP 500: “=1+1”", "send_ns": None, "end_ns": None},
        {"status": "failed", "error": "2 of 4 tokens", "output_tokens": 2},
        {"output_tokens": None, "chunk_tokens": [], "token_ids": None},
        {"usage_cached_tokens": 0},
        {"usage_cached_tokens": 128, "logprobs": [{"12": -0.5, "7": -1.0}]},
        {"output_tokens": 1, "chunk_tokens": [1]},
        {"key": "line\u2028separator ü"},
    ]
    for row in rows:
        row["send_ns"] += rng.randrange(1000)
        row["first_token_ns"] += rng.randrange(10**9)
        row["chunk_ns"] = [row["first_token_ns"] + rng.randrange(10**9) * step for step in range(rng.randrange(1, 6))]
        row["chunk_tokens"] = [rng.randrange(1, 4) for _ in row["chunk_ns"]]
        row["output_tokens"] = sum(row["chunk_tokens"])
        if rng.random() < 0.3:
            row.update(rng.choice(kinds))
    rng.shuffle(rows)


def trials(root: Path, edit: Callable[[Rows], None] | None = odd) -> list[Path]:
    """Two setups × two repeats, one of them with two workloads, judged valid."""
    short = 300  # tokens: replaying long prompts would take most of the time
    loads = {
        "zeta": Load(requests=7, concurrency=2, prompt_tokens=short),
        "burst": Load(requests=520, concurrency=64, prompt_tokens=short, warm_rounds=0),
    }
    folders = [
        write_trial(
            root,
            setup=setup,
            repeat=repeat,
            workloads=loads if repeat else {"burst": loads["burst"]},
            edit_requests=edit,
        )
        for setup in ("prefix-cache", "plain")
        for repeat in (1, 0)
    ]
    for folder in folders:
        judge(folder)
    return folders


def test_requests_are_what_the_files_say(tmp_path: Path) -> None:
    folders = trials(tmp_path)
    table = build(folders, tmp_path / "out", baseline="plain").requests.collect()
    expected = [row for folder in sorted(folders) for row in by_hand(folder)]
    assert table.schema == pl.Schema(SCHEMAS["requests"])
    assert table.height == len(expected)
    for row, wanted in zip(table.rows(named=True), expected, strict=True):
        assert row.keys() == wanted.keys()
        assert all(same(row[column], wanted[column]) for column in row), (row, wanted)
    # What is odd did come in.
    assert {"tpot_s", "ttft_s", "output_tokens"} <= {name for name in table.columns if table[name].null_count()}
    assert set(table["status"]) == {"ok", "failed"}
    assert pl.read_csv(tmp_path / "out" / "requests.csv").height == table.height


def test_passes_and_metrics_are_those_of_the_samples(tmp_path: Path) -> None:
    """Bit for bit what `kvladder.stats.samples` makes of the values."""
    folders = trials(tmp_path)
    built = build(folders, tmp_path / "out", baseline="plain")
    requests = built.requests.collect()
    key = ["setup", "suite", "repeat", "workload", "round"]
    for row in built.passes.iter_rows(named=True):
        here = requests.filter(pl.all_horizontal(pl.col(name) == row[name] for name in key))
        ok = here.filter(pl.col("status") == "ok")
        ttft = ok["ttft_s"].drop_nulls().to_list()
        total = 0.0
        for value in ttft:
            total += value
        assert row["ttft_n"] == len(ttft) > 0
        assert row["ttft_median_s"] == median(ttft)
        assert (row["ttft_min_s"], row["ttft_max_s"]) == (min(ttft), max(ttft))
        assert row["ttft_mean_s"] == total / len(ttft)
        assert (row["ttft_p90_s"], row["ttft_p99_s"]) == (quantile(ttft, 0.9), quantile(ttft, 0.99))
        known = None not in ok["output_tokens"].to_list()
        assert row["output_tokens"] == (sum(ok["output_tokens"].to_list()) if known else None)
        assert row["prompt_tokens_per_s"] == sum(ok["prompt_tokens"].to_list()) / row["wall_s"]
        assert row["prompt_length"] == 300
    assert built.passes.filter(pl.col("ttft_p90_s").is_null())["workload"].unique().to_list() == ["zeta"]
    pooled = (requests["status"] == "ok") & (requests["setup"] == "plain") & (requests["repeat"] == 1)
    warm = requests.filter(pooled & (requests["workload"] == "zeta") & (requests["pass"] == "warm"))
    assert warm["round"].n_unique() == 2
    values = dict(
        built.metrics.filter(
            (pl.col("setup") == "plain")
            & (pl.col("repeat") == 1)
            & (pl.col("workload") == "zeta")
            & (pl.col("pass") == "warm")
        )
        .select("metric", "value")
        .iter_rows()
    )
    for metric, column in {"ttft_s": "ttft_s", "itl_s": "itl_median_s", "tpot_s": "tpot_s", "e2e_s": "e2e_s"}.items():
        assert values[metric] == median(warm[column].to_list())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(("name", "value"), [("_BATCH_TRIALS", 1), ("_BATCH_BYTES", 1), ("_BATCH_TRIALS", 3)])
def test_tables_do_not_depend_on_how_files_are_batched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    folders = [*trials(tmp_path), *write_judged(tmp_path / "swept", SWEPT, suites=SWEEPS, repeats=1)]
    build(folders, tmp_path / "one", baseline="plain")
    monkeypatch.setattr(module, name, value)
    build(folders, tmp_path / "other", baseline="plain")
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


@pytest.mark.parametrize("which", [slice(None), slice(1, 3), slice(0, 4, 2)])
def test_tables_are_the_same_from_kept_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: slice) -> None:
    """Of all trials, of some in between, and of every second."""
    folders = trials(tmp_path)
    build(folders, tmp_path / "parsed", baseline="plain")
    chosen = sorted(folders)[which]
    for folder in chosen:
        assert len(columns.keep(folder)) == len(list(folder.glob("*.requests.jsonl")))
    seen: list[Path] = []
    parsed = columns.parsed
    monkeypatch.setattr(columns, "parsed", lambda path: seen.append(path.parent) or parsed(path))
    build(folders, tmp_path / "kept", baseline="plain")
    assert set(seen) == set(folders) - set(chosen)
    assert contents(tmp_path / "parsed") == contents(tmp_path / "kept")


def test_kept_columns_do_not_outlive_what_they_were_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trials(tmp_path)[0]
    (first,) = (path for path in columns.keep(folder) if path.name.startswith("zeta."))
    raw = folder / "zeta.requests.jsonl"
    lines = raw.read_text(encoding="utf-8").splitlines(keepends=True)
    raw.write_text("".join(lines[1:]), encoding="utf-8")
    # The file was changed: its columns are no way in.
    (row,) = build([folder], tmp_path / "changed", baseline="plain").trials.rows(named=True)
    assert (row["status"], row["reason"]) == ("failed", "zeta.requests.jsonl isn't what the trial wrote")
    # The trial wrote another one: so does it have other columns.
    rewrite(folder, raw)
    assert build([folder], tmp_path / "again", baseline="plain").requests.collect().height == len(lines) - 1 + 520 * 2
    assert first not in columns.keep(folder)
    assert not first.exists()
    # Made otherwise than now: as if there were none.
    now = columns.keep(folder)
    monkeypatch.setattr(columns, "_maker", lambda: "another")
    assert not any(columns.kept(folder, name, content_of(folder, name)).exists() for name in ("burst", "zeta"))
    assert all(path.exists() for path in now)


def test_no_columns_of_what_cannot_be_read(tmp_path: Path) -> None:
    folder = trials(tmp_path)[0]
    no_json(folder / "zeta.requests.jsonl")
    (kept,) = columns.keep(folder)
    assert kept.name.startswith("burst.")
    assert list((folder / columns.FOLDER).iterdir()) == [kept]


def test_judging_keeps_columns_of_large_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).resolve().parents[2] / "workflow" / "scripts" / "judge_trial.py"
    monkeypatch.setattr("kvladder.judge.judge_trial", lambda folder, _: verdicts[folder])
    folders = _, large, invalid = trials(tmp_path)[:3]
    verdicts = {path: Verdict.model_validate_json((path / "verdict.json").read_bytes()) for path in folders}
    verdicts[invalid] = verdicts[invalid].model_copy(update={"status": "invalid"})
    for folder in (large, invalid):
        raw = folder / "burst.requests.jsonl"
        raw.write_bytes(raw.read_bytes() * ((8 << 20) // raw.stat().st_size + 1))
        rewrite(folder, raw)
    for folder in folders:
        own = folder / "own-verdict.json"
        job = SimpleNamespace(
            input=SimpleNamespace(trial=folder / "trial.json"), params=SimpleNamespace(gates={}), output=[own]
        )
        runpy.run_path(str(script), {"snakemake": job})
        assert Verdict.model_validate_json(own.read_bytes()) == verdicts[folder]
    assert [folder for folder in folders if (folder / columns.FOLDER).exists()] == [large]
    assert columns.kept(large, "burst", content_of(large, "burst")).is_file()


def content_of(folder: Path, workload: str) -> str:
    record = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    return str(record["files"][f"{workload}.requests.jsonl"]["sha256"])


def rewrite(folder: Path, raw: Path) -> None:
    """Let the trial's record agree with a raw file."""
    record = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    record["files"][raw.name]["sha256"] = hashlib.sha256(raw.read_bytes()).hexdigest()
    (folder / "trial.json").write_text(json.dumps(record), encoding="utf-8")


def no_json(path: Path) -> None:
    """The trial wrote it so: the hash agrees."""
    path.write_text(path.read_text(encoding="utf-8") + "not json\n", encoding="utf-8")


@pytest.mark.parametrize("damage", [no_json, Path.unlink])
def test_one_unreadable_file_costs_its_trial_and_no_other(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folders = trials(tmp_path)
    whole = build(folders, tmp_path / "whole", baseline="plain").requests.collect()
    bad = folders[0] / "zeta.requests.jsonl"
    damage(bad)
    if bad.exists():
        rewrite(folders[0], bad)
    built = build(folders, tmp_path / "out", baseline="plain")
    (row,) = built.trials.filter(pl.col("status") == "failed").rows(named=True)
    assert (row["setup"], row["repeat"]) == ("prefix-cache", 1)
    assert "zeta.requests.jsonl" in row["reason"]
    mine = (pl.col("setup") == "prefix-cache") & (pl.col("repeat") == 1)
    assert built.requests.collect().equals(whole.filter(~mine))
    assert built.passes.filter(mine).height == built.metrics.filter(mine).height == 0
    # Nothing is left of what was read on the way.
    assert not list((tmp_path / "out").glob(".*"))
