"""The README's table of load clients, from the published truth bench.

``python -m kvladder.bench.headline`` writes it between its two marks; a test fails while it differs from the raw data.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from textwrap import fill

from kvladder.bench import tables
from kvladder.bench.tables import AT_LEAST, COMPARED, OWN, TITLES, BenchTables, Row, comparisons
from kvladder.config.sources import read_bench
from kvladder.provenance.publish import CONFIG, PUBLISHED, RAW, unpack
from kvladder.report.formats import UNKNOWN, listing, plural, significant
from kvladder.stack.paths import ROOT

NAME = "client-truth"
"""The bench's name below ``results/published``."""
README = ROOT / "README.md"
BEGIN, END = "<!-- client-truth:begin -->\n", "<!-- client-truth:end -->\n"
NOTHING = "No run of it is published yet.\n"

_PROMPT_TOKENS, _CONCURRENCY = 1000, 256
"""The point that is shown; everything else is in the report."""
_COLUMNS = {
    "ttft_bias_p50_ms": "TTFT bias p50, ms",
    "ttft_bias_p99_ms": "p99, ms",
    "first_wave_bias_max_ms": "first wave, largest, ms",
    "gap_error_p99_ms": "gap error p99, ms",
    "held": f"held of {_CONCURRENCY}",
    "cpu_s_per_1000": "CPU s per 1,000",
    "peak_rss_mb": "peak MB",
}


def published(root: Path) -> BenchTables | None:
    """Tables of the published bench, made of its raw data; None where it isn't published.

    Raises OSError, ConfigError or ValueError for one that can't be read.
    """
    folder = root / PUBLISHED / NAME
    if not (folder / RAW).is_file():
        return None
    goals = read_bench([folder / CONFIG], ()).goals
    with tempfile.TemporaryDirectory(prefix="kvladder-headline-") as scratch:
        unpack(folder / RAW, Path(scratch, "bench"))
        cells = sorted(path.parent for path in Path(scratch, "bench").glob("cells/*/*/*/*/cell.json"))
        tables.build(cells, goals, Path(scratch, "tables"))
        return tables.load(Path(scratch, "tables"))


def headline(built: BenchTables | None) -> str:
    """The clients on one core beside each other, the goals, and where a peer is better, as Markdown."""
    if built is None:
        return NOTHING
    rows = built.cells.to_dicts()
    said = [*_goals(built.goals.to_dicts()), _better(rows)]
    bullets = [fill(text, 120, initial_indent="- ", subsequent_indent="  ") for text in said]
    return "\n".join([*_table(rows), "", *bullets]) + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [
        f"At {_CONCURRENCY} in flight, prompts of {_PROMPT_TOKENS:,} ids, one core; req/s from a server that answers "
        "at once:",
        "",
        f"| client | {' | '.join(_COLUMNS.values())} | req/s |",
        "| --- |" + " ---: |" * (len(_COLUMNS) + 1),
    ]
    for client, title in TITLES.items():
        own = [row for row in rows if row["client"] == client and row["cores"] == 1]
        rates = [row for row in own if row["kind"] == "rate"]
        here = [row for row in own if _shown(row)]
        if here:
            values = [*(_median(here, column) for column in _COLUMNS), _median(rates, "rate_per_s")]
            lines.append(f"| {title} {here[0]['version']} | {' | '.join(values)} |")
    return lines


def _shown(row: Row) -> bool:
    return (row["kind"], row["prompt_tokens"], row["concurrency"]) == ("schedule", _PROMPT_TOKENS, _CONCURRENCY)


def _median(rows: Sequence[Row], column: str) -> str:
    """Over a cell's runs."""
    known = [row[column] for row in rows if row[column] is not None]
    return significant(median(known)) if known else UNKNOWN


def _goals(goals: Sequence[Row]) -> list[str]:
    met = sum(goal["met"] is True for goal in goals)
    said = [f"{TITLES[OWN]} on one core keeps {met} of its {len(goals)} goals."]
    for goal in goals:
        if goal["met"] is False:
            limit = f"{'at least' if goal['column'] in AT_LEAST else 'at most'} {goal['limit']:,g}"
            said.append(
                f"Missed: {goal['goal']}: {significant(goal['worst'])} at {goal['where']}, {limit} is the goal."
            )
    said += [f"Not checked: {goal['goal']}." for goal in goals if goal["met"] is None]
    return said


def _better(rows: Sequence[Row]) -> str:
    compared = comparisons(rows)
    better = [f"{TITLES[each.client]}'s {COMPARED[each.column]} at {each.place}" for each in compared if each.better]
    named = f": {listing(dict.fromkeys(better), 8)}" if better else ""
    return f"A peer is better in {len(better)} of {plural(len(compared), 'comparison')} on as many cores{named}."


def parts(text: str) -> tuple[str, str, str]:
    """A README in three: before the table, the table, after it. Raises ValueError without the two marks."""
    start, begin, rest = text.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md: the marks {BEGIN.strip()} and {END.strip()} are missing")
    return start + begin, table, end + after


def main() -> None:
    """Write the table into the README."""
    start, _, end = parts(README.read_text(encoding="utf-8"))
    README.write_text(start + headline(published(ROOT)) + end, encoding="utf-8")


if __name__ == "__main__":
    main()
