"""Builds every table from trial folders. Equal folders give equal bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from kvladder.config.base import TIERS
from kvladder.config.records import PassRecord, WindowTokens
from kvladder.stats.intervals import Interval
from kvladder.stats.modes import two_modes
from kvladder.stats.paired import PairedRatio, paired_ratio, within_noise
from kvladder.stats.samples import clean, median, quantile
from kvladder.tables.context import context
from kvladder.tables.model import LEVEL, SCHEMAS, Tables, frame, save
from kvladder.tables.parity import parity
from kvladder.tables.raw import RawTrial, UnreadableRequestsError, canonical, failed_with, read_requests, read_trial

_S = 1_000_000_000

Row = dict[str, Any]

# Metric → unit and the column of `passes` whose median over a pass's rounds is a trial's value.
_PASS_METRICS = {
    "wall_s": ("s", "wall_s"),
    "output_tokens_per_s": ("tokens/s", "output_tokens_per_s"),
    "load_gb_per_s": ("GB/s", "load_gb_per_s"),
    "store_gb_per_s": ("GB/s", "store_gb_per_s"),
    "durable_s": ("s", "durable_s"),
}
# Metrics that are the median over the requests of all of a pass's rounds.
_REQUEST_METRICS = ("ttft_s", "tpot_s", "e2e_s")


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
    raw, requests = _requests(read)
    controls = _controls(raw, baseline)
    valid = [trial for trial in raw if trial.status == "valid"]
    passes, requests = _by_level(frame("passes", _passes(valid, requests)), requests)
    metrics = frame("metrics", _metrics(valid, passes, requests))
    tables = Tables(
        trials=frame("trials", (_trial(trial, controls) for trial in raw)),
        passes=passes,
        requests=requests,
        metrics=metrics,
        summary=frame("summary", _summary(metrics, valid, baseline, controls)),
        gates=frame("gates", _gates(raw)),
        parity=frame("parity", parity(raw, passes)),
        context=context(raw, baseline, controls),
    )
    save(tables, out)
    return tables


def _by_level(passes: pl.DataFrame, requests: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """A workload sent at several levels of concurrency counts as one workload a level: ``name @ level``.

    Its levels are different measurements: pooled, their medians and wall times would be numbers that nobody measured.
    """
    cell = ["suite", "workload"]
    many = passes.group_by(cell).agg(levels=pl.col("concurrency").n_unique()).filter(pl.col("levels") > 1).select(cell)
    if not many.height:
        return passes, requests
    named = pl.format("{}" + LEVEL + "{}", "workload", "concurrency")
    of_pass = ["setup", "suite", "repeat", "workload", "round"]
    names = passes.join(many, on=cell, how="semi").select(*of_pass, named=named)

    def renamed(data: pl.DataFrame) -> pl.DataFrame:
        joined = data.join(names, on=of_pass, how="left", maintain_order="left")
        return joined.with_columns(workload=pl.coalesce("named", "workload")).drop("named")

    return renamed(passes), renamed(requests)


def _one_run_each(raw: Iterable[RawTrial]) -> None:
    seen: dict[tuple[str, str, int], RawTrial] = {}
    for trial in raw:
        other = seen.setdefault((trial.setup, trial.suite, trial.repeat), trial)
        if other is not trial:
            raise ValueError(
                f"{trial.setup}/{trial.suite}: repeat {trial.repeat} was run as {other.run} and as {trial.run}, "
                "two configurations: give the trials of one"
            )


def _requests(read: Sequence[RawTrial]) -> tuple[list[RawTrial], pl.DataFrame]:
    """All trials, those whose requests can't be read as failed, and the requests of the valid ones."""
    raw, parts = [], [pl.DataFrame(schema=SCHEMAS["requests"])]
    for trial in read:
        if trial.status == "valid":
            try:
                parts.append(read_requests(trial))
            except UnreadableRequestsError as error:
                raw.append(failed_with(trial, str(error)))
                continue
        raw.append(trial)
    order = ["setup", "suite", "repeat", "workload", "round", "index"]
    return raw, pl.concat(parts).sort(order, maintain_order=True)


def _controls(raw: Iterable[RawTrial], baseline: str) -> set[str]:
    """Setups that are configured as the baseline is: its A/A controls."""
    made: defaultdict[str, set[str]] = defaultdict(set)
    for trial in raw:
        if trial.record is not None:
            made[trial.setup].add(canonical({**trial.record.config.get("setup", {}), "title": None}))
    return {setup for setup, forms in made.items() if setup != baseline and forms == made.get(baseline)}


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


def _passes(valid: Iterable[RawTrial], requests: pl.DataFrame) -> Iterable[Row]:
    by_pass = requests.partition_by("setup", "suite", "repeat", "workload", "round", as_dict=True)
    for trial in valid:
        assert trial.record is not None and trial.verdict is not None  # noqa: S101 (what makes a trial valid)
        windows = {(window.workload, window.round): window for window in trial.verdict.windows}
        for part in sorted(trial.record.passes, key=lambda item: (item.workload, item.round)):
            rows = by_pass.get((trial.setup, trial.suite, trial.repeat, part.workload, part.round))
            window = windows.get((part.workload, part.round))
            yield {**trial.key, **_timing(part, rows), **_traffic(window)}


def _timing(part: PassRecord, requests: pl.DataFrame | None) -> Row:
    wall = (part.end_ns - part.start_ns) / _S
    finished = None if requests is None else requests.filter(pl.col("status") == "ok")
    ttft = [] if finished is None else finished["ttft_s"].drop_nulls().to_list()
    output = (
        None if finished is None or finished["output_tokens"].null_count() else int(finished["output_tokens"].sum())
    )
    return {
        "workload": part.workload,
        "pass": part.name,
        "round": part.round,
        "concurrency": part.concurrency,
        "requests": part.requests,
        "failed": part.failed,
        "wall_s": wall,
        "ttft_n": len(ttft),
        "ttft_median_s": median(ttft),
        "ttft_min_s": min(ttft, default=None),
        "ttft_max_s": max(ttft, default=None),
        "ttft_mean_s": sum(ttft) / len(ttft) if ttft else None,
        "ttft_p90_s": quantile(ttft, 0.90),
        "ttft_p99_s": quantile(ttft, 0.99),
        "output_tokens": output,
        "output_tokens_per_s": _rate(output, wall),
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


def _metrics(valid: Iterable[RawTrial], passes: pl.DataFrame, requests: pl.DataFrame) -> Iterable[Row]:
    ok = requests.filter(pl.col("status") == "ok")
    group = ["setup", "suite", "repeat", "workload", "pass"]
    per_request = ok.group_by(group).agg(pl.col(name).median() for name in _REQUEST_METRICS)
    per_pass = passes.group_by(group).agg(pl.col(column).median() for _, column in _PASS_METRICS.values())
    values = {tuple(row[key] for key in group): row for row in per_pass.iter_rows(named=True)}
    for row in per_request.iter_rows(named=True):
        values.setdefault(tuple(row[key] for key in group), {}).update(row)
    trials = {(trial.setup, trial.suite, trial.repeat): trial for trial in valid}
    units = dict.fromkeys(_REQUEST_METRICS, "s") | {name: unit for name, (unit, _) in _PASS_METRICS.items()}
    for key in sorted(values):
        trial = trials[key[:3]]
        assert trial.record is not None  # noqa: S101 (a valid trial has one)
        for metric, unit in units.items():
            yield {
                **trial.key,
                "host_id": trial.record.host.host_id,
                "workload": key[3],
                "pass": key[4],
                "metric": metric,
                "unit": unit,
                "value": values[key].get(metric),
            }


Cell = tuple[str, str, str, str]
"""Suite, workload, pass, metric."""


def _summary(metrics: pl.DataFrame, valid: Sequence[RawTrial], baseline: str, controls: set[str]) -> Iterable[Row]:
    cells: defaultdict[tuple[str, Cell], dict[tuple[int, str], float | None]] = defaultdict(dict)
    units: dict[str, str] = {}
    for row in metrics.iter_rows(named=True):
        cell = (row["suite"], row["workload"], row["pass"], row["metric"])
        # Trials of two hosts are never one block.
        cells[row["setup"], cell][row["repeat"], row["host_id"]] = row["value"]
        units[row["metric"]] = row["unit"]
    floors = {cell: _floor(cells, cell, baseline, controls) for _, cell in cells}
    for (setup, cell), values in sorted(cells.items()):
        sample = clean(values.values())
        if not sample.values:
            continue
        modes = two_modes(sample.values)
        ratio = paired_ratio(values, cells.get((baseline, cell), {})) if setup != baseline else None
        yield {
            "setup": setup,
            **dict(zip(("suite", "workload", "pass", "metric"), cell, strict=True)),
            "unit": units[cell[3]],
            "n": len(sample.values),
            "excluded": sample.excluded,
            "median": median(sample.values),
            "min": min(sample.values),
            "max": max(sample.values),
            **({} if modes is None else _modes(modes.low, modes.high, modes.n_low, modes.n_high)),
            **_compared(ratio, floors[cell]),
        }


def _modes(low: float, high: float, n_low: int, n_high: int) -> Row:
    return {"mode_low": low, "mode_high": high, "n_mode_low": n_low, "n_mode_high": n_high}


def _floor(
    cells: Mapping[tuple[str, Cell], dict[tuple[int, str], float | None]],
    cell: Cell,
    baseline: str,
    controls: set[str],
) -> Interval | None:
    """Interval of control ÷ baseline; of several controls the one that reaches furthest from 1."""
    base = cells.get((baseline, cell), {})
    found = [
        paired_ratio(cells[control, cell], base).interval for control in sorted(controls) if (control, cell) in cells
    ]
    known = [
        (max(abs(each.low - 1), abs(each.high - 1)), each)
        for each in found
        if each.low is not None and each.high is not None
    ]
    return max(known, key=lambda item: item[0])[1] if known else None


def _compared(ratio: PairedRatio | None, floor: Interval | None) -> Row:
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
        "difference": ratio.difference,
        "within_noise": within_noise(interval, floor),
    }


def _gates(raw: Iterable[RawTrial]) -> Iterable[Row]:
    for trial in raw:
        if trial.verdict is not None:
            for gate in trial.verdict.gates:
                yield {**trial.key, "status": trial.status, **gate.model_dump()}
