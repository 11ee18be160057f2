"""The verdict in plain words, every sentence of it taken from the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from kvladder.report.formats import listing, plural, ratio, seconds, significant, span, times
from kvladder.stats.detectable import detectable
from kvladder.stats.paired import paired_ratio
from kvladder.tables.labels import setup_labels, setup_order, single_workloads
from kvladder.tables.model import Tables

Row = dict[str, Any]

STRONG = ("\ue000", "\ue001")
"""Opens and closes emphasis inside a sentence; each output format has its own form of it."""


def strong(text: str) -> str:
    """Mark a name for emphasis."""
    return STRONG[0] + text.replace(STRONG[0], "").replace(STRONG[1], "") + STRONG[1]


LABEL = 40
"""Characters of a setup's label in the report."""


def labels(tables: Tables, more: Iterable[str] = ()) -> dict[str, str]:
    """Short, unique label of every setup, and of `more` setups that have no trial."""
    return setup_labels(tables, LABEL, more)


def workload_title(tables: Tables, suite: str, workload: str) -> str:
    """A workload's name, behind its suite's where there are several."""
    return workload if tables.passes["suite"].n_unique() == 1 else f"{suite} / {workload}"


def lower_tiers(tables: Tables) -> set[str]:
    """Setups whose hits come from a tier below the device: what is compared, so neither the baseline nor a control."""
    below = {setup for setup, tier in tables.tiers().items() if tier != "gpu"}
    return below - {tables.baseline, *tables.context.get("controls", [])}


@dataclass(frozen=True)
class Paragraph:
    """A finding and what has to be known beside it."""

    topic: str
    lead: str
    details: list[str]


@dataclass(frozen=True)
class Cell:
    """What is compared in one workload: a metric in a pass, and how a sentence calls it."""

    suite: str
    workload: str
    metric: str
    pass_name: str

    def rows(self, tables: Tables) -> dict[str, Row]:
        """Its rows of the summary, by setup."""
        keep = (
            (pl.col("suite") == self.suite)
            & (pl.col("workload") == self.workload)
            & (pl.col("metric") == self.metric)
            & (pl.col("pass") == self.pass_name)
        )
        return {row["setup"]: row for row in tables.summary.filter(keep).iter_rows(named=True)}


def interval_words(kind: str | None, blocks: int | None) -> str:
    """How the numbers in brackets are to be read."""
    if kind == "95 %":
        return f"95 % interval, {plural(blocks or 0, 'block')}"
    if kind == "range":
        return f"range of {plural(blocks or 0, 'block')}"
    return "one block, no interval" if blocks == 1 else "no interval"


def several(tables: Tables, suite: str, workload: str) -> bool:
    """Whether a workload keeps more than one request in flight, so that its wall time says more than its TTFT."""
    here = tables.passes.filter((pl.col("suite") == suite) & (pl.col("workload") == workload))
    return here.filter((pl.col("concurrency") > 1) & (pl.col("requests") > 1)).height > 0


def describe_workload(tables: Tables, suite: str, workload: str) -> str:
    """``a prompt of 3,080 tokens`` or ``4 prompts of 2,056 tokens at once``, as measured."""
    keep = (pl.col("suite") == suite) & (pl.col("workload") == workload)
    column = pl.col("prompt_tokens")
    lengths = tables.requests.filter(keep).select(low=column.min(), high=column.max()).collect()
    passes = tables.passes.filter(keep)
    low, high = lengths.row(0)
    if low is None or not passes.height:
        return workload
    tokens = f"{low:,} tokens" if low == high else f"{low:,} to {high:,} tokens"
    requests, flying = max(passes["requests"].to_list()), max(passes["concurrency"].to_list())
    if requests == 1:
        return f"a prompt of {tokens}"
    manner = "at once" if flying >= requests else f"{flying} at a time" if flying > 1 else "one after the other"
    return f"{requests:,} prompts of {tokens}, {manner}"


def verdict(tables: Tables, planned: Mapping[str, int], more: Sequence[Paragraph] = ()) -> list[Paragraph]:
    """What was found, workload by workload, then what doesn't count and how far it carries.

    `planned` is the number of trials by setup; `more` are findings that have a shape of their own (sweeps, decoding).
    """
    names = {setup: strong(label) for setup, label in labels(tables).items()}
    lost = _uncounted(tables, names, planned)
    if not tables.summary.height:
        return [Paragraph("", "No trial is valid, so nothing can be compared.", lost)]
    found = [_workload(tables, names, suite, workload) for suite, workload in single_workloads(tables, tables.passes)]
    found += more
    doubts = lost + _modes(tables, names) + _leniency(tables, names)
    if doubts:
        found.append(Paragraph("what does not count", "Take care with these:", doubts))
    return [*found, Paragraph("", _method(tables, names), [])]


def _workload(tables: Tables, names: Mapping[str, str], suite: str, workload: str) -> Paragraph:
    metric = "wall_s" if several(tables, suite, workload) else "ttft_s"
    topic = f"{workload_title(tables, suite, workload)}: {describe_workload(tables, suite, workload)}"
    by_pass = {name: Cell(suite, workload, metric, name) for name in ("cold", "first-hit", "warm")}
    rows = {name: cell.rows(tables) for name, cell in by_pass.items()}
    hit = "first-hit" if rows["first-hit"] else "warm"
    when = "on a first hit" if hit == "first-hit" else "on a hit"
    hits, tiers, controls = rows[hit], tables.tiers(), set(tables.context.get("controls", []))
    others = [row for setup, row in hits.items() if setup != tables.baseline and setup not in controls]
    caches = [
        f"For comparison: {names[row['setup']]}, the engine's own device cache, takes {typical(row)} "
        f"({plural(row['n'], 'trial')}); it holds only what fits the device pool."
        for row in others
        if tiers.get(row["setup"]) == "gpu"
    ]
    rivals = [row for row in others if tiers.get(row["setup"]) != "gpu"]
    base = hits.get(tables.baseline)
    if base is None:
        baseline = names.get(tables.baseline, strong(tables.baseline))
        alone = [f"{names[row['setup']]} {typical(row)} ({plural(row['n'], 'trial')})" for row in rivals]
        more = [f"Without a ratio, {when}: {listing(alone)}."] if alone else []
        return Paragraph(topic, f"{baseline} has no valid value, so there are no ratios.", more + caches)
    baseline = names[tables.baseline]
    ranked = [row for row in rivals if row["ratio_low"] is not None]
    faster = sorted((row for row in ranked if _clearly(row, "lower")), key=lambda row: row["ratio"])
    # Those with a single block may be faster still: what is said is that nobody knows.
    among = "" if len(ranked) == len(rivals) else " of the tiers that have two blocks or more,"
    done = "ends" if metric == "wall_s" else "answers"
    details = []
    if faster:
        best, rest = faster[0], faster[1:]
        lead = (
            f"{names[best['setup']]} {done} fastest{among} {when}, {_thing(metric)} {typical(best)}: "
            f"{times(1 / best['ratio'])} as fast as {baseline} "
            f"({span(1 / best['ratio_high'], 1 / best['ratio_low'])}×, "
            f"{interval_words(best['interval'], best['blocks'])}), which takes {typical(base)}."
        )
        details += _rest(tables, names, by_pass[hit], best, rest)
    elif ranked:
        lead = f"{when[0].upper()}{when[1:]}, no tier is clearly faster than computing it ({typical(base)})."
    elif rivals:
        lead = (
            f"{when[0].upper()}{when[1:]}, no tier can be ranked yet: none has two blocks in which it and {baseline}, "
            f"which takes {typical(base)}, are both valid."
        )
    else:
        lead = f"No tier has a valid value to compare with {baseline}."
    details += _not_faster(names, ranked, when, tables.baseline)
    details += _thin(names, rivals, baseline)
    details += caches
    details += _cold(names, lower_tiers(tables), rows["cold"], tables.baseline)
    return Paragraph(topic, lead, details)


def _thing(metric: str) -> str:
    return "the last token after" if metric == "wall_s" else "the first token after"


def typical(row: Row) -> str:
    """A setup's time; two modes are named, never averaged."""
    if row["mode_low"] is None:
        return seconds(row["median"])
    return f"{seconds(row['mode_low'])} or {seconds(row['mode_high'])} (two modes)"


def _clearly(row: Row, side: str) -> bool:
    """On one side of the baseline and not known to be within noise; never without an interval."""
    return row["difference"] == side and row["within_noise"] is not True and bool(row["ratio_low"])


def _thin(names: Mapping[str, str], rows: Iterable[Row], baseline: str) -> list[str]:
    """Setups with too few blocks for a range. That is missing data, and says nothing of noise."""
    single, none = [], []
    for row in rows:
        if row["ratio"] is None:
            zero = (
                f", and the ratio to 0 is undefined in {plural(row['undefined'], 'block')}" if row["undefined"] else ""
            )
            none.append(f"{names[row['setup']]} ({typical(row)}, {plural(row['n'], 'trial')}{zero})")
        elif row["ratio_low"] is None:
            single.append((row["ratio"], f"{names[row['setup']]} {ratio(row['ratio'])}×"))
    result = []
    if single:
        those = listing([text for _, text in sorted(single)])
        result.append(
            f"Only one block has both valid, so no range yet and no rank; time against {baseline}'s: {those}."
        )
    if none:
        result.append(f"In no block together with {baseline}, so with no ratio: {listing(none)}.")
    return result


def _rest(tables: Tables, names: Mapping[str, str], cell: Cell, best: Row, rest: list[Row]) -> list[str]:
    """The runners-up: those that can't be told from the best, then the others with their factor."""
    values: dict[str, dict[Any, float | None]] = {}
    keep = (
        (pl.col("suite") == cell.suite)
        & (pl.col("workload") == cell.workload)
        & (pl.col("metric") == cell.metric)
        & (pl.col("pass") == cell.pass_name)
    )
    for setup, repeat, host, value in (
        tables.metrics.filter(keep).select("setup", "repeat", "host_id", "value").iter_rows()
    ):
        values.setdefault(setup, {})[repeat, host] = value
    leader = names[best["setup"]]
    tied, ahead, apart, behind = [], [], [], []
    effects = []
    for row in rest:
        against = paired_ratio(values[row["setup"]], values[best["setup"]])
        name, shared = names[row["setup"]], plural(against.interval.n, "block")
        factor = f"{name} {times(1 / row['ratio'])}"
        if against.difference() == "not enough data":
            apart.append(f"{factor} ({plural(row['blocks'], 'block')}, {against.interval.n} in common)")
        elif against.difference() == "no difference seen":
            tied.append(f"{name} ({shared} in common)")
            effects.append(detectable(against))
        elif against.difference() == "lower":
            ahead.append(f"{name} ({shared} in common)")
        else:
            behind.append(factor + (f" ({plural(row['blocks'], 'block')})" if row["blocks"] != best["blocks"] else ""))
    text = [f"Not distinguishable from {leader}: {listing(tied)}.{_would_be_seen(effects)}"] if tied else []
    if ahead:
        text.append(f"Faster than {leader} in the blocks that both have: {listing(ahead)}.")
    if behind:
        text.append(f"Next, against {names[tables.baseline]}: {listing(behind)} as fast.")
    if apart:
        text.append(
            f"Against {names[tables.baseline]}, but with too few blocks in common with {leader} to rank the two: "
            f"{listing(apart)} as fast."
        )
    return text


def _not_faster(names: Mapping[str, str], ranked: Iterable[Row], when: str, baseline: str) -> list[str]:
    level, slower = [], []
    effects = []
    for row in ranked:
        if _clearly(row, "higher"):
            slower.append(
                f"{names[row['setup']]} ({times(row['ratio'])} the time of {names[baseline]}, {_bracket(row)})"
            )
        elif not _clearly(row, "lower"):
            level.append(f"{names[row['setup']]} ({_bracket(row)})")
            effects.append(row["mde"])
    result = []
    if slower:
        result.append(f"Slower than computing it {when}: {listing(slower)}.")
    if level:
        result.append(f"Not distinguishable from {names[baseline]} {when}: {listing(level)}.{_would_be_seen(effects)}")
    return result


def _would_be_seen(effects: Iterable[float | None]) -> str:
    """What a finding of no difference is worth: how large one must be to be seen in all of these comparisons.

    Nothing where one of them has a range only, which makes no promise.
    """
    known = list(effects)
    largest = max((each for each in known if each is not None), default=None)
    if largest is None or None in known:
        return ""
    size = significant(100 * largest, 2)
    return f" A difference of {size} % or more would have been seen in 4 of 5 such experiments."


def _bracket(row: Row) -> str:
    return f"{span(row['ratio_low'], row['ratio_high'])}, {interval_words(row['interval'], row['blocks'])}"


def _cold(names: Mapping[str, str], rivals: Container[str], cold: Mapping[str, Row], baseline: str) -> list[str]:
    """What storing costs: tiers whose cold pass is clearly slower than the baseline's."""
    rows = [row for setup, row in cold.items() if setup in rivals]
    ranked = [row for row in rows if row["ratio_low"] is not None]
    single = [row for row in rows if row["ratio_low"] is None and row["ratio"] is not None]
    dear = [
        f"{names[row['setup']]} {times(row['ratio'])} ({_bracket(row)})"
        for row in sorted(ranked, key=lambda row: -(row["ratio"] or 0))
        if _clearly(row, "higher")
    ]
    result = []
    if dear:
        # A range only says how it came out: that all of a few blocks lie on one side happens by chance.
        sure = all(row["interval"] == "95 %" for row in ranked if _clearly(row, "higher"))
        took = "takes longer than {}'s" if sure else "took longer than {}'s in every block so far"
        result.append(f"The cold pass, which stores, {took.format(names[baseline])}: {listing(dear)}.")
    elif ranked:
        some = " with two blocks or more" if single else ""
        result.append(
            f"In the cold pass, which stores, no tier{some} is clearly slower than {names[baseline]}."
            f"{_would_be_seen(row['mde'] for row in ranked)}"
        )
    if single:
        those = listing([f"{names[row['setup']]} {ratio(row['ratio'])}×" for row in single])
        result.append(f"The cold pass against {names[baseline]}'s in one block, with no range yet: {those}.")
    return result


def _uncounted(tables: Tables, names: Mapping[str, str], planned: Mapping[str, int]) -> list[str]:
    """Setups without a valid trial, and those that lost some, with the most frequent reason."""
    whole, some = [], []
    unmeasured: dict[tuple[int, int], list[str]] = {}
    for setup in dict.fromkeys([*setup_order(tables), *planned]):
        rows = tables.trials.filter(pl.col("setup") == setup)
        lost = rows.filter(pl.col("status") != "valid")
        total = max(planned.get(setup, 0), rows.height)
        missing = total - rows.height
        name = names.get(setup, strong(setup))
        if not lost.height and not missing:
            continue
        if not lost.height and rows.height:
            unmeasured.setdefault((missing, total), []).append(name)
            continue
        counts = Counter(lost["status"].to_list())
        parts = [f"{count} {status}" for status, count in sorted(counts.items())]
        parts += [f"{missing} not measured"] if missing else []
        reasons = Counter(reason for reason in lost["reason"].to_list() if reason)
        why = f" ({shorten(reasons.most_common(1)[0][0])})" if reasons else ""
        if lost.height + missing == total:
            whole.append(f"{name} has no valid trial: {listing(parts)}{why}.")
        else:
            some.append(f"{name}: {listing(parts)} of {plural(total, 'trial')}{why}; the rest counts.")
    waiting = [
        f"{listing(those, 8)}: {missing} of {plural(total, 'trial')}{' each' if len(those) > 1 else ''} "
        "not measured so far."
        for (missing, total), those in unmeasured.items()
    ]
    most = 8
    found = whole + some + waiting
    more = [f"{len(found) - most} more setups lost trials: see Validity."] if len(found) > most else []
    return found[:most] + more


def _leniency(tables: Tables, names: Mapping[str, str]) -> list[str]:
    """Gates that did not run, and those that failed without deciding: a valid trial may stand on them."""
    valid = tables.trials.filter(pl.col("status") == "valid").select("setup", "suite", "repeat")
    gates = tables.gates.join(valid, on=["setup", "suite", "repeat"], how="semi")
    off = sorted(set(gates.filter(pl.col("seen").str.starts_with("switched off"))["gate"]))
    found = [f"Switched off by the configuration, so not checked: {listing(off)}."] if off else []
    failed = gates.filter((pl.col("decision") == "fail") & ~pl.col("required"))
    for gate in sorted(set(failed["gate"])):
        setups = list(dict.fromkeys(failed.filter(pl.col("gate") == gate)["setup"]))
        found.append(
            f"The gate {gate} is advisory and failed in valid trials of {listing([names[name] for name in setups], 4)}."
        )
    return found


def shorten(reason: str, length: int = 160) -> str:
    """One line of a reason that may be a whole log."""
    text = " ".join(reason.split())
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def _modes(tables: Tables, names: Mapping[str, str]) -> list[str]:
    rows = tables.summary.filter(pl.col("mode_low").is_not_null() & pl.col("metric").is_in(["ttft_s", "wall_s"]))
    found = [
        f"{names[row['setup']]} has two modes in {row['workload']}, {row['pass'].replace('-', ' ')}, "
        f"{'wall time' if row['metric'] == 'wall_s' else 'TTFT'}: near {seconds(row['mode_low'])} in "
        f"{plural(row['n_mode_low'], 'trial')}, near {seconds(row['mode_high'])} in "
        f"{plural(row['n_mode_high'], 'trial')}."
        for row in rows.iter_rows(named=True)
    ]
    return found[:6] + ([f"{len(found) - 6} more samples have two modes: see the summary table."] if found[6:] else [])


def _method(tables: Tables, names: Mapping[str, str]) -> str:
    """How far the numbers carry."""
    compared = tables.summary.filter(pl.col("ratio").is_not_null())
    kinds = set(compared["interval"]) & {"95 %", "range"}
    if not compared.height:
        text = ""
    elif not kinds:
        text = "A ratio is setup ÷ baseline in one block (repeat); one block has no range, so nothing here is ranked. "
    else:
        text = "A ratio is the median over blocks (repeats) of setup ÷ baseline; "
        if kinds == {"95 %"}:
            text += "brackets give a 95 % interval of that median. "
        elif "95 %" in kinds:
            text += "brackets give a 95 % interval where there are six blocks or more, else the range that was seen. "
        else:
            text += "with fewer than six blocks brackets give the range that was seen, which is no 95 % interval. "
    floors = tables.summary.filter(pl.col("noise_low").is_not_null() & (pl.col("metric") == "ttft_s"))
    for group in tables.context.get("repeated", []):
        text += f"{listing(names[setup] for setup in group)} are configured alike: their difference is their noise. "
    controls = [setup for setup in tables.context.get("controls", []) if setup in names]
    control, baseline = listing(names[setup] for setup in controls), names.get(tables.baseline, tables.baseline)
    rows = tables.summary.filter(pl.col("setup").is_in(controls) & (pl.col("metric") == "ttft_s"))
    if floors.height:
        low, high = floors["noise_low"].min(), floors["noise_high"].max()
        blocks = max(rows["blocks"].drop_nulls().to_list(), default=0)
        return text + (
            f"The A/A control {control}, configured as {baseline} is, takes {span(low, high)}× its TTFT "  # type: ignore[arg-type]
            f"over {plural(blocks, 'block')}: that is this machine's noise, and “within noise” means no more than that."
        )
    once = rows["ratio"].drop_nulls()
    if len(once):
        return text + (
            f"The A/A control {control}, configured as {baseline} is, has one block with it, in which it takes "
            f"{span(once.min(), once.max())}× its TTFT over {plural(len(once), 'pass', 'passes')}: "  # type: ignore[arg-type]
            "don't build on differences of that size."
        )
    if controls:
        return text + (
            f"The A/A control {control} is not valid beside {baseline} in two blocks yet, so the noise of this machine "
            "isn't known: don't build on differences of a few per cent."
        )
    return text + (
        "There is no A/A control (the baseline a second time in every block), so the noise of this machine isn't "
        "known: don't build on differences of a few per cent."
    )
