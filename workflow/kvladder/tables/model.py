"""The tables, their columns and units.

An unknown value is null, never 0. Times are seconds, sizes bytes, a GB is 10⁹ of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from kvladder.config.base import TIERS

PASSES = ("cold", "first-hit", "warm")

_TRIAL: dict[str, Any] = {"setup": pl.String, "suite": pl.String, "repeat": pl.Int64, "run": pl.String}

LEVEL = " @ "
"""Between a workload's name and a level of concurrency, where it was sent at several."""

SCHEMAS: dict[str, dict[str, Any]] = {
    # One row a trial, whatever became of it.
    "trials": {
        **_TRIAL,
        "kind": pl.String,
        "title": pl.String,
        "order": pl.Int64,
        "status": pl.String,  # valid | invalid | failed
        "reason": pl.String,
        "started_at": pl.String,
        "duration_s": pl.Float64,
        "startup_s": pl.Float64,  # first process started until the engine was ready
        "rss_bytes": pl.Int64,  # resident memory of all servers, once ready
        "host_id": pl.String,
        "kv_pool_tokens": pl.Int64,
        "block_size": pl.Int64,
        "kv_bytes_per_token": pl.Int64,
        "tier": pl.String,  # where a hit must come from; null: the setup has none
        "connector": pl.String,
        "prefix_caching": pl.Boolean,
        "engine_version": pl.String,
        "ours_in_path": pl.String,  # what of kvladder's own moves the data; null: nothing
        "control": pl.Boolean,  # the baseline a second time
    },
    # One row a pass of a valid trial.
    "passes": {
        **_TRIAL,
        "workload": pl.String,
        "pass": pl.String,
        "round": pl.Int64,
        "concurrency": pl.Int64,
        "requests": pl.Int64,
        "failed": pl.Int64,
        "wall_s": pl.Float64,
        "ttft_n": pl.Int64,
        "ttft_median_s": pl.Float64,
        "ttft_min_s": pl.Float64,
        "ttft_max_s": pl.Float64,
        "ttft_mean_s": pl.Float64,
        "ttft_p90_s": pl.Float64,  # null below 50 requests
        "ttft_p99_s": pl.Float64,  # null below 500 requests
        "output_tokens": pl.Int64,
        "output_tokens_per_s": pl.Float64,  # over the pass's wall time
        "prompt_tokens": pl.Int64,  # as the engine counted
        **{f"tokens_{tier}": pl.Int64 for tier in TIERS},
        "stored_bytes": pl.Int64,
        "loaded_bytes": pl.Int64,
        "store_gb_per_s": pl.Float64,  # over the engine's own transfer time
        "load_gb_per_s": pl.Float64,
        "durable_s": pl.Float64,  # from the pass's end until store traffic was flat
        "drained": pl.Boolean,
        "in_flight_held": pl.Float64,  # time in flight ÷ time that could have been, 0–1
        "in_flight_max": pl.Int64,
        "loop_lag_max_s": pl.Float64,
        "client_cpu_s": pl.Float64,
        "preemptions": pl.Int64,
        "problems": pl.String,
    },
    # One row a request of a valid trial.
    "requests": {
        **_TRIAL,
        "workload": pl.String,
        "pass": pl.String,
        "round": pl.Int64,
        "index": pl.Int64,
        "key": pl.String,
        "status": pl.String,
        "error": pl.String,
        "prompt_tokens": pl.Int64,
        "asked_tokens": pl.Int64,
        "output_tokens": pl.Int64,
        "cached_tokens": pl.Int64,  # as the server's usage says
        "queue_s": pl.Float64,  # eligible until sent: the client's own waiting, in no other column
        "ttft_s": pl.Float64,  # sent until the first chunk that carries a token
        "itl_median_s": pl.Float64,  # between chunks that carry tokens
        "itl_max_s": pl.Float64,
        "tpot_s": pl.Float64,  # (last token - first token) ÷ (tokens - 1)
        "e2e_s": pl.Float64,  # sent until the stream's end
        "anomalies": pl.String,
    },
    # One row a trial × workload × pass × metric: the single number a trial contributes.
    "metrics": {
        **_TRIAL,
        "host_id": pl.String,
        "workload": pl.String,
        "pass": pl.String,
        "metric": pl.String,
        "unit": pl.String,
        "value": pl.Float64,
    },
    # One row a setup × workload × pass × metric.
    "summary": {
        "setup": pl.String,
        "suite": pl.String,
        "workload": pl.String,
        "pass": pl.String,
        "metric": pl.String,
        "unit": pl.String,
        "n": pl.Int64,  # valid trials that have a value
        "excluded": pl.Int64,  # valid trials whose value is unknown
        "median": pl.Float64,  # over trials
        "min": pl.Float64,
        "max": pl.Float64,
        "mode_low": pl.Float64,  # null where one mode is seen
        "mode_high": pl.Float64,
        "n_mode_low": pl.Int64,
        "n_mode_high": pl.Int64,
        "blocks": pl.Int64,  # blocks in which setup and baseline are paired
        "undefined": pl.Int64,  # blocks whose baseline is 0
        "ratio": pl.Float64,  # median of setup ÷ baseline, paired in block
        "ratio_low": pl.Float64,
        "ratio_high": pl.Float64,
        "interval": pl.String,  # 95 % | range | not enough data
        "difference": pl.String,  # lower | higher | no difference seen | not enough data
        "noise_low": pl.Float64,  # control ÷ baseline
        "noise_high": pl.Float64,
        "within_noise": pl.Boolean,
    },
    # One row a gate of a judged trial.
    "gates": {
        **_TRIAL,
        "status": pl.String,
        "gate": pl.String,
        "workload": pl.String,
        "decision": pl.String,  # pass | fail | not-checked
        "required": pl.Boolean,
        "expected": pl.String,
        "seen": pl.String,
        "source": pl.String,
    },
    # One row a setup × property that must be equal for a fair comparison, or known.
    "parity": {
        "setup": pl.String,
        "property": pl.String,
        "unit": pl.String,
        "asked": pl.String,
        "measured": pl.String,
        "agrees": pl.Boolean,
    },
}


@dataclass(frozen=True)
class Tables:
    """All tables, plus ``context``: hosts, stacks, harness and, by setup, servers and effective configuration."""

    trials: pl.DataFrame
    passes: pl.DataFrame
    requests: pl.DataFrame
    metrics: pl.DataFrame
    summary: pl.DataFrame
    gates: pl.DataFrame
    parity: pl.DataFrame
    context: dict[str, Any] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        """The setup that ratios are taken against."""
        return str(self.context.get("baseline", ""))

    def tiers(self) -> dict[str, str]:
        """Where a setup's hits must come from; a trial that never started doesn't know it, another one may."""
        rows = self.trials.filter(pl.col("tier").is_not_null()).select("setup", "tier").unique(maintain_order=True)
        return dict(rows.iter_rows())

    def titles(self) -> dict[str, str]:
        """What each setup is called in figures and reports: its title, else its name."""
        rows = self.trials.select("setup", "title").unique(maintain_order=True).sort("setup", "title")
        return {setup: title or setup for setup, title in rows.iter_rows()}


def frame(name: str, rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """A table from rows; a column that a row lacks is null there.

    Raises ValueError for a column that the table doesn't have.
    """
    schema = SCHEMAS[name]
    checked = []
    for row in rows:
        if not row.keys() <= schema.keys():
            raise ValueError(f"{name}: unknown columns {sorted(row.keys() - schema.keys())}")
        checked.append({column: row.get(column) for column in schema})
    return pl.DataFrame(checked, schema=schema, orient="row")


def load(folder: Path) -> Tables:
    """Read what `build` wrote. Raises OSError where a table is missing."""
    frames = {name: pl.read_parquet(folder / f"{name}.parquet") for name in SCHEMAS}
    return Tables(**frames, context=json.loads((folder / "context.json").read_text(encoding="utf-8")))


_FORMULA = r"^[=+\-@\t\r]"


def save(tables: Tables, folder: Path) -> None:
    """Write every table as parquet and CSV, and ``context.json``; equal tables give equal bytes.

    A spreadsheet runs a text cell that starts with ``= + - @`` as a formula; in the CSV such cells of text columns
    begin with an apostrophe. Numbers are left alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCHEMAS:
        table: pl.DataFrame = getattr(tables, name)
        table.write_parquet(folder / f"{name}.parquet")
        texts = [column for column, kind in table.schema.items() if kind == pl.String]
        shown = table.with_columns(
            pl.when(pl.col(column).str.contains(_FORMULA))
            .then("'" + pl.col(column))
            .otherwise(pl.col(column))
            .alias(column)
            for column in texts
        )
        shown.write_csv(folder / f"{name}.csv")
    text = json.dumps(tables.context, indent=1, sort_keys=True, ensure_ascii=False)
    (folder / "context.json").write_text(text + "\n", encoding="utf-8")
