"""The truth bench's report, from its tables and figures only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from kvladder.bench.figures import FIGURES
from kvladder.bench.tables import AT_LEAST, COMPARED, OWN, TITLES, BenchTables, comparisons, load, place
from kvladder.report import page
from kvladder.report.formats import UNKNOWN, listing, number, plural, significant, size
from kvladder.report.words import Paragraph, strong

Row = dict[str, Any]

TITLE = "How truly do load clients measure?"

FAULTS = {
    "empty-first": ("sends an empty chunk before the first token", True),
    "no-text": ("sends chunks that carry no token at all", False),
    "several": ("puts several tokens into a chunk", True),
    "stall": ("falls silent for 2 s in the middle", True),
    "no-done": ("ends without [DONE]", True),
    "short": ("closes cleanly after half of the tokens", False),
    "error-200": ("sends an error object after HTTP 200 and half of the tokens", False),
    "http-500": ("answers HTTP 500", False),
    "http-429": ("answers HTTP 429", False),
    "crlf": ("ends lines with CR LF", True),
    "comments": ("sends a comment before each event", True),
    "usage": ("puts usage into every chunk", True),
    "cut": ("cuts its bytes anywhere", True),
    "endless": ("never stops sending tokens", False),
}
"""What the server does under a fault's name, and whether the answer is whole all the same."""

GLOSSARY = [
    (
        "Bias",
        "TTFT that a client reports, less the one that the server's log proves: start of the first token's write less "
        "arrival of the request's first byte. What the server does late is in both, so it is nobody's bias.",
    ),
    (
        "Clock",
        "CLOCK_MONOTONIC in nanoseconds. The kernel stamps a request's arrival at the server's socket, the server "
        "stamps each write right before it. Durations are compared, never moments of different clocks.",
    ),
    ("Gap error", "Size of: gap between two chunks as the client reports it, less the gap between their writes."),
    ("First wave", "As many requests as are kept in flight: the ones sent first, all at once."),
    ("Held", "Mean requests in flight at the server while the client still had something to send, of those asked for."),
    ("CPU", "Of all of a client's processes, from the first arrival to the last write; start-up isn't in it."),
    ("Peak memory", "Sum of the resident sizes of all of a client's processes; start-up is in it."),
]

_MS = (
    ("ttft_bias_p50_ms", "TTFT bias p50, ms"),
    ("ttft_bias_p99_ms", "p99, ms"),
    ("first_wave_bias_max_ms", "First wave, largest, ms"),
    ("gap_error_p99_ms", "Gap error p99, ms"),
)
_COST = (("cpu_s_per_1000", "CPU s per 1,000"), ("peak_rss_mb", "Peak MB"))
_REFERENCE = 256
"""Requests in flight at which the clients are named beside each other, where all were measured at it."""


def build(tables_dir: Path, figures_dir: Path, out_html: Path, out_pdf: Path, config: Mapping[str, Any]) -> None:
    """Write HTML (one file, no network) and PDF. Equal inputs give equal files.

    ``tables_dir`` is what `kvladder.bench.tables.build` wrote, ``figures_dir`` holds `kvladder.bench.figures.FIGURES`,
    ``config`` is the bench's configuration as plain data.
    """
    figures = [page.drawing(figures_dir, module) for module in FIGURES.values()]
    seen = {**view(load(tables_dir), config), "figures": figures}
    for path in (out_html, out_pdf):
        path.parent.mkdir(parents=True, exist_ok=True)
    out_html.write_text(page.render("client_truth.html.j2", seen, paged=False), encoding="utf-8")
    out_pdf.write_bytes(page.pdf(page.render("client_truth.html.j2", seen, paged=True)))


def view(tables: BenchTables, config: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the template shows, but the figures."""
    rows = tables.cells.to_dicts()
    goals = tables.goals.to_dicts()
    return {
        "title": TITLE,
        "experiment": config["experiment"],
        "facts": _facts(tables),
        "verdict": _verdict(rows, goals),
        "goals": [_goal(row) for row in goals],
        "points": _points(rows),
        "rates": _rates(rows),
        "faults": _faults(rows),
        "server": _server(rows),
        "limits": _limits(rows),
        "machines": [_machine(row) for row in tables.machines.to_dicts()],
        "versions": _versions(rows),
        "config_yaml": yaml.safe_dump(dict(config), sort_keys=False, default_flow_style=None, width=100),
        "glossary": GLOSSARY,
    }


def _versions(rows: Iterable[Row]) -> list[tuple[str, str]]:
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row["client"], set()).add(row["version"])
    return [(title, listing(sorted(found[name]))) for name, title in TITLES.items() if name in found]


def _facts(tables: BenchTables) -> list[tuple[str, str]]:
    cells = tables.cells
    machines = [_machine(row)["text"] for row in tables.machines.to_dicts()]
    runs = f"{plural(cells.height, 'run')} of {plural(cells['client'].n_unique(), 'client')}"
    return [
        ("Measured", f"{runs}, {plural(int(cells['served'].sum()), 'request')}"),
        ("Goals", _counts(tables.goals["met"].to_list())),
        ("Machine", listing(machines) or UNKNOWN),
    ]


def _counts(decisions: list[bool | None]) -> str:
    """``7 of 9 met, 1 missed, 1 not checked``."""
    words = [f"{decisions.count(True)} of {len(decisions)} met"]
    words += [f"{decisions.count(False)} missed"] if False in decisions else []
    words += [f"{decisions.count(None)} not checked"] if None in decisions else []
    return ", ".join(words)


def _machine(row: Row) -> Row:
    text = f"{row['cpu']}, {plural(row['cores'], 'core')}, {size(row['memory_bytes'])}"
    return {**row, "text": text, "memory": size(row["memory_bytes"])}


def _limit(goal: Row) -> str:
    return f"{'≥' if goal['column'] in AT_LEAST else '≤'}\N{NO-BREAK SPACE}{goal['limit']:,g}"


def _goal(goal: Row) -> Row:
    """A goal's row; ``decision`` and ``style`` as gates have them in the other report."""
    decision, style = {True: ("met", "pass"), False: ("missed", "fail"), None: ("not checked", "not-checked")}[
        goal["met"]
    ]
    missing = f"{goal['unknown']} of {plural(goal['cells'], 'cell')} without a value" if goal["unknown"] else ""
    if not goal["cells"]:
        missing = "no such cell was measured"
    return {
        "goal": goal["goal"],
        "limit": _limit(goal),
        "worst": significant(goal["worst"]),
        "where": goal["where"] or UNKNOWN,
        "decision": decision,
        "style": style,
        "missing": missing,
    }


def _verdict(rows: list[Row], goals: list[Row]) -> list[Paragraph]:
    own = TITLES[OWN]
    details = []
    for goal in goals:
        shown = _goal(goal)
        if goal["met"] is not True:
            reached = (
                "" if goal["worst"] is None else f"{shown['worst']} at {shown['where']}, the goal is {shown['limit']}"
            )
            words = "; ".join(part for part in (reached, shown["missing"]) if part)
            details.append(f"{strong(shown['decision'].capitalize())}: {shown['goal']}: {words}.")
    found = [Paragraph("Goals", f"{strong(own)} on one core: {_counts([g['met'] for g in goals])}.", details)]
    found += [each for each in (_beside(rows), _better(rows), _misread(rows)) if each is not None]
    method = (
        "A bias is the TTFT that a client reports less the one that the server's log proves. The server is a program "
        "in C that answers on schedule and stamps each arrival and each write; its own lateness is in no bias."
    )
    return [*found, Paragraph("", method, [])]


def _beside(rows: list[Row]) -> Paragraph | None:
    """Every client at the one point that says most."""
    levels: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        if row["kind"] == "schedule" and row["cores"] == 1 and row["ttft_bias_p50_ms"] is not None:
            levels.setdefault((row["prompt_tokens"], row["concurrency"]), []).append(row)
    if not levels:
        return None
    most = max(len({row["client"] for row in here}) for here in levels.values())
    full = [key for key, here in levels.items() if len({row["client"] for row in here}) == most]
    shortest = min(length for length, _ in full)
    level = min((c for length, c in full if length == shortest), key=lambda c: (c != _REFERENCE, -c))
    here = sorted(levels[shortest, level], key=_rank)
    details = []
    for row in here:
        off = f"off by {significant(row['ttft_bias_p50_ms'])} ms (p50)"
        if row["ttft_bias_p99_ms"] is not None:
            off += f" and {significant(row['ttft_bias_p99_ms'])} ms (p99)"
        kept = f"{number(row['held'])} of {level:,} kept in flight"
        cost = f"{significant(row['cpu_s_per_1000'])} CPU s per 1,000 requests, {number(row['peak_rss_mb'])} MB"
        details.append(f"{strong(TITLES[row['client']])}{_run(row, rows)}: {off}; {kept}; {cost}.")
    return Paragraph(
        "Beside each other", f"TTFT at {level:,} in flight, prompts of {shortest:,} ids, one core:", details
    )


def _better(rows: list[Row]) -> Paragraph:
    """Where a peer is better, one line a client and column."""
    compared = comparisons(rows)
    groups: dict[tuple[str, str], list[str]] = {}
    for each in compared:
        if each.better:
            values = f"{each.place} ({significant(each.theirs)} against {significant(each.mine)})"
            groups.setdefault((each.client, each.column), []).append(values)
    count = sum(map(len, groups.values()))
    lead = f"A peer is better in {count} of {plural(len(compared), 'comparison')} on as many cores."
    details = [
        f"{strong(TITLES[client])}: {COMPARED[column]} at {'; '.join(values)}."
        for (client, column), values in groups.items()
    ]
    return Paragraph("Where a peer is better", lead, details)


def _misread(rows: list[Row]) -> Paragraph | None:
    """Clients that took a broken answer for a whole one, or hung."""
    tried = [row for row in rows if row["kind"] in FAULTS]
    if not tried:
        return None
    wrong: dict[str, list[str]] = {}
    for row in tried:
        what, whole = FAULTS[row["kind"]]
        if row["stopped"]:
            says = f"was still running after {row['wall_s']:.0f} s when the server {what}"
        elif row["client_failed"] if whole else row["client_ok"]:
            says = f"calls it {'failed' if whole else 'success'} when the server {what}"
        else:
            continue
        wrong.setdefault(row["client"], []).append(says)
    names = {row["client"] for row in tried}
    right = [title for name, title in TITLES.items() if name in names and name not in wrong]
    details = [f"{strong(title)} {'; '.join(wrong[name])}." for name, title in TITLES.items() if name in wrong]
    lead = f"Taken for what they are, all that were tried: by {listing(right) or 'no client'}."
    return Paragraph("Streams that misbehave", lead, details)


def _run(row: Row, rows: Iterable[Row]) -> str:
    """Which run it is, where cells were measured several times."""
    return f", run {row['repeat'] + 1}" if any(each["repeat"] for each in rows) else ""


def _label(row: Row, rows: Iterable[Row]) -> str:
    cores = "" if row["cores"] == 1 else f", {row['cores']} cores{' (one the server’s)' if row['shared_core'] else ''}"
    return f"{TITLES[row['client']]}{cores}{_run(row, rows)}"


def _rank(row: Row) -> int:
    """A client's place in the order of `TITLES`."""
    return list(TITLES).index(row["client"])


def _values(row: Row, columns: Iterable[tuple[str, str]]) -> list[str]:
    return [significant(row[name]) for name, _ in columns]


def _points(rows: list[Row]) -> list[Row]:
    """One table a prompt length, grouped by level; a client that gave no result says why."""
    found: dict[int, dict[int, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: (row["cores"], _rank(row), row["repeat"])):
        if row["kind"] == "schedule":
            levels = found.setdefault(row["prompt_tokens"], {})
            share = None if row["held_share"] is None else row["held_share"] * 100
            values = [*_values(row, _MS), significant(share), *_values(row, _COST), f"{row['paired']:,}"]
            line = {"label": _label(row, rows), "own": row["client"] == OWN, "values": values, "note": _trouble(row)}
            levels.setdefault(row["concurrency"], []).append(line)
    columns = [*(title for _, title in _MS), "Held, %", *(title for _, title in _COST), "Requests"]
    return [
        {
            "title": f"Prompts of {length:,} ids",
            "columns": columns,
            "levels": sorted(levels.items()),
        }
        for length, levels in sorted(found.items())
    ]


def _stopped(row: Row) -> str:
    return f"stopped after {row['wall_s']:.0f}\N{NO-BREAK SPACE}s"


def _trouble(row: Row) -> str:
    if row["stopped"]:
        return _stopped(row)
    if row["error"]:
        return "no usable result"
    return f"{row['client_failed']} failed" if row["client_failed"] else ""


def _rates(rows: list[Row]) -> list[Row]:
    rates = sorted((row for row in rows if row["kind"] == "rate"), key=_rank)
    return [
        {
            "label": _label(row, rows),
            "own": row["client"] == OWN,
            "level": row["concurrency"],
            "values": [significant(row["rate_per_s"]), *_values(row, _COST), f"{row['served']:,}"],
            "note": _trouble(row),
        }
        for row in rates
    ]


def _faults(rows: list[Row]) -> Row:
    """A matrix: what the server does × what each client calls it."""
    clients = [name for name in TITLES if any(row["client"] == name and row["kind"] in FAULTS for row in rows)]
    lines = []
    for fault, (what, whole) in FAULTS.items():
        here = {row["client"]: row for row in rows if row["kind"] == fault}
        if here:
            cells = [_call(here.get(name), whole) for name in clients]
            lines.append({"what": what, "right": "ok" if whole else "failed", "cells": cells})
    return {"clients": [TITLES[name] for name in clients], "rows": lines}


def _call(row: Row | None, whole: bool) -> Row:
    """What a client says of its streams; ``wrong`` where that isn't so."""
    if row is None:
        return {"text": UNKNOWN, "wrong": False, "note": ""}
    if row["client_ok"] is None:
        ended = _stopped(row) if row["stopped"] else "no usable result"
        return {"text": "no answer", "wrong": True, "note": ended}
    parts = [f"{row['client_ok']} ok"] if row["client_ok"] else []
    parts += [f"{row['client_failed']} failed"] if row["client_failed"] else []
    wrong = bool(row["client_failed"] if whole else row["client_ok"]) or row["stopped"]
    gap, written = row["longest_gap_seen_ms"], row["longest_gap_written_ms"]
    note = f"longest gap {number(gap)} of {number(written)} ms" if row["kind"] == "stall" else ""
    return {"text": ", ".join(parts) or "none", "wrong": wrong, "note": note}


_SERVER = (
    ("server_jitter_p50_ms", "Write late, p50", median),
    ("server_jitter_p99_ms", "p99, worst cell", max),
    ("server_jitter_max_ms", "Largest", max),
    ("server_read_late_p99_ms", "Read late p99, worst cell", max),
    ("server_write_p99_ms", "Write took p99, worst cell", max),
)


def _server(rows: list[Row]) -> Row:
    """How punctual the server was, by prompt length and level; a core that it shared apart."""
    groups: dict[tuple[int, int, bool], list[Row]] = {}
    for row in rows:
        if row["kind"] == "schedule":
            groups.setdefault((row["prompt_tokens"], row["concurrency"], row["shared_core"]), []).append(row)
    lines = []
    for (length, level, shared), here in sorted(groups.items()):
        values = []
        for column, _, combine in _SERVER:
            known = [row[column] for row in here if row[column] is not None]
            values.append(significant(combine(known)) if known else UNKNOWN)
        label = f"{length:,} ids, {level:,} in flight{', core shared with the client' if shared else ''}"
        lines.append({"label": label, "values": values, "cells": len(here)})
    return {"columns": [f"{title}, ms" for _, title, _ in _SERVER], "rows": lines}


def _limits(rows: list[Row]) -> list[str]:
    """What these numbers can't say, as far as it concerns what was measured."""
    found = [
        "Client and server talk over loopback on one machine: no network's delay or loss is in any number.",
        "Memory is a sum of resident sizes, so pages that a client's processes share count once for each process.",
        "Clients that can't send token ids send text of as many bytes. Each client is started anew for each cell.",
        "This project's own client reports the CPU time of its pass; the others' is sampled ten times a second from "
        "outside and interpolated between samples.",
    ]
    if any(row["client"] == OWN and row["cores"] > 1 for row in rows):
        found.append(
            "On several cores this project's own client runs a process on each; the others run as many as they like."
        )
    if any(row["shared_core"] for row in rows):
        found.append(
            "Clients on as many cores as the machine has share one with the server, which is late because of them; its "
            "lateness is in no bias, but their wait for the core is."
        )
    thin = [row for row in rows if row["kind"] == "schedule" and row["paired"] and row["ttft_bias_p99_ms"] is None]
    if thin:
        places = dict.fromkeys(f"{TITLES[row['client']]}, {place(row)}" for row in thin)
        found.append(f"Fewer than 500 requests beyond the first wave carry no 99th percentile: {listing(places, 12)}.")
    if rows and not any(row["repeat"] for row in rows):
        found.append("Each cell was run once: how much a number would move from run to run isn't known.")
    return found
