"""The README's table of load clients: what the published raw data say, or that there are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_bench_report import built, row
from test_bench_truth import write_cell

from kvladder.bench import headline
from kvladder.bench.headline import README, parts, published
from kvladder.provenance.publish import pack
from kvladder.stack.paths import ROOT

CONFIG = """
experiment: truth
blocks: [{clients: [kvladder, vllm], concurrency: [256]}]
goals: {ttft_p50_ms: 0.2}
"""


def test_the_readme_says_what_is_published() -> None:
    _, table, _ = parts(README.read_text(encoding="utf-8"))
    assert table == headline.headline(published(ROOT)), "run `make schemas`"


def test_nothing_is_published(tmp_path: Path) -> None:
    assert published(tmp_path) is None
    assert headline.headline(None) == "No run of it is published yet.\n"


def test_it_is_made_of_the_published_raw_data(tmp_path: Path) -> None:
    for client, bias in (("kvladder", 250_000), ("vllm", 9_000_000)):
        write_cell(tmp_path / "truth", client, bias, concurrency=256, pass_cpu_s=0.06)
    folder = tmp_path / "results" / "published" / "client-truth"
    assert pack(tmp_path / "truth", folder / "raw.tar.xz") == 2
    (folder / "experiment.yaml").write_text(CONFIG, encoding="utf-8")
    text = headline.headline(published(tmp_path))
    lines = text.splitlines()
    assert lines[0].startswith("At 256 in flight, prompts of 1,000 ids")
    assert [line.split(" | ")[:2] for line in lines[4:6]] == [
        ["| kvladder 1", "0.250"],
        ["| vllm bench serve 1", "9.00"],
    ]
    # Its own goals count, and 344 requests beyond the first wave carry no 99th percentile.
    assert "- Missed: TTFT bias, p50, ms: 0.250 at 256 in flight, 1,000 ids, at most 0.2 is the goal.\n" in text
    assert "- Not checked: TTFT bias, p99, up to 256 in flight, ms.\n" in text


def test_better_peers_and_runs() -> None:
    runs = [row("kvladder", repeat=repeat, ttft_bias_p50_ms=bias) for repeat, bias in enumerate((0.1, 0.5, 0.2))]
    rate = row("kvladder", kind="rate", concurrency=64, rate_per_s=12_345.6)
    text = headline.headline(built([*runs, rate, row("aiperf", ttft_bias_p50_ms=0.05), row("vllm", cores=2)]))
    # The median run, and the rate from its own cell; two cores aren't shown.
    assert "| kvladder 1.2 | 0.200 | 1.20 | 12.5 | 0.400 | 250 | 0.150 | 60.0 | 12,346 |" in text
    assert "| AIPerf 1.2 | 0.0500 |" in text and text.count("\n| ") == 4
    assert "A peer is better in 1 of 6 comparisons on as many cores: AIPerf's median TTFT bias at 256 in" in text
    nobody = headline.headline(built([row("kvladder"), row("vllm")]))
    assert nobody.endswith("A peer is better in 0 of 6 comparisons on as many cores.\n")


def test_marks_are_there() -> None:
    assert parts("a\n<!-- client-truth:begin -->\nb\n<!-- client-truth:end -->\nc") == (
        "a\n<!-- client-truth:begin -->\n",
        "b\n",
        "<!-- client-truth:end -->\nc",
    )
    with pytest.raises(ValueError, match="marks"):
        parts("a")
