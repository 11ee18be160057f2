"""Asked against measured, by setup: what has to be equal for a fair comparison, and whether it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import polars as pl

from kvladder.gates.base import HITS, Evidence, Unreadable
from kvladder.tables.model import CELL
from kvladder.tables.raw import RawTrial
from kvladder.trial.engine import cores

Row = dict[str, Any]


def parity(raw: Sequence[RawTrial], passes: pl.DataFrame) -> Iterable[Row]:
    """Rows of the table ``parity``. Trials that aren't valid are looked at only where a setup has no valid one."""
    setups = sorted({trial.setup for trial in raw})
    for setup in setups:
        mine = [trial for trial in raw if trial.setup == setup and trial.record is not None]
        mine = [trial for trial in mine if trial.status == "valid"] or mine
        if mine:
            for row in _of_setup(mine, passes.filter(pl.col("setup") == setup)):
                yield {"setup": setup, **row}


def _of_setup(trials: Sequence[RawTrial], passes: pl.DataFrame) -> Iterable[Row]:
    records = [trial.record for trial in trials if trial.record is not None]
    first = records[0]
    engine, expected = first.config.get("engine", {}), first.expected
    per_token = expected.get("kv_bytes_per_token")
    effective = [record.effective for record in records]
    block = effective[0].block_size

    asked_pool = _asked_pool(engine, per_token, block)
    pools = {each.kv_pool_tokens for each in effective}
    yield _row("device KV pool", "tokens", asked_pool, pools, slack=block or 0)
    yield _row("KV block", "tokens", engine.get("block_size"), {each.block_size for each in effective})
    yield _row("prefix caching", None, expected.get("prefix_caching"), {each.prefix_caching for each in effective})
    connector = (expected.get("connector") or {}).get("kv_connector") or "none"
    yield _row("connector", None, connector, {each.connector or "none" for each in effective})
    for tier, size in sorted((expected.get("capacity_bytes") or {}).items()):
        # Only a connector that reports its configuration back says how large the tier really is.
        read_back = {
            (each.connector_config or {}).get("cpu_bytes_to_use") if tier == "cpu" else None for each in effective
        }
        yield _row(f"{tier} tier", "bytes", size, read_back)
    yield _row("hit granularity", "tokens", expected.get("granularity"), set())
    yield from _hits(Evidence(trials[0].folder, first), passes)
    yield _row("KV of a token", "bytes", per_token, _bytes_per_token(passes), slack=0.1 * (per_token or 0))
    threads = _threads(engine.get("cpu_threads"))
    yield _row("engine threads", None, threads, {each.details.get("threads") for each in effective})
    limit = {each.details.get("max_model_len") for each in effective}
    yield _row("longest prompt and output", "tokens", engine.get("max_model_len"), limit)
    packages = first.stack.get("packages", {})
    pinned = next((packages[name] for name in sorted(packages) if name.startswith("vllm")), None)
    yield _row("engine version", None, pinned, {each.engine_version for each in effective})


def _row(name: str, unit: str | None, asked: Any, measured: Iterable[Any], slack: float = 0) -> Row:
    """One property. ``agrees`` is None where one side is unknown; several measured values never agree."""
    seen = sorted({value for value in measured if value is not None}, key=str)
    agrees: bool | None = None
    if len(seen) > 1:
        agrees = False
    elif seen and asked is not None:
        same = _text(seen[0]) == _text(asked)
        close = bool(slack) and not isinstance(asked, str) and abs(seen[0] - asked) <= slack
        agrees = same or close
    return {
        "property": name,
        "unit": unit,
        "asked": None if asked is None else _text(asked),
        "measured": " / ".join(_text(value) for value in seen) or None,
        "agrees": agrees,
    }


def _text(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _threads(binding: Any) -> Any:
    """Cores of a binding: an engine runs one thread on each. What isn't a binding is given as it is."""
    try:
        return len(set(cores(binding)))
    except (AttributeError, ValueError):
        return binding


def _asked_pool(engine: dict[str, Any], per_token: int | None, block: int | None) -> int | None:
    if engine.get("kv_pool_blocks") is not None:
        block = engine.get("block_size") or block
        return None if block is None else int(engine["kv_pool_blocks"]) * block
    if per_token and engine.get("kv_pool_bytes") is not None:
        return int(engine["kv_pool_bytes"]) // per_token
    return None


def _hits(evidence: Evidence, passes: pl.DataFrame) -> Iterable[Row]:
    """Hit tokens of a repeated prompt: what the setup expects asked, the mean over a pass's prompts measured.

    Of the first hits, or of the later ones where another engine is sent the first: it need not find what it didn't
    store. A sweep has one row: the sum over its cells, of one prompt each.
    """
    elsewhere = [item.workload for item in evidence.trial.timed if item.engine]
    own = pl.when(pl.col("workload").is_in(elsewhere)).then(pl.lit("warm")).otherwise(pl.lit("first-hit"))
    hits = passes.filter(pl.col("pass") == own)
    found: dict[str, list[tuple[int | None, int | None]]] = {}
    for (workload,), rows in sorted(hits.partition_by("workload", as_dict=True).items()):
        found.setdefault(workload.partition(CELL)[0], []).append(_hit(evidence, rows))
    for workload, cells in found.items():
        asked = [each for each, _ in cells if each is not None]
        seen = [each for _, each in cells if each is not None]
        name = "a prompt" if len(cells) == 1 else f"one prompt of each of {len(cells)} cells"
        yield _row(
            f"hit of {name} repeated in {workload}",
            "tokens",
            sum(asked) if len(asked) == len(cells) else None,
            {sum(seen)} if len(seen) == len(cells) else set(),
        )


def _hit(evidence: Evidence, rows: pl.DataFrame) -> tuple[int | None, int | None]:
    """Asked and measured, of one prompt of a workload that is sent in one cell; None where it isn't known."""
    lengths, measured = set(), []
    for row in rows.iter_rows(named=True):
        lengths.add((row["prompt_tokens"] or 0) / row["requests"])
        hits = [row[f"tokens_{tier}"] for tier in HITS]
        if None not in hits and row["requests"]:
            measured.append(sum(hits) / row["requests"])
    length = lengths.pop() if len(lengths) == 1 else 0.0
    asked = _asked_hit(evidence, int(length)) if length > 0 and length.is_integer() else None
    return asked, round(median(measured)) if measured else None


def _asked_hit(evidence: Evidence, prompt_tokens: int) -> int | None:
    """Tokens of a repeated prompt that the setup expects to hit; None where the engine or this version can't say."""
    block = evidence.trial.effective.block_size
    try:
        return None if block is None else evidence.setup.expected_hit(prompt_tokens, block)
    except Unreadable:
        return None


def _bytes_per_token(passes: pl.DataFrame) -> set[int]:
    """Loaded bytes ÷ hit tokens, over all passes that know both."""
    loaded = tokens = 0
    for row in passes.iter_rows(named=True):
        below = [row[f"tokens_{tier}"] for tier in HITS if tier != "gpu"]
        if row["loaded_bytes"] and any(below):
            loaded += row["loaded_bytes"]
            tokens += sum(value or 0 for value in below)
    return {round(loaded / tokens)} if tokens else set()
