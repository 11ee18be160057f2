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

CACHES = ("gpu", "cpu", "nvme", "remote")
"""Tiers that a token can be hit in."""

_TRIAL: dict[str, Any] = {"setup": pl.String, "suite": pl.String, "repeat": pl.Int64, "run": pl.String}

CELL = " @ "
"""Between a workload's name and a cell of it (``4``, ``8200 tokens``, ``4 × 8200 tokens``), where it was sent in
several: with different numbers of requests in flight, or prompts of different lengths."""

_CELL: dict[str, Any] = {
    "concurrency": pl.Int64,  # requests in flight that were asked for: the batch of a grid
    "prompt_length": pl.Int64,  # tokens of each prompt; null: prompts of several lengths
}

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
        **_CELL,
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
        "prompt_tokens_per_s": pl.Float64,  # tokens sent, computed or loaded, over the pass's wall time
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
        **_CELL,
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
        **_CELL,
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
        "noise_low": pl.Float64,  # ratios of equal setups: control ÷ baseline, this one ÷ itself a second time; and 1
        "noise_high": pl.Float64,
        "within_noise": pl.Boolean,
        "mde": pl.Float64,  # relative difference that 4 of 5 such experiments see (0.05: 5 %); null for a range
    },
    # One row a setup with a tier × sweep over prompt lengths × pass that hits: one request in flight, TTFT.
    "break_even": {
        "setup": pl.String,
        "suite": pl.String,
        "workload": pl.String,
        "pass": pl.String,  # first-hit | warm
        "answer": pl.String,  # already at the shortest | from `tokens` on | up to `tokens` | never
        "tokens": pl.Float64,  # prompt length, interpolated; null for already and never
        "tokens_low": pl.Float64,  # smallest and largest of single blocks; null unless all agree on the answer
        "tokens_high": pl.Float64,
        "shortest": pl.Int64,  # lengths measured
        "longest": pl.Int64,
        "crossings": pl.Int64,  # above 1: `tokens` is the last of them
        "blocks": pl.Int64,
        "hits_to_pay": pl.Float64,  # at the longest length: hits that pay for a dearer first request; inf: never
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
    # One row a judged trial × hit pass of right-kv. Deviations: log probability (nats), largest over the top tokens.
    "right_kv": {
        **_TRIAL,
        "pass": pl.String,  # first-hit | warm
        "prompts": pl.Int64,
        "median": pl.Float64,  # deviation from the same prompt's cold pass, over prompts
        "max": pl.Float64,
        "limit": pl.Float64,  # null: no prefix-cache in the block to measure against
        "beyond": pl.Int64,  # prompts beyond the limit
        "flipped": pl.Int64,  # prompts whose most probable token is another one
        "equal_to_control": pl.Int64,  # prompts answered as prefix-cache's hit of them, to the bit
        "verdict": pl.String,  # right | wrong | not checked
    },
    # One row a pass of a judged trial whose setup has a tier: tokens that the hit oracle predicts, and measured ones.
    "oracle": {
        **_TRIAL,
        "status": pl.String,
        "workload": pl.String,
        "pass": pl.String,
        "round": pl.Int64,
        "prompt_tokens": pl.Int64,  # of requests that came through
        "working_set_tokens": pl.Int64,  # in different blocks that the pass asks for; of a pool: open at a time
        **{f"capacity_{tier}_tokens": pl.Int64 for tier in CACHES},  # null: no such tier, or no limit
        **{f"predicted_{tier}": pl.Int64 for tier in CACHES},
        **{f"measured_{tier}": pl.Int64 for tier in (*CACHES, "unknown")},
        "predicted_hits": pl.Int64,
        "measured_hits": pl.Int64,
        "ceiling": pl.Float64,  # share of the prompt tokens that tiers without limits would give, 0–1
        "evicts": pl.Boolean,  # the tiers are too small for what an infinite cache would give
        "exact": pl.Boolean,  # one answer is possible; else some tokens either way
        "agrees": pl.Boolean,
        "note": pl.String,
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
    # One row a setup × workload × pass × direction × basis: how fast KV moved, against what its link can do.
    "limits": {
        "setup": pl.String,
        "suite": pl.String,
        "workload": pl.String,
        "pass": pl.String,
        "direction": pl.String,  # load | store
        "basis": pl.String,  # engine: its bytes ÷ its own time | ttft: bytes ÷ time to the first tokens, a lower bound
        "link": pl.String,  # name of the roofline; null: it isn't known what KV moved over
        "n": pl.Int64,  # valid trials; where a rate is refused, the trials that claimed it
        "gb_per_s": pl.Float64,  # median over trials of the median over a pass's rounds; null where refused
        "min_gb_per_s": pl.Float64,
        "max_gb_per_s": pl.Float64,
        "ceiling_gb_per_s": pl.Float64,  # the fastest measurement of the link
        "percent": pl.Float64,  # of the ceiling, at most 100; median over trials
        "note": pl.String,  # why there is no roofline, why it decides nothing, or why a rate isn't shown
    },
    # One row a step between two samples × direction, of each setup's and suite's first valid trial: what crossed PCIe.
    "pcie_trace": {
        **_TRIAL,
        "direction": pl.String,  # store: the device sent | load: it received
        "workload": pl.String,  # that most of the step fell into; null: between passes
        "pass": pl.String,
        "round": pl.Int64,
        "start_s": pl.Float64,  # since the first timed pass began
        "end_s": pl.Float64,
        "gb_per_s": pl.Float64,  # mean over the step, packet headers included
        "turns": pl.Int64,  # times that a 32-bit counter is taken to have started over, going by the engine's bytes
    },
    # One row a setup × workload × direction: bytes over PCIe as the device, the engine and its hit tokens have them.
    "pcie_bytes": {
        "setup": pl.String,
        "suite": pl.String,
        "workload": pl.String,
        "direction": pl.String,  # store | load: of all the workload's passes that do
        "n": pl.Int64,  # valid trials whose samples set the workload's passes apart
        "counted_bytes": pl.Float64,  # by the device, headers included, whole turns completed; medians over trials
        "engine_bytes": pl.Float64,  # by the engine's byte counter; null: it has none
        "expected_bytes": pl.Float64,  # tokens computed and stored, or hit below the device, × KV bytes a token
        "counted_ratio": pl.Float64,  # counted ÷ expected; median, least and largest over trials
        "min_ratio": pl.Float64,
        "max_ratio": pl.Float64,
        "turns": pl.Int64,  # most that were added in a trial
    },
    # One row a trial that started a process: what it held its GPU, or its machine, for.
    "held": {
        **_TRIAL,
        "status": pl.String,
        "gpus": pl.Int64,  # 0: no GPU, the machine was held
        "cores": pl.Int64,
        "held_s": pl.Float64,  # first process started until all were gone
        "start_s": pl.Float64,  # until the engine was ready
        "warm_up_s": pl.Float64,  # unmeasured prompts, prompts generated, the configuration read back
        "timed_s": pl.Float64,  # in timed passes
        "between_s": pl.Float64,  # between them: waits until stores were flat, resets, counters read
        "right_kv_s": pl.Float64,  # passes that show whether loaded KV is right, and their drains
        "stop_s": pl.Float64,
        "rest_s": pl.Float64,  # of a trial that failed: what came after the last part that it finished
        "client_cpu_s": pl.Float64,  # in timed passes
        "client_share": pl.Float64,  # of all cores while they ran, 0–1
        "sampler_share": pl.Float64,  # of all cores while samples were taken, 0–1; null: not recorded
    },
    # One row a setup × workload whose trials have two engines: what the second found of what the first had stored.
    "sharing": {
        "setup": pl.String,
        "suite": pl.String,
        "workload": pl.String,
        "n": pl.Int64,  # valid trials; numbers are medians over them
        "prompts": pl.Int64,
        "prompt_length": pl.Int64,
        "concurrency": pl.Int64,
        "answer": pl.String,  # found | in part (or in some trials) | not found; null: an engine doesn't count
        "second_hit": pl.Float64,  # share of the prompt tokens that the second engine didn't compute, 0–1
        "own_hit": pl.Float64,  # the same of the engine that stored, asked again
        "ttft_stored_s": pl.Float64,  # cold, through the engine that stores
        "ttft_second_s": pl.Float64,
        "ttft_own_s": pl.Float64,
        "second_to_stored": pl.Float64,  # ratios inside a trial
        "second_to_own": pl.Float64,
        "loaded_bytes": pl.Float64,  # by the second engine, where bytes are counted
        "load_gb_per_s": pl.Float64,  # as in ``limits``
        "load_basis": pl.String,
    },
    # One row a pass of a valid trial in which conversations took turns. Times and rates are those of the window.
    "ladder": {
        **_TRIAL,
        "workload": pl.String,
        "round": pl.Int64,
        "pool": pl.Int64,  # conversations open at a time
        "conversation_tokens": pl.Int64,  # prompt tokens of a last turn
        "working_set_tokens": pl.Int64,  # pool × conversation_tokens
        "order": pl.String,
        "concurrency": pl.Int64,
        "requests": pl.Int64,  # of the whole pass
        "steady": pl.Boolean,  # the window is the steady state; else the whole pass, which has none
        "window_start_s": pl.Float64,  # since the pass began
        "window_end_s": pl.Float64,
        "window_requests": pl.Int64,  # that ended inside
        "tokens_per_s": pl.Float64,  # prompt and output tokens of those requests, over the window
        "requests_per_s": pl.Float64,
        "ttft_median_s": pl.Float64,
        "ttft_max_s": pl.Float64,
        # Tokens and bytes are those of the whole pass: counters are read at its ends.
        "prompt_tokens": pl.Int64,
        "measured_hits": pl.Int64,
        **{f"measured_{tier}": pl.Int64 for tier in CACHES},
        "predicted_hits": pl.Int64,  # by the hit oracle; null: the setup has no tier
        **{f"predicted_{tier}": pl.Int64 for tier in CACHES},
        "predicted_ceiling": pl.Int64,  # tiers without limits
        **{f"capacity_{tier}_tokens": pl.Int64 for tier in CACHES},  # null: no such tier, or no limit
        "stored_bytes": pl.Int64,
        "loaded_bytes": pl.Int64,
        "disk_write_bytes": pl.Int64,
        "disk_read_bytes": pl.Int64,
        "stored_per_loaded": pl.Float64,
        "disk_written_per_read": pl.Float64,
        "stored_gb_per_1000": pl.Float64,  # GB a thousand requests
        "disk_written_gb_per_1000": pl.Float64,
    },
    # One row a pass of `ladder` × turn: requests that ended inside its window.
    "turns": {
        **_TRIAL,
        "workload": pl.String,
        "round": pl.Int64,
        "pool": pl.Int64,
        "working_set_tokens": pl.Int64,
        "steady": pl.Boolean,
        "turn": pl.Int64,  # from 0
        "n": pl.Int64,
        "prompt_tokens": pl.Int64,
        "cached_tokens": pl.Float64,  # as the server's usage says, median
        "ttft_median_s": pl.Float64,
    },
    # One row a setup that hit in `ladder` × order: where its hits fall to half of those of tiers without limits.
    "cliffs": {
        "setup": pl.String,
        "order": pl.String,
        "blocks": pl.Int64,
        "halved": pl.Int64,  # of them, blocks in which they did
        "tokens": pl.Float64,  # working set, interpolated, median over blocks; null unless they did in all
        "tokens_low": pl.Float64,
        "tokens_high": pl.Float64,
        "largest": pl.Int64,  # working set measured
        **{f"capacity_{tier}_tokens": pl.Int64 for tier in CACHES},
    },
    # One row a measurement of a link of a host.
    "rooflines": {
        "host_id": pl.String,  # null: an old file that doesn't say
        "measured_at": pl.String,
        "link": pl.String,
        "bytes": pl.Int64,
        "threads": pl.Int64,
        "chunk": pl.Int64,  # bytes of one file, of a disk
        "repeats": pl.Int64,
        "median_gb_per_s": pl.Float64,
        "min_gb_per_s": pl.Float64,
        "max_gb_per_s": pl.Float64,
    },
}


@dataclass(frozen=True)
class Tables:
    """All tables, plus ``context``: hosts, stacks, harness and, by setup, servers and effective configuration.

    ``requests`` may have more rows than fit in memory: whoever reads it takes the columns and rows that it needs.
    """

    trials: pl.DataFrame
    passes: pl.DataFrame
    requests: pl.LazyFrame
    metrics: pl.DataFrame
    summary: pl.DataFrame
    break_even: pl.DataFrame
    gates: pl.DataFrame
    right_kv: pl.DataFrame
    oracle: pl.DataFrame
    parity: pl.DataFrame
    limits: pl.DataFrame
    pcie_trace: pl.DataFrame
    pcie_bytes: pl.DataFrame
    held: pl.DataFrame
    sharing: pl.DataFrame
    ladder: pl.DataFrame
    turns: pl.DataFrame
    cliffs: pl.DataFrame
    rooflines: pl.DataFrame
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
    frames = {name: pl.read_parquet(folder / f"{name}.parquet") for name in SCHEMAS if name != "requests"}
    return Tables(
        **frames,
        requests=scan_requests(folder),
        context=json.loads((folder / "context.json").read_text(encoding="utf-8")),
    )


def scan_requests(folder: Path) -> pl.LazyFrame:
    """The table ``requests`` that `save` wrote, unread. Raises OSError where it is missing."""
    table = pl.scan_parquet(folder / "requests.parquet")
    table.collect_schema()
    return table


_FORMULA = r"^[=+\-@\t\r]"


def save(tables: Tables, folder: Path) -> None:
    """Write every table as parquet and CSV, and ``context.json``; equal tables give equal bytes.

    A spreadsheet runs a text cell that starts with ``= + - @`` as a formula; in the CSV such cells of text columns
    begin with an apostrophe. Numbers are left alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in SCHEMAS.items():
        path = folder / f"{name}.parquet"
        table: pl.DataFrame | pl.LazyFrame = getattr(tables, name)
        table.lazy().sink_parquet(path)
        texts = [column for column, kind in schema.items() if kind == pl.String]
        shown = pl.scan_parquet(path).with_columns(
            pl.when(pl.col(column).str.contains(_FORMULA))
            .then("'" + pl.col(column))
            .otherwise(pl.col(column))
            .alias(column)
            for column in texts
        )
        shown.sink_csv(folder / f"{name}.csv")
    text = json.dumps(tables.context, indent=1, sort_keys=True, ensure_ascii=False)
    (folder / "context.json").write_text(text + "\n", encoding="utf-8")
