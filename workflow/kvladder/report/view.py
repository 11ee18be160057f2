"""What the template shows: the tables, arranged and put into words. No markup is made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any

import polars as pl
import yaml

from kvladder.config.base import TIERS
from kvladder.config.pitfalls import PITFALLS
from kvladder.figures.parts.style import LABEL as FIGURE_LABEL
from kvladder.figures.parts.style import PASS_LABELS
from kvladder.report import decoding, ladder, sharing, sweeps
from kvladder.report.compared import compared
from kvladder.report.formats import UNKNOWN, listing, number, plural, scale, seconds, size, times
from kvladder.report.held import held
from kvladder.report.limits import limits
from kvladder.report.oracle import hits
from kvladder.report.values import Row, Setup, Value, cell, cost
from kvladder.report.words import Cell, describe_workload, labels, several, shorten, strong, verdict, workload_title
from kvladder.stats.samples import median
from kvladder.tables.labels import setup_labels, single_workloads
from kvladder.tables.model import CACHES, PASSES, Tables

MATRIX_SETUPS = 8
"""Setups up to which gates are shown setup by setup."""
PARITY_COLUMNS = 5
REASONS = 40
GLANCE_COLUMNS = 6


@dataclass(frozen=True)
class ResultRow:
    """A setup's line in the table of one workload."""

    setup: Setup
    ttft: list[Value]
    wall: list[Value]
    hits: list[dict[str, Any]]
    valid: str
    complete: bool


@dataclass(frozen=True)
class Result:
    """The table of one workload."""

    title: str
    what: str
    unit: str
    passes: list[str]
    wall: bool
    brackets: str
    rows: list[ResultRow]


def view(tables: Tables, config: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the templates need. `config` is the experiment's effective configuration as plain data."""
    planned = planned_trials(tables, config)
    setups = _setups(tables, config)
    context = tables.context
    names = {setup: strong(label) for setup, label in labels(tables).items()}
    return {
        "title": config.get("title") or f"KV-cache tiers: {config.get('experiment') or context.get('experiment')}",
        "experiment": config.get("experiment") or context.get("experiment"),
        "baseline": tables.baseline,
        "facts": _facts(tables, planned),
        "verdict": verdict(
            tables,
            planned,
            [part for each in (decoding, sweeps, sharing, ladder) for part in each.paragraphs(tables, names)],
        ),
        "glance": _glance(tables, setups),
        "compared": compared(tables, setups, config),
        "ours": _ours(tables, setups),
        "results": [_result(tables, setups, planned, *pair) for pair in single_workloads(tables, tables.passes)],
        "decoding": decoding.sections(tables, setups),
        "sweeps": sweeps.sections(tables, setups),
        "sharing": sharing.sections(tables, setups),
        "ladder": ladder.section(tables, setups),
        "shortened": [
            setup
            for setup in setups.values()
            if setup.title not in (setup.label, setup.drawn) or setup.label != setup.drawn
        ],
        "counts": _counts(tables, setups, planned),
        "lost": _lost(tables, setups),
        "right_kv": _right_kv(tables, setups),
        "oracle": hits(tables, setups),
        "gates": _gates(tables, setups),
        "parity": _parity(tables, setups),
        "startup": _startup(tables, setups),
        "held": held(tables, setups),
        "limits": limits(tables, setups),
        "environment": _environment(context),
        "servers": _servers(context, setups),
        "config_yaml": yaml.safe_dump(
            _plain(config), sort_keys=False, allow_unicode=True, width=100, default_flow_style=False
        ),
        "pitfalls": PITFALLS,
        "glossary": GLOSSARY,
        "data": tables.summary.filter(pl.col("metric").is_in(["ttft_s", "wall_s"])).to_dicts(),
    }


def planned_trials(tables: Tables, config: Mapping[str, Any]) -> dict[str, int]:
    """Trials by setup that the configuration asks for: suites × repeats."""
    suites = config.get("suites") or config.get("workloads") or {}
    return {setup: len(suites) * int(config.get("repeats", 0)) for setup in config.get("setups", {})}


def _plain(value: Any) -> Any:
    """Mappings and sequences as YAML knows them, without what is unset."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items() if each is not None and each not in ({}, [])}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _setups(tables: Tables, config: Mapping[str, Any]) -> dict[str, Setup]:
    titles = tables.titles()
    short = labels(tables, config.get("setups", {}))
    tiers = tables.tiers()
    drawn = setup_labels(tables, FIGURE_LABEL, short)
    result = {}
    for name, label in short.items():
        rows = tables.trials.filter(pl.col("setup") == name)
        badges = ["baseline"] if name == tables.baseline else []
        badges += ["A/A control"] if rows["control"].any() else []
        badges += ["control: device cache"] if tiers.get(name) == "gpu" else []
        badges += ["ours in the data path"] if rows["ours_in_path"].drop_nulls().len() else []
        result[name] = Setup(name, label, titles.get(name, name), drawn[name], badges)
    return result


def _facts(tables: Tables, planned: Mapping[str, int]) -> list[tuple[str, str]]:
    context, trials = tables.context, tables.trials
    valid = trials.filter(pl.col("status") == "valid").height
    total = max(sum(planned.values()), trials.height)
    counted = f"{valid:,} of {trials.height:,}"
    facts = [
        (
            "Trials counted",
            counted
            if total == trials.height
            else f"0 of {total:,}"
            if not trials.height
            else f"{counted} measured, {total:,} planned",
        )
    ]
    for host in context.get("hosts", [])[:1]:
        gpus = [str(gpu.get("name", "GPU")) for gpu in host.get("gpus", [])]
        machine = f"{host['cpu']}, {plural(host['cores'], 'core')}, {size(host['memory_bytes'])}"
        more = len(context["hosts"]) - 1
        facts.append(("Machine", ", ".join([machine, *gpus]) + (f" and {plural(more, 'other host')}" if more else "")))
    versions = sorted(set(trials["engine_version"].drop_nulls().to_list()))
    stacks = sorted({str(stack.get("stack")) for stack in context.get("stacks", [])})
    if versions or stacks:
        facts.append(("Engine", f"vLLM {', '.join(versions) or UNKNOWN}, stack {', '.join(stacks) or UNKNOWN}"))
    days = sorted({str(context[name])[:10] for name in ("first_started_at", "last_started_at") if context.get(name)})
    if days:
        facts.append(("Measured", " to ".join(days)))
    return facts


def _ours(tables: Tables, setups: Mapping[str, Setup]) -> list[tuple[str, str]]:
    """What of kvladder's own moves data, and in which setups."""
    rows = tables.trials.filter(pl.col("ours_in_path").is_not_null()).select("ours_in_path", "setup").unique()
    grouped: dict[str, list[str]] = {}
    order = list(setups)
    for text, setup in sorted(rows.iter_rows(), key=lambda row: (row[0], order.index(row[1]))):
        grouped.setdefault(text, []).append(setups[setup].label)
    return [(text, listing(those, 8)) for text, those in grouped.items()]


def _result(
    tables: Tables, setups: Mapping[str, Setup], planned: Mapping[str, int], suite: str, workload: str
) -> Result:
    keep = (pl.col("suite") == suite) & (pl.col("workload") == workload)
    wall = several(tables, suite, workload)
    metrics = ["ttft_s", "wall_s"] if wall else ["ttft_s"]
    rows = tables.summary.filter(keep & pl.col("metric").is_in(metrics))
    cells = {(row["setup"], row["metric"], row["pass"]): row for row in rows.iter_rows(named=True)}
    passes = [name for name in PASSES if name in set(rows["pass"])]
    factor, unit, decimals = scale(rows["median"].to_list())
    here = tables.passes.filter(keep).partition_by("setup", as_dict=True)
    status = tables.trials.filter(pl.col("suite") == suite)
    lines = []
    for setup in setups.values():
        mine = status.filter(pl.col("setup") == setup.name)
        good = mine.filter(pl.col("status") == "valid").height
        control = "A/A control" in setup.badges
        suites = max(1, len(tables.trials.select("suite").unique()))
        total = max(mine.height, planned.get(setup.name, 0) // suites)
        values = {
            metric: [
                cell(cells.get((setup.name, metric, name)), setup.name == tables.baseline, control, factor, decimals)
                for name in passes
            ]
            for metric in metrics
        }
        lines.append(
            ResultRow(
                setup=setup,
                ttft=values["ttft_s"],
                wall=values.get("wall_s", []),
                hits=_hits(here.get((setup.name,))),
                valid=f"{good} of {total}",
                complete=good == mine.height,
            )
        )
    blocks: dict[str, list[int]] = {}
    for row in cells.values():
        if row["interval"] in ("95 %", "range"):
            blocks.setdefault(row["interval"], []).append(row["blocks"])
    brackets = " or ".join(
        f"{'95 % interval' if kind == '95 %' else 'range'} of {_from_to(counts)} blocks"
        for kind, counts in sorted(blocks.items())
    )
    return Result(
        workload_title(tables, suite, workload),
        describe_workload(tables, suite, workload),
        unit,
        [PASS_LABELS[name] for name in passes],
        wall,
        brackets,
        lines,
    )


def _glance(tables: Tables, setups: Mapping[str, Setup]) -> dict[str, Any]:
    """The headline: a column for each workload's hit and for what the first request pays; rows are setups."""
    columns: list[dict[str, str]] = []
    cells: list[dict[str, Row]] = []
    for suite, workload in single_workloads(tables, tables.passes):
        wall = several(tables, suite, workload)
        metric = "wall_s" if wall else "ttft_s"
        hit = next((name for name in ("first-hit", "warm") if Cell(suite, workload, metric, name).rows(tables)), None)
        if hit is None:
            continue
        what = f"{'wall time' if wall else 'TTFT'}, {PASS_LABELS[hit]}"
        columns.append({"title": workload, "what": what, "kind": "time"})
        cells.append(Cell(suite, workload, metric, hit).rows(tables))
        if not wall:
            columns.append({"title": workload, "what": "first-request cost", "kind": "cost"})
            cells.append(Cell(suite, workload, metric, "cold").rows(tables))
    columns, cells = columns[:GLANCE_COLUMNS], cells[:GLANCE_COLUMNS]
    scales = [
        scale(row["median"] for row in cell.values()) if column["kind"] == "time" else None
        for column, cell in zip(columns, cells, strict=True)
    ]
    rows = [
        (setup, [_glimpse(cell.get(name), scaled, setup.badges) for cell, scaled in zip(cells, scales, strict=True)])
        for name, setup in setups.items()
        if any(name in cell for cell in cells)
    ]
    return {"columns": columns, "rows": rows}


def _glimpse(row: Row | None, scaled: tuple[float, str, int] | None, badges: Sequence[str]) -> Value:
    """A cell of the headline: how long, and how many times the baseline's speed; or what the cold pass costs."""
    is_baseline, is_control = "baseline" in badges, "A/A control" in badges
    if row is None:
        return Value(UNKNOWN)
    notes = []
    if not is_baseline and row["ratio"] is None:
        notes = ["no block in common"]
    elif not is_baseline and row["ratio_low"] is None:
        notes = ["one block, no range"]
    elif row["within_noise"] and not is_control:
        notes = ["within noise"]
    if scaled is None:
        return cost(row, is_baseline, notes)
    factor, unit, decimals = scaled
    middles = [row["median"]] if row["mode_low"] is None else [row["mode_low"], row["mode_high"]]
    time = " / ".join(number(each * factor, decimals) for each in middles) + f" {unit}"
    notes = ["two modes", *notes] if len(middles) > 1 else notes
    if is_baseline or row["ratio"] is None or row["within_noise"] or not row["ratio"]:
        return Value(time, notes=notes)
    speed = f"{times(1 / row['ratio'])} as fast" if row["ratio"] < 1 else f"{times(row['ratio'])} the time"
    return Value(time, speed, notes=notes)


def _from_to(counts: Sequence[int]) -> str:
    return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _hits(passes: pl.DataFrame | None) -> list[dict[str, Any]]:
    """By hit pass: tokens of a pass that weren't computed, by tier, over all valid trials' passes (mean)."""
    result: list[dict[str, Any]] = []
    for name in ("first-hit", "warm"):
        rows = None if passes is None else passes.filter(pl.col("pass") == name)
        if rows is None or not rows.height:
            continue
        means = {tier: rows[f"tokens_{tier}"].mean() for tier in TIERS}
        total = sum(value for value in means.values() if isinstance(value, float))
        known = {tier: value for tier, value in means.items() if tier in CACHES and isinstance(value, float)}
        if not total or not known:
            result.append({"pass": PASS_LABELS[name], "text": UNKNOWN, "bar": []})
            continue
        parts = [f"{tier} {value:,.0f}" for tier, value in known.items() if value]
        bar = [(tier, round(100 * value / total, 2)) for tier, value in known.items() if value]
        result.append({"pass": PASS_LABELS[name], "text": f"{', '.join(parts) or '0'} of {total:,.0f}", "bar": bar})
    if len(result) == 2 and result[0]["text"] == result[1]["text"]:
        return [{**result[0], "pass": ""}]
    return result


def _counts(tables: Tables, setups: Mapping[str, Setup], planned: Mapping[str, int]) -> list[Row]:
    rows = []
    for setup in setups.values():
        mine = tables.trials.filter(pl.col("setup") == setup.name)
        count = {name: mine.filter(pl.col("status") == name).height for name in ("valid", "invalid", "failed")}
        total = max(mine.height, planned.get(setup.name, 0))
        rows.append({"setup": setup, "planned": total, **count, "missing": total - mine.height})
    return rows


def _lost(tables: Tables, setups: Mapping[str, Setup]) -> dict[str, Any]:
    """Trials that don't count, those with one reason together."""
    order = list(setups)
    rows = tables.trials.filter(pl.col("status") != "valid").sort("suite", "repeat", maintain_order=True)
    grouped: dict[tuple[str, str, str, str], list[int]] = {}
    for row in rows.iter_rows(named=True):
        key = (row["setup"], row["suite"], row["status"], shorten(row["reason"] or "no reason was recorded", 600))
        grouped.setdefault(key, []).append(row["repeat"])
    groups = [
        {
            "setup": setups[key[0]],
            "suite": key[1],
            "status": key[2],
            "reason": key[3],
            "repeats": ", ".join(map(str, repeats)),
        }
        for key, repeats in sorted(grouped.items(), key=lambda item: order.index(item[0][0]))
    ]
    return {"groups": groups[:REASONS], "more": max(0, len(groups) - REASONS)}


def _right_kv(tables: Tables, setups: Mapping[str, Setup]) -> dict[str, Any]:
    """By setup with a tier how far its hits are from computing, and in one sentence what came of it."""
    rows, found = [], dict[str, list[str]]()
    reasons = tables.gates.filter((pl.col("gate") == "right-kv") & (pl.col("decision") == "not-checked"))
    tiers = tables.tiers()
    for setup in setups.values():
        if setup.name not in tiers:
            continue
        mine = tables.right_kv.filter(pl.col("setup") == setup.name)
        groups = [_right_kv_group(mine.filter(pl.col("pass") == name)) for name in ("first-hit", "warm")]
        verdicts = set(mine["verdict"])
        result = next((word for word in ("wrong", "not checked", "right") if word in verdicts), "not checked")
        label = setup.label
        if result == "wrong" and not all(group["bad"] for group in groups):
            label += " (first hits only)" if groups[0]["bad"] else " (later hits only)"
        found.setdefault(result, []).append(label)
        why = reasons.filter(pl.col("setup") == setup.name)["seen"].mode().sort().to_list()
        limit = mine["limit"].drop_nulls().to_list()
        rows.append(
            {
                "setup": setup,
                "groups": groups,
                "limit": f"{max(limit):.3f}" if limit else UNKNOWN,
                "verdict": result,
                "why": shorten(why[0]) if why and result == "not checked" else "",
            }
        )
    parts = [f"{word} in {listing(found[word], 8)}" for word in ("wrong", "right", "not checked") if word in found]
    return {"rows": rows, "sentence": f"Loaded KV is {'; '.join(parts)}." if parts else ""}


def _right_kv_group(rows: pl.DataFrame) -> dict[str, Any]:
    """First or later hits of a setup, over all of its trials that were compared."""
    if not rows.height:
        return {"median": UNKNOWN, "largest": UNKNOWN, "beyond": UNKNOWN, "flipped": UNKNOWN, "bad": False}
    prompts = rows["prompts"].sum()
    beyond = None if rows["beyond"].null_count() else rows["beyond"].sum()
    return {
        "median": number(median(rows["median"].to_list()), 3),
        "largest": number(max(rows["max"].to_list()), 3),
        "beyond": UNKNOWN if beyond is None else f"{beyond} of {prompts}",
        "flipped": f"{rows['flipped'].sum()} of {prompts}",
        "bad": bool(beyond),
    }


def _gates(tables: Tables, setups: Mapping[str, Setup]) -> dict[str, Any]:
    """Gates by setup for a few setups, else gates with the setups that stand out."""
    gates = tables.gates
    names = sorted(gates["gate"].unique())
    judged = [setup for setup in setups.values() if setup.name in set(gates["setup"])]
    matrix = len(judged) <= MATRIX_SETUPS
    counted = gates.group_by("gate", "setup", "decision").agg(pl.col("repeat").len()).iter_rows()
    cells: dict[tuple[str, str], dict[str, int]] = {}
    for gate, setup, decision, count in counted:
        cells.setdefault((gate, setup), {})[decision] = count
    required = {gate: bool(need) for gate, need in gates.group_by("gate").agg(pl.col("required").any()).iter_rows()}
    rows = []
    for name in names:
        by_setup = [(setup, cells.get((name, setup.name), {})) for setup in judged]
        rows.append(
            {
                "gate": name,
                "required": required[name],
                "cells": [_decision(count) for _, count in by_setup] if matrix else [],
                **{
                    decision.replace("-", "_"): sum(count.get(decision, 0) for _, count in by_setup)
                    for decision in ("pass", "fail", "not-checked")
                },
                "failed_in": listing([setup.label for setup, count in by_setup if count.get("fail")], 4),
                "unchecked_in": listing([setup.label for setup, count in by_setup if count.get("not-checked")], 4),
            }
        )
    return {"rows": rows, "setups": judged if matrix else [], "matrix": matrix}


def _decision(count: Mapping[str, int]) -> tuple[str, str]:
    """Class and text of a cell: the worst decision leads."""
    total = sum(count.values())
    if not total:
        return "none", UNKNOWN
    for decision, words in (("fail", "fail"), ("not-checked", "not checked")):
        if count.get(decision):
            return decision, f"{words} {count[decision]}/{total}" if count[decision] < total else words
    return "pass", "pass"


def _parity(tables: Tables, setups: Mapping[str, Setup]) -> dict[str, Any]:
    """Properties that are the same in all setups, and tables of those that differ."""
    rows = list(tables.parity.iter_rows(named=True))
    names = list(dict.fromkeys(row["property"] for row in rows))
    have = {row["setup"] for row in rows}
    same, differing = [], []
    for name in names:
        mine = [row for row in rows if row["property"] == name]
        distinct = {(row["asked"], row["measured"]) for row in mine}
        if len(distinct) == 1 and {row["setup"] for row in mine} == have:
            same.append({"property": name, **_shown(mine[0])})
        else:
            differing.append(name)
    cells = {(row["setup"], row["property"]): _shown(row) for row in rows}
    nothing = {"asked": UNKNOWN, "measured": UNKNOWN, "agrees": None}
    chunks = []
    for start in range(0, len(differing), PARITY_COLUMNS):
        columns = differing[start : start + PARITY_COLUMNS]
        lines = [
            (setup, [cells.get((setup.name, column), nothing) for column in columns])
            for setup in setups.values()
            if setup.name in have
        ]
        chunks.append({"columns": columns, "rows": lines})
    wrong = [f"{setups[row['setup']].label}: {row['property']}" for row in rows if row["agrees"] is False]
    return {"same": same, "chunks": chunks, "wrong": listing(wrong, 8)}


def _shown(row: Row) -> Row:
    def text(value: str | None) -> str:
        if value is None:
            return UNKNOWN
        if not value.isdigit():
            return value
        if row["unit"] == "bytes" and int(value) >= 1 << 20:
            return size(int(value))
        return f"{int(value):,}" + (f" {row['unit']}" if row["unit"] else "")

    return {"asked": text(row["asked"]), "measured": text(row["measured"]), "agrees": row["agrees"]}


def _startup(tables: Tables, setups: Mapping[str, Setup]) -> list[Row]:
    rows = []
    for setup in setups.values():
        mine = tables.trials.filter((pl.col("setup") == setup.name) & (pl.col("status") == "valid"))
        starts = mine["startup_s"].drop_nulls().to_list()
        durable = tables.metrics.filter(
            (pl.col("setup") == setup.name) & (pl.col("metric") == "durable_s") & (pl.col("pass") == "cold")
        )
        rows.append(
            {
                "setup": setup,
                "n": mine.height,
                "startup": number(median(starts), 1),
                "startup_range": f"{min(starts):.1f}–{max(starts):.1f}" if starts else UNKNOWN,
                "memory": size(median(mine["rss_bytes"].to_list())),
                "durable": seconds(median(durable["value"].to_list())),
                "durable_most": _longest(durable),
            }
        )
    return rows


def _longest(durable: pl.DataFrame) -> str:
    """The longest time to durable and the workload after which it was, where that isn't what all took."""
    known = durable.filter(pl.col("value").is_not_null()).sort("value", descending=True)
    if known["value"].n_unique() < 2:
        return ""
    return f"at most {seconds(known['value'][0])}, {known['workload'][0]}"


def _gpu(gpu: Mapping[str, Any]) -> str:
    """``NVIDIA H200, 140 GiB, PCIe Gen5, ×16, driver 580.159.04, device 0``; what isn't known is left out."""
    words = {
        "name": "{}",
        "memory_bytes": "{}",
        "pcie_generation_max": "PCIe Gen{}",
        "pcie_width_max": "×{}",
        "driver": "driver {}",
        "device": "device {}",
        "uuid": "{}",
    }
    known = {**gpu, "memory_bytes": size(gpu["memory_bytes"])} if "memory_bytes" in gpu else gpu
    return ", ".join(text.format(known[key]) for key, text in words.items() if key in known)


def _environment(context: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Blocks of name and value: hosts, stacks with their packages and patches, harness."""
    blocks = []
    for host in context.get("hosts", []):
        rows = [
            ("CPU", f"{host['cpu']}, {plural(host['cores'], 'core')}"),
            ("Memory", size(host["memory_bytes"])),
            ("Kernel", host["kernel"]),
            ("Host id", host["host_id"]),
        ]
        rows += [(f"GPU {place}", _gpu(gpu)) for place, gpu in enumerate(host.get("gpus", []))]
        blocks.append(("Host", rows))
    for stack in context.get("stacks", []):
        rows = [(key, _short(value)) for key, value in sorted(stack.items()) if not isinstance(value, dict | list)]
        packages = stack.get("packages") or {}
        rows.append(
            ("packages", ", ".join(f"{name} {version}" for name, version in sorted(packages.items())) or UNKNOWN)
        )
        patches = stack.get("patches") or {}
        rows.append(("patches", ", ".join(f"{name} ({_short(digest)})" for name, digest in patches.items()) or "none"))
        blocks.append((f"Stack {stack.get('stack', '')}", rows))
    blocks += [
        ("Harness", sorted((key, _short(value)) for key, value in each.items())) for each in context.get("harness", [])
    ]
    return blocks


def _short(value: Any) -> str:
    """Hashes are shown by their beginning, as everywhere."""
    text = str(value)
    return f"{text[:12]}…" if len(text) >= 40 and all(digit in "0123456789abcdef" for digit in text) else text


def _servers(context: Mapping[str, Any], setups: Mapping[str, Setup]) -> dict[str, Any]:
    """Command lines by setup, as run in one of its trials."""
    most = 12
    environments = [
        set(server["env"].items())
        for name in setups
        if name in context.get("setups", {})
        for server in context["setups"][name]["servers"]
    ]
    # What every server gets is said once; the rest of each is short enough to be read.
    common = set.intersection(*environments) if len(environments) > 1 else set()
    shown = [
        {
            "setup": setup,
            "processes": [
                {
                    "name": server["name"],
                    "argv": _command(server["argv"]),
                    "env": sorted(set(server["env"].items()) - common),
                }
                for server in context["setups"][name]["servers"]
            ],
        }
        for name, setup in setups.items()
        if name in context.get("setups", {})
    ]
    return {"shown": shown[:most], "more": max(0, len(shown) - most), "common": sorted(common)}


def _command(argv: Sequence[str]) -> str:
    """A command line to read, quoted for a shell, its options one a line."""
    lines: list[str] = []
    for word in argv:
        if word.startswith("--") or not lines:
            lines.append(quote(word))
        else:
            lines[-1] += f" {quote(word)}"
    return " \\\n  ".join(lines)


GLOSSARY: list[tuple[str, str]] = [
    ("TTFT", "Time to first token: request bytes handed to the socket until the first chunk that carries a token."),
    ("Wall time", "From a pass's first request sent until its last one answered."),
    ("TPOT", "Time per output token: from the first token to the last one, ÷ the tokens after the first."),
    ("ITL", "Inter-token latency: between two chunks that carry tokens. A request counts with its median."),
    ("Break-even", "Prompt length from which a hit has a shorter TTFT than the baseline, which computes the prompt."),
    ("Cold", "The first pass: nothing is cached, every prompt is computed and, where there is a tier, stored."),
    ("First hit", "The same prompts again, once everything is stored: the first load of what was stored."),
    ("Warm", "Later rounds of the same prompts. The median is over all of them."),
    ("Mixed", "A pass of conversations: prompts that are new, that are hit and that were evicted meanwhile."),
    ("Working set", "Conversations open at a time × tokens of a whole one: what would have to be kept to hit always."),
    ("Tier", "Where KV lies: gpu (the engine's own device cache), cpu, nvme, remote. Computed: made anew."),
    ("Hit tokens", "Prompt tokens whose KV was loaded instead of computed, as the engine's counters say."),
    ("Trial", "One setup, one repeat: fresh servers, one lifetime. It contributes one number to each statistic."),
    (
        "Block",
        "All trials of one repeat. Setups are compared inside a block, so that slow changes of the machine cancel.",
    ),
    ("Ratio", "Setup ÷ baseline in the same block; the median over blocks. Below 1 is faster, for times."),
    (
        "Range",
        "Smallest and largest ratio seen. With fewer than six blocks more than that can't be said. It counts as a "
        "difference only if it lies far enough beside 1 for its width and the number of blocks.",
    ),
    (
        "95 % interval",
        "Of the median ratio, from the ordered ratios: it covers the true one in 95 % of experiments or more, whatever "
        "the noise looks like.",
    ),
    (
        "Within noise",
        "The interval includes 1 or meets what equal setups show against each other; or it is a range that lies too "
        "near to 1 for its width.",
    ),
    (
        "Would have been seen",
        "How large a difference must be for 4 of 5 such experiments to tell it from noise, going by the spread of the "
        "ratios between blocks. Known from six blocks on.",
    ),
    (
        "Deviation",
        "How far a hit's answer is from the same prompt's computed: the largest difference of log probability over the "
        "20 most probable first tokens.",
    ),
    ("Valid", "Every required gate passed. Invalid trials ran, but a gate failed; failed ones did not finish."),
    ("Gate", "A check of one trial: pass, fail or not checked. What is unknown never passes."),
    (
        "Roofline",
        "The highest rate that a link was measured to reach on the trial’s own host; no transfer goes beyond it.",
    ),
    ("–", "Unknown or not applicable; never zero."),
]
