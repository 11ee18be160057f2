"""Steady states and cliffs, and the tables, figures and words made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from matplotlib.text import Text
from trial_factory import write_trial

from kvladder.config.base import TIERS
from kvladder.config.records import HitPrediction, PassRecord, PoolRecord, TrialRecord, Verdict, WindowTokens
from kvladder.figures import ladder as ladder_figure
from kvladder.figures import turns as turns_figure
from kvladder.report import ladder as ladder_report
from kvladder.report.values import Setup
from kvladder.stats.ladder import Turn, Window, cliff, steady_window
from kvladder.tables.labels import single_workloads
from kvladder.tables.ladder import by_working_set, cliff_rows, ladder_rows, shown_order
from kvladder.tables.model import SCHEMAS, Tables, frame
from kvladder.tables.raw import RawTrial


def rounds(pool: int, turns: int, conversations: int, *, stagger: bool = False) -> list[Turn]:
    """One request after the other, a second each, place by place; a place takes the next conversation when its own
    ends. ``stagger``: places begin in the middle of a conversation."""
    left = {place: turns - (place % turns if stagger else 0) for place in range(pool)}
    talking = {place: place for place in range(pool)}
    following, clock, made = pool, 0, []
    while talking:
        for place in sorted(talking):
            made.append(Turn(talking[place], clock, clock + 10))
            clock += 10
            left[place] -= 1
            if not left[place]:
                if following < conversations:
                    talking[place], left[place], following = following, turns, following + 1
                else:
                    del talking[place]
    return made


def test_whole_generations_are_steady_from_the_second_on() -> None:
    turns = rounds(pool=3, turns=4, conversations=9)
    window = steady_window(turns, 3, 4)
    # 12 requests fill the pool; the last round's first end is the first place that stays empty.
    assert window == Window(start=120, end=36 * 10 - 20)
    assert sum(window.start < turn.end <= window.end for turn in turns) == 22


def test_a_staggered_pool_shrinks_earlier() -> None:
    turns = rounds(pool=4, turns=4, conversations=12, stagger=True)
    window = steady_window(turns, 4, 4)
    assert window is not None
    open_at = lambda t: {  # noqa: E731
        turn.conversation
        for turn in turns
        if min(each.sent for each in turns if each.conversation == turn.conversation) <= t
        and max(each.end for each in turns if each.conversation == turn.conversation) > t
    }
    assert {len(open_at(t)) for t in range(window.start, window.end, 10)} <= {3, 4}
    assert len(open_at(window.end)) == 3
    assert window.end < turns[-1].end


@pytest.mark.parametrize(
    ("conversations", "pool"), [(3, 3), (4, 3), (0, 3)], ids=["one generation", "hardly a second one", "nothing"]
)
def test_no_steady_state(conversations: int, pool: int) -> None:
    turns = rounds(pool, 4, conversations) if conversations else []
    assert steady_window(turns, pool, 4) is None


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], None),
        ([(1000, 1.0), (2000, 0.9)], None),
        ([(1000, 1.0), (2000, 0.0)], 1500.0),
        ([(1000, 1.0), (2000, 0.8), (4000, 0.2), (8000, 0.1)], 3000.0),
        ([(1000, 0.4), (2000, 0.1)], 1000.0),
        ([(1000, 0.5), (2000, 0.4)], 1000.0),
        # Falls, rises again: the first fall counts.
        ([(1000, 1.0), (2000, 0.4), (3000, 0.9)], pytest.approx(1000 + 1000 * 0.5 / 0.6)),
    ],
)
def test_a_cliff_is_where_hits_halve(points: list[tuple[float, float]], expected: Any) -> None:
    assert cliff(points) == expected


# --- tables ---

SECOND = 1_000_000_000
TOKENS = 1000
POOLS = (2, 4, 8)


def trial(root: Path, setup: str, repeat: int, hits: dict[int, int]) -> RawTrial:
    """A judged trial with one pass a pool: 4 turns of 400 to 1,000 tokens, one second each; ``hits`` by pool."""
    folder = write_trial(root, setup=setup, repeat=repeat, workloads={})
    record = TrialRecord.model_validate_json((folder / "trial.json").read_bytes())
    passes, windows, predictions = [], [], []
    part = {"round": 0, "concurrency": 1, "failed": 0, "name": "mixed"}
    for pool, hit in hits.items():
        sent = rounds(pool, 4, 3 * pool)
        lines, seen = [], dict.fromkeys(range(3 * pool), 0)
        for index, turn in enumerate(sent):
            number = seen[turn.conversation]
            seen[turn.conversation] += 1
            start = turn.sent * SECOND // 10
            lines.append(
                {
                    "pass": "mixed", "round": 0, "index": index, "key": f"c{turn.conversation}-t{number}",
                    "status": "ok", "prompt_tokens": 400 + 200 * number, "output_tokens": 1, "send_ns": start,
                    "first_token_ns": start + (number + 1) * SECOND // 10, "end_ns": start + SECOND,
                    "usage_cached_tokens": 100 * number,
                }
            )  # fmt: skip
        name = f"pool-{pool}"
        (folder / f"{name}.requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        passes.append(
            {
                **part, "workload": name, "requests": len(sent), "start_ns": 0, "end_ns": len(sent) * SECOND,
                "pool": PoolRecord(size=pool, tokens=TOKENS, order="fifo"),
            }
        )  # fmt: skip
        prompt = sum(line["prompt_tokens"] for line in lines)
        by_source: dict[str, int | None] = {**dict.fromkeys(TIERS, 0), "cpu": hit, "computed": prompt - hit}
        windows.append(
            WindowTokens(
                workload=name, name="mixed", round=0, prompt_tokens=prompt, by_source=by_source, stored_bytes=3_000_000,
                loaded_bytes=1_500_000 if hit else 0,
            )
        )  # fmt: skip
        predictions.append(
            HitPrediction(
                workload=name, name="mixed", round=0, prompt_tokens=prompt, working_set=9, hits={"cpu": hit + 7},
                capacity={"cpu": 5000}, ceiling=10_000, exact=False, known=True,
            )
        )  # fmt: skip
    record = record.model_copy(update={"passes": [PassRecord(**each) for each in passes]})
    verdict = Verdict(
        experiment="demo", setup=setup, suite="demo", repeat=repeat, run=record.run, status="valid", reason=None,
        gates=[], windows=windows, predictions=predictions if setup != "plain" else [],
    )  # fmt: skip
    return RawTrial(folder, setup, "demo", repeat, record.run, record, verdict, "valid", None)


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    """Two blocks of two setups: plain hits nothing; the other one 10,000, 9,000 (8,000) and 1,000 tokens."""
    raw = [
        trial(tmp_path, "plain", 0, dict.fromkeys(POOLS, 0)),
        trial(tmp_path, "plain", 1, dict.fromkeys(POOLS, 0)),
        trial(tmp_path, "native-host", 0, {2: 10_000, 4: 9000, 8: 1000}),
        trial(tmp_path, "native-host", 1, {2: 10_000, 4: 8000, 8: 1000}),
    ]
    pools, turns = ladder_rows(raw)
    ladder = frame("ladder", pools)
    rest = {name: frame(name, []) for name in SCHEMAS if name not in ("requests", "ladder", "turns", "cliffs")}
    rest["trials"] = frame("trials", [{**each.key, "status": "valid"} for each in raw])
    return Tables(
        **rest,
        requests=pl.LazyFrame(schema=SCHEMAS["requests"]),
        ladder=ladder,
        turns=frame("turns", turns),
        cliffs=frame("cliffs", cliff_rows(ladder)),
        context={"baseline": "plain", "workloads": [["demo", f"pool-{pool}"] for pool in POOLS]},
    )


def test_a_row_a_pass_with_its_window(tables: Tables) -> None:
    row = tables.ladder.filter((pl.col("setup") == "native-host") & (pl.col("repeat") == 0) & (pl.col("pool") == 4))
    (found,) = row.iter_rows(named=True)
    # 48 requests of a second each: the first 16 fill the pool, the last round's first end is the 45th second's.
    assert (found["steady"], found["window_start_s"], found["window_end_s"]) == (True, 16.0, 45.0)
    assert found["window_requests"] == 29
    assert found["tokens_per_s"] == pytest.approx((8 * (400 + 600 + 800) + 5 * 1000 - 0 + 29) / 29)
    assert found["working_set_tokens"] == 4000
    assert (found["measured_hits"], found["predicted_hits"], found["predicted_ceiling"]) == (9000, 9007, 10_000)
    assert found["capacity_cpu_tokens"] == 5000 and found["capacity_gpu_tokens"] is None
    assert found["stored_per_loaded"] == 2.0
    assert found["stored_gb_per_1000"] == pytest.approx(3e6 / 1e9 / 48 * 1000)
    assert found["disk_written_per_read"] is None


def test_turns_are_kept_apart(tables: Tables) -> None:
    rows = tables.turns.filter((pl.col("setup") == "plain") & (pl.col("repeat") == 1) & (pl.col("pool") == 2))
    assert rows.select("turn", "prompt_tokens", "cached_tokens", "ttft_median_s").rows() == [
        (turn, 400 + 200 * turn, 100.0 * turn, pytest.approx((turn + 1) / 10)) for turn in range(4)
    ]


def test_cliffs_block_by_block(tables: Tables) -> None:
    (row,) = tables.cliffs.iter_rows(named=True)
    # From 0.9 (0.8) at 4,000 to 0.1 at 8,000 tokens.
    ends = [4000 + 4000 * (0.9 - 0.5) / 0.8, 4000 + 4000 * (0.8 - 0.5) / 0.7]
    assert (row["setup"], row["blocks"], row["halved"], row["largest"]) == ("native-host", 2, 2, 8000)
    assert [row["tokens_low"], row["tokens_high"]] == pytest.approx(sorted(ends))
    assert row["tokens"] == pytest.approx(sum(ends) / 2)


def test_pools_are_shown_together_and_not_one_by_one(tables: Tables) -> None:
    assert shown_order(tables) == "fifo"
    passes = frame("passes", [{"setup": "plain", "suite": "demo", "workload": name} for name in ("pool-2", "repeat")])
    assert single_workloads(tables, passes) == [("demo", "repeat")]
    rows = by_working_set(tables, ["tokens_per_s"])
    assert rows.filter(pl.col("setup") == "native-host")["n"].to_list() == [2, 2, 2]
    share = rows.filter((pl.col("setup") == "native-host") & (pl.col("pool") == 4))["hit_share"][0]
    assert share == pytest.approx(8500 / (12 * (400 + 600 + 800 + 1000)))


def test_figures(tables: Tables) -> None:
    for module, panels, points in ((ladder_figure, 3, [2000, 4000, 8000]), (turns_figure, 3, [1, 2, 3, 4])):
        assert module.applies(tables)
        figure = module.draw(tables)
        assert len(figure.axes) == panels
        assert points in [list(line.get_xdata()) for line in figure.axes[0].get_lines()]
    marked = [text.get_text() for text in ladder_figure.draw(tables).axes[0].texts]
    assert marked == ["host"]
    empty = Tables(**{**vars(tables), "ladder": frame("ladder", []), "turns": frame("turns", [])})
    assert not ladder_figure.applies(empty) and not turns_figure.applies(empty)
    for module in (ladder_figure, turns_figure):
        (text,) = module.draw(empty).texts
        assert text.get_text() == "No valid trial has conversations that take turns."


def test_of_many_working_sets_the_ends_are_among_those_shown(tables: Tables) -> None:
    sizes = [1000 * 2**place for place in range(8)]
    turns = tables.turns.filter(pl.col("pool") == 2).drop("working_set_tokens")
    many = turns.join(pl.DataFrame({"working_set_tokens": sizes}), how="cross").select(tables.turns.columns)
    figure = turns_figure.draw(Tables(**{**vars(tables), "turns": many}))
    titles = [text.get_text().removeprefix("TTFT in seconds, ") for text in figure.findobj(Text)]
    assert [size for size in sizes if f"{size:,} tokens" in titles] == [1000, 4000, 16_000, 128_000]


def test_a_cliff_in_part_of_the_blocks_or_below_the_smallest_is_said_so(tables: Tables) -> None:
    names = {name: name for name in ("plain", "native-host")}
    (row,) = tables.cliffs.iter_rows(named=True)
    for change, said in (
        ({"halved": 1, "tokens": None}, "native-host in 1 of 2 blocks"),
        ({"tokens": 2000.0, "tokens_low": 2000.0, "tokens_high": 2000.0}, "native-host at ≤ 2,000 tokens"),
    ):
        changed = Tables(**{**vars(tables), "cliffs": frame("cliffs", [{**row, **change}])})
        (paragraph,) = ladder_report.paragraphs(changed, names)
        assert paragraph.lead == f"Hits fall to half of what tiers without limits give: {said}."


def test_the_report_says_where_hits_halve(tables: Tables) -> None:
    names = {name: name for name in ("plain", "native-host")}
    (paragraph,) = ladder_report.paragraphs(tables, names)
    middle = round((4000 + 4000 * 0.4 / 0.8 + 4000 + 4000 * 0.3 / 0.7) / 2)
    assert f"native-host at {middle:,} (5,714–6,000) tokens" in paragraph.lead
    section = ladder_report.section(tables, {name: Setup(name, name, name, name, []) for name in names})
    assert section is not None
    throughput, ttft = section["tables"]
    assert [row["size"] for row in throughput["rows"]] == ["2,000", "4,000", "8,000"]
    assert ttft["rows"][0]["cells"][1].ratio == "1.00×"
    assert [row["measured"] for row in section["hits"]] == ["cpu 10,000", "cpu 8,500", "cpu 1,000"]
    assert section["cliffs"][0]["economics"] == ["2.00", "0.0312", "–", "–"]
    assert "Working sets without one" not in section["windows"]
