"""Builds every table from trial folders. Equal folders give equal bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from kvladder.config.base import TIERS
from kvladder.config.records import PassRecord, WindowTokens
from kvladder.stats.detectable import detectable
from kvladder.stats.modes import two_modes
from kvladder.stats.paired import NoiseFloor, PairedRatio, noise_floor, paired_ratio, within_noise
from kvladder.stats.samples import clean, median
from kvladder.tables.break_even import break_even_rows
from kvladder.tables.context import context
from kvladder.tables.held import held_rows
from kvladder.tables.ladder import cliff_rows, ladder_rows
from kvladder.tables.limits import limits, rooflines
from kvladder.tables.model import CELL, Tables, frame, save, scan_requests
from kvladder.tables.oracle import oracle_rows
from kvladder.tables.parity import parity
from kvladder.tables.pcie import pcie_rows
from kvladder.tables.raw import RawTrial, canonical, read_trial
from kvladder.tables.requests import RequestStore
from kvladder.tables.right_kv import right_kv_rows
from kvladder.tables.sharing import sharing_rows

_S = 1_000_000_000

Row = dict[str, Any]

# Metric → unit and the column of `passes` whose median over a pass's rounds is a trial's value.
_PASS_METRICS = {
    "wall_s": ("s", "wall_s"),
    "output_tokens_per_s": ("tokens/s", "output_tokens_per_s"),
    "prompt_tokens_per_s": ("tokens/s", "prompt_tokens_per_s"),
    "load_gb_per_s": ("GB/s", "load_gb_per_s"),
    "store_gb_per_s": ("GB/s", "store_gb_per_s"),
    "durable_s": ("s", "durable_s"),
}
# Metric → the column of `requests` whose median over the requests of all of a pass's rounds is a trial's value.
_REQUEST_METRICS = {"ttft_s": "ttft_s", "itl_s": "itl_median_s", "tpot_s": "tpot_s", "e2e_s": "e2e_s"}


def find_trials(root: Path) -> list[Path]:
    """All trial folders below ``trials/<setup>/<suite>/r<repeat>-<run>``, sorted, finished or not."""
    return sorted(path for path in root.glob("*/*/r*-*") if path.is_dir())


def build(folders: Sequence[Path], out: Path, *, baseline: str) -> Tables:
    """Write all tables of these trials into `out` and return them.

    Only valid trials reach ``passes``, ``requests``, ``metrics`` and ``summary``; the others are in ``trials`` with
    their reason. Trials of several runs of one (setup, suite, repeat) can't be told apart in a comparison: ValueError.
    """
    read = [read_trial(folder) for folder in folders]
    read.sort(key=lambda trial: (trial.setup, trial.suite, trial.repeat, trial.run))
    _one_run_each(read)
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".requests-", dir=out) as scratch:
        requests = RequestStore(Path(scratch))
        raw = requests.add(read)
        tables = _tables(raw, requests, baseline)
        save(tables, out)
    return replace(tables, requests=scan_requests(out))


def _tables(raw: Sequence[RawTrial], requests: RequestStore, baseline: str) -> Tables:
    twins = _twins(raw)
    controls = twins.get(baseline, set())
    valid = [trial for trial in raw if trial.status == "valid"]
    passes, cells = _by_cell(frame("passes", _passes(valid, requests)))
    metrics = frame("metrics", _metrics(valid, passes, cells, requests))
    summary = frame("summary", _summary(metrics, valid, baseline, twins))
    pcie_trace, pcie_bytes = pcie_rows(raw, passes)
    rates = frame("limits", limits(raw, passes))
    pools, turns = ladder_rows(raw)
    ladder = frame("ladder", pools)
    tiered = {trial.setup for trial in valid if trial.record is not None and trial.record.expected.get("tier")}
    return Tables(
        trials=frame("trials", (_trial(trial, controls) for trial in raw)),
        passes=passes,
        requests=requests.table(cells),
        metrics=metrics,
        summary=summary,
        break_even=frame("break_even", break_even_rows(metrics, summary, passes, tiered, baseline)),
        gates=frame("gates", _gates(raw)),
        right_kv=frame("right_kv", right_kv_rows(raw)),
        oracle=frame("oracle", oracle_rows(raw, passes)),
        parity=frame("parity", parity(raw, passes)),
        limits=rates,
        pcie_trace=frame("pcie_trace", pcie_trace),
        pcie_bytes=frame("pcie_bytes", pcie_bytes),
        held=frame("held", held_rows(raw)),
        sharing=frame("sharing", sharing_rows(raw, passes, metrics, rates)),
        ladder=ladder,
        turns=frame("turns", turns),
        cliffs=frame("cliffs", cliff_rows(ladder)),
        rooflines=frame("rooflines", rooflines(raw)),
        context=context(raw, baseline, twins),
    )


def _by_cell(passes: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame | None]:
    """A workload sent with several numbers of requests in flight or several prompt lengths counts as one workload a
    cell: ``name @ 4``, ``name @ 8200 tokens``, ``name @ 4 × 8200 tokens``. Returns passes by these names, and each
    pass's, or None where all keep theirs.

    Its cells are different measurements: pooled, their medians and wall times would be numbers that nobody measured.
    Lengths tell cells apart only where each pass has a single one; a pass of mixed lengths is one measurement.
    """
    workload = ["suite", "workload"]
    spread = passes.group_by(workload).agg(
        levels=pl.col("concurrency").n_unique() > 1,
        lengths=(pl.col("prompt_length").n_unique() > 1) & (pl.col("prompt_length").null_count() == 0),
    )
    spread = spread.filter(pl.col("levels") | pl.col("lengths"))
    if not spread.height:
        return passes, None
    named = (
        pl.when(pl.col("levels") & pl.col("lengths"))
        .then(pl.format("{}" + CELL + "{} × {} tokens", "workload", "concurrency", "prompt_length"))
        .when("levels")
        .then(pl.format("{}" + CELL + "{}", "workload", "concurrency"))
        .otherwise(pl.format("{}" + CELL + "{} tokens", "workload", "prompt_length"))
    )
    of_pass = ["setup", "suite", "repeat", "workload", "round"]
    names = passes.join(spread, on=workload).select(*of_pass, named=named)
    joined = passes.join(names, on=of_pass, how="left", maintain_order="left")
    return joined.with_columns(workload=pl.coalesce("named", "workload")).drop("named"), names


def _one_run_each(raw: Iterable[RawTrial]) -> None:
    seen: dict[tuple[str, str, int], RawTrial] = {}
    for trial in raw:
        other = seen.setdefault((trial.setup, trial.suite, trial.repeat), trial)
        if other is not trial:
            raise ValueError(
                f"{trial.setup}/{trial.suite}: repeat {trial.repeat} was run as {other.run} and as {trial.run}, "
                "two configurations: give the trials of one"
            )


def _twins(raw: Iterable[RawTrial]) -> dict[str, set[str]]:
    """By setup the others that are configured as it is. Those of the baseline are its A/A controls, and a noisy setup
    that is there twice is a control of itself."""
    made: defaultdict[str, set[str]] = defaultdict(set)
    for trial in raw:
        if trial.record is not None:
            made[trial.setup].add(canonical({**trial.record.config.get("setup", {}), "title": None}))
    return {setup: {other for other in made if other != setup and made[other] == made[setup]} for setup in made}


def _trial(trial: RawTrial, controls: set[str]) -> Row:
    row: Row = {**trial.key, "status": trial.status, "reason": trial.reason, "control": trial.setup in controls}
    record = trial.record
    if record is None:
        return row
    effective, expected = record.effective, record.expected
    return row | {
        "kind": record.kind,
        "title": expected.get("title"),
        "order": record.order,
        "started_at": record.started_at,
        "duration_s": (record.end_ns - record.start_ns) / _S,
        "startup_s": _seconds(record.startup_ns),
        "rss_bytes": record.rss_bytes,
        "host_id": record.host.host_id,
        "kv_pool_tokens": effective.kv_pool_tokens,
        "block_size": effective.block_size,
        "kv_bytes_per_token": expected.get("kv_bytes_per_token"),
        "tier": expected.get("tier"),
        "connector": effective.connector,
        "prefix_caching": effective.prefix_caching,
        "engine_version": effective.engine_version,
        "ours_in_path": expected.get("ours_in_path"),
    }


def _passes(valid: Iterable[RawTrial], requests: RequestStore) -> Iterable[Row]:
    by_pass = requests.by_pass()
    for trial in valid:
        assert trial.record is not None and trial.verdict is not None  # noqa: S101 (what makes a trial valid)
        windows = {(window.workload, window.round): window for window in trial.verdict.windows}
        for part in sorted(trial.record.timed, key=lambda item: (item.workload, item.round)):
            sent = by_pass.get((trial.setup, trial.suite, trial.repeat, part.workload, part.round))
            window = windows.get((part.workload, part.round))
            yield {**trial.key, **_timing(part, sent), **_traffic(window)}


def _timing(part: PassRecord, sent: Row | None) -> Row:
    """``sent`` is what the pass's requests say; None: there is none of them."""
    wall = (part.end_ns - part.start_ns) / _S
    measured = {"ttft_n": 0} if sent is None else dict(sent)
    prompt_tokens = measured.pop("prompt_tokens_sent", None)
    return {
        **measured,
        "workload": part.workload,
        "pass": part.name,
        "round": part.round,
        "concurrency": part.concurrency,
        "requests": part.requests,
        "failed": part.failed,
        "wall_s": wall,
        "output_tokens_per_s": _rate(measured.get("output_tokens"), wall),
        "prompt_tokens_per_s": _rate(prompt_tokens, wall),
        "durable_s": _seconds(part.durable_ns),
        "drained": part.drained,
        "in_flight_held": _held(part),
        "in_flight_max": max((level for _, level, _ in part.in_flight), default=None),
        "loop_lag_max_s": _seconds(part.loop_lag_max_ns),
        "client_cpu_s": _seconds(part.client_cpu_ns),
    }


def _traffic(window: WindowTokens | None) -> Row:
    if window is None:
        return {}
    return {
        "prompt_tokens": window.prompt_tokens,
        **{f"tokens_{tier}": window.by_source.get(tier) for tier in TIERS},
        "stored_bytes": window.stored_bytes,
        "loaded_bytes": window.loaded_bytes,
        "store_gb_per_s": _rate(window.stored_bytes, window.store_time_ns),
        "load_gb_per_s": _rate(window.loaded_bytes, window.load_time_ns),
        "preemptions": window.preemptions,
        "problems": "; ".join(window.problems) or None,
    }


def _held(part: PassRecord) -> float | None:
    """∫ in flight dt ÷ ∫ min(asked, eligible) dt over the pass; None without a series or where nothing was eligible."""
    had = could = 0
    ends = [*(time for time, _, _ in part.in_flight[1:]), part.end_ns]
    for (time, level, eligible), end in zip(part.in_flight, ends, strict=True):
        had += level * (end - time)
        could += min(part.concurrency, eligible) * (end - time)
    return had / could if could else None


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / _S


def _rate(amount: float | None, time: float | None) -> float | None:
    """Amount ÷ time; with bytes and nanoseconds that is GB/s. None where either is unknown, or nothing took no time."""
    return None if amount is None or not time or not amount else amount / time


def _metrics(
    valid: Iterable[RawTrial], passes: pl.DataFrame, names: pl.DataFrame | None, requests: RequestStore
) -> Iterable[Row]:
    group = ["setup", "suite", "repeat", "workload", "pass"]
    per_pass = passes.group_by(group).agg(pl.col(column).median() for _, column in _PASS_METRICS.values())
    values = {tuple(row[key] for key in group): row for row in per_pass.iter_rows(named=True)}
    for key, medians in requests.medians(_REQUEST_METRICS, names):
        values.setdefault(key, {}).update(medians)
    trials = {(trial.setup, trial.suite, trial.repeat): trial for trial in valid}
    cells = _cells(passes)
    units = dict.fromkeys(_REQUEST_METRICS, "s") | {name: unit for name, (unit, _) in _PASS_METRICS.items()}
    for key in sorted(values):
        trial = trials[key[:3]]
        assert trial.record is not None  # noqa: S101 (a valid trial has one)
        for metric, unit in units.items():
            yield {
                **trial.key,
                "host_id": trial.record.host.host_id,
                "workload": key[3],
                **cells[key[1], key[3]],
                "pass": key[4],
                "metric": metric,
                "unit": unit,
                "value": values[key].get(metric),
            }


def _cells(data: pl.DataFrame) -> dict[tuple[str, str], Row]:
    """Requests in flight and prompt length of each (suite, workload); None where its passes have several."""
    columns = ("concurrency", "prompt_length")
    one = [pl.when(pl.col(name).n_unique() == 1).then(pl.col(name).first()).alias(name) for name in columns]
    rows = data.group_by("suite", "workload").agg(one).iter_rows(named=True)
    return {(row["suite"], row["workload"]): {name: row[name] for name in columns} for row in rows}


Cell = tuple[str, str, str, str]
"""Suite, workload, pass, metric."""


def _summary(
    metrics: pl.DataFrame, valid: Sequence[RawTrial], baseline: str, twins: Mapping[str, set[str]]
) -> Iterable[Row]:
    cells: defaultdict[tuple[str, Cell], dict[tuple[int, str], float | None]] = defaultdict(dict)
    units: dict[str, str] = {}
    for row in metrics.iter_rows(named=True):
        cell = (row["suite"], row["workload"], row["pass"], row["metric"])
        # Trials of two hosts are never one block.
        cells[row["setup"], cell][row["repeat"], row["host_id"]] = row["value"]
        units[row["metric"]] = row["unit"]
    sent = _cells(metrics)
    for (setup, cell), values in sorted(cells.items()):
        sample = clean(values.values())
        if not sample.values:
            continue
        modes = two_modes(sample.values)
        ratio = paired_ratio(values, cells.get((baseline, cell), {})) if setup != baseline else None
        yield {
            "setup": setup,
            **dict(zip(("suite", "workload", "pass", "metric"), cell, strict=True)),
            **sent[cell[:2]],
            "unit": units[cell[3]],
            "n": len(sample.values),
            "excluded": sample.excluded,
            "median": median(sample.values),
            "min": min(sample.values),
            "max": max(sample.values),
            **({} if modes is None else _modes(modes.low, modes.high, modes.n_low, modes.n_high)),
            **_compared(ratio, _floor(cells, cell, setup, baseline, twins)),
        }


def _modes(low: float, high: float, n_low: int, n_high: int) -> Row:
    return {"mode_low": low, "mode_high": high, "n_mode_low": n_low, "n_mode_high": n_high}


def _floor(
    cells: Mapping[tuple[str, Cell], dict[tuple[int, str], float | None]],
    cell: Cell,
    setup: str,
    baseline: str,
    twins: Mapping[str, set[str]],
) -> NoiseFloor | None:
    """What control ÷ baseline spans, and setup ÷ the same setup a second time where there is one."""
    controls = twins.get(baseline, set())
    pairs = [(control, baseline) for control in controls]
    if setup != baseline and setup not in controls:
        pairs += [(setup, twin) for twin in twins.get(setup, ())]
    return noise_floor(paired_ratio(cells.get((a, cell), {}), cells.get((b, cell), {})).interval for a, b in pairs)


def _compared(ratio: PairedRatio | None, floor: NoiseFloor | None) -> Row:
    noise = {} if floor is None else {"noise_low": floor.low, "noise_high": floor.high}
    if ratio is None:
        return noise
    interval = ratio.interval
    return noise | {
        "blocks": interval.n,
        "undefined": ratio.undefined,
        "ratio": interval.median,
        "ratio_low": interval.low,
        "ratio_high": interval.high,
        "interval": interval.kind,
        "difference": ratio.difference(floor),
        "within_noise": within_noise(interval, floor),
        "mde": detectable(ratio, floor),
    }


def _gates(raw: Iterable[RawTrial]) -> Iterable[Row]:
    for trial in raw:
        if trial.verdict is not None:
            for gate in trial.verdict.gates:
                yield {**trial.key, "status": trial.status, **gate.model_dump()}
