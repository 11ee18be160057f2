"""A published table beside ours: its values as printed, ours from the tables, and nothing that wasn't measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from table_factory import DEMO, config_of, write_judged
from test_report import Page, no_pdf, report  # noqa: F401 (a fixture)
from trial_factory import Load

from kvladder import tables
from kvladder.config import pitfalls, schema
from kvladder.config.experiment import validate
from kvladder.config.references import REFERENCES
from kvladder.config.yaml import ConfigError, load_file
from kvladder.report.compared import compared
from kvladder.report.formats import significant
from kvladder.report.page import _code
from kvladder.report.view import view
from kvladder.tables import Tables
from kvladder.tables.model import frame

NAME = "vllm-offload-bench"
SETUPS = {name: DEMO[name] for name in ("plain", "plain-2", "native-host", "lmcache-mp")}
SUITES = {
    "main": {
        "short": Load(prompt_tokens=3000),
        "long": Load(prompt_tokens=31_000),
        "one by one": Load(requests=4, concurrency=1, prompt_tokens=8200),
        "four": Load(requests=4, concurrency=4, prompt_tokens=8200, kind="burst"),
    }
}
REPEAT, FIRST, FOUR, EIGHT, SHARES = (row.what for row in REFERENCES[NAME].rows)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    root = tmp_path_factory.mktemp("compared")
    folders = write_judged(root, SETUPS, repeats=2, suites=SUITES, invalid=[("lmcache-mp", 1)])
    return tables.build(folders, root / "tables", baseline="plain")


def table(data: Tables) -> dict[str, Any]:
    config = config_of(SETUPS, repeats=2, compare_with=NAME)
    found: dict[str, Any] = view(data, config)["compared"]
    return found


def lines(data: Tables, what: str) -> list[dict[str, Any]]:
    return [line for line in table(data)["lines"] if line["what"] == what]


def row(data: Tables, setup: str, workload: str, metric: str, name: str) -> dict[str, Any]:
    keep = {"setup": setup, "workload": workload, "metric": metric, "pass": name}
    return next(each for each in data.summary.iter_rows(named=True) if keep.items() <= each.items())


def test_published_values_stand_as_printed(measured: Tables) -> None:
    printed, *_ = lines(measured, REPEAT)
    assert [(value.value, value.ratio) for value in printed["values"]] == [
        ("6.8 s", ""),
        ("0.76 s", "0.112×"),
        ("0.43 s", "0.063×"),
        ("0.35 s", "0.051×"),
    ]
    two_modes = lines(measured, FOUR)[0]["values"][1]
    assert (two_modes.value, two_modes.ratio) == ("0.9 / 2.6 s (bimodal)", "")  # no single time, so no ratio


def test_ours_come_from_the_workload_of_that_shape(measured: Tables) -> None:
    _, first, warm = lines(measured, REPEAT)
    assert (first["who"], warm["who"]) == ("here, first hit: long", "here, warm: long")
    plain, mooncake, lmcache, native = first["values"]
    assert mooncake.value == "–"  # no such setup here
    assert native.value == f"{row(measured, 'native-host', 'long', 'ttft_s', 'first-hit')['median']:.2f} s"
    assert native.bracket and native.notes[-1] == "2 trials"
    assert lmcache.notes[-1] == "1 trial" and not lmcache.bracket
    assert plain.ratio == ""
    walls = lines(measured, FOUR)
    assert [line["who"] for line in walls[1:]] == ["here, first hit: four", "here, warm: four"]


def test_the_first_request_is_the_cold_pass_against_the_baselines(measured: Tables) -> None:
    _, ours = lines(measured, FIRST)
    ratio = row(measured, "native-host", "long", "ttft_s", "cold")["ratio"]
    assert ours["values"][0].value == "1×" and ours["values"][3].value == f"{significant(ratio)}×"


def test_what_was_not_measured_says_so(measured: Tables) -> None:
    for what in (EIGHT, SHARES):
        _, ours = lines(measured, what)
        assert {value.value for value in ours["values"]} == {"–"}
        assert {note for value in ours["values"] for note in value.notes} == {"not measured in this experiment"}


def test_validity_is_counted_by_setup_and_controls_are_no_columns(measured: Tables) -> None:
    assert [value.value for value in table(measured)["lines"][-1]["values"]] == ["2 of 2", "–", "1 of 2", "2 of 2"]
    columns = [column["setup"] for column in table(measured)["columns"]]
    assert columns == ["plain", None, "lmcache-mp", "native-host"]


def test_a_pool_that_is_shared_is_shown_with_its_rate(measured: Tables) -> None:
    base = {"suite": "main", "workload": "two", "n": 3, "prompts": 4, "prompt_length": 31_000, "concurrency": 1}
    rows = [
        {**base, "setup": "lmcache-mp", "answer": "found", "load_gb_per_s": 9.04, "load_basis": "ttft"},
        {**base, "setup": "native-host", "answer": "not found"},
        {**base, "setup": "plain", "answer": "not found"},
    ]
    _, ours = lines(Tables(**{**vars(measured), "sharing": frame("sharing", rows)}), SHARES)
    assert [(value.value, value.ratio) for value in ours["values"]] == [
        ("–", ""),
        ("–", ""),
        ("yes", "≥\u00a09.04 GB/s"),
        ("no", ""),
    ]


def test_only_an_experiment_that_asks_has_the_table(measured: Tables) -> None:
    assert compared(measured, {}, config_of(SETUPS)) is None
    assert compared(measured, {}, config_of(SETUPS, compare_with=None)) is None


@pytest.mark.usefixtures("no_pdf")
def test_the_pages_name_source_and_hardware(tmp_path: Path) -> None:
    folders = write_judged(tmp_path, SETUPS, repeats=1, suites=SUITES)
    out = report(tmp_path, folders, config_of(SETUPS, repeats=1, compare_with=NAME))
    words = Page(out["html"].read_text(encoding="utf-8")).words
    assert "8 × RTX A6000, PCIe Gen4 x16, no RDMA" in words and f"{EIGHT} vLLM-offload-bench 27 s 3.5 s 0.130×" in words
    assert f"| {FOUR} | vLLM-offload-bench | 5.2 s |" in out["md"].read_text(encoding="utf-8")


def test_an_unknown_table_is_refused_before_anything_starts() -> None:
    data = load_file(schema.ROOT / "config" / "offload.yaml")
    assert validate(data).compare_with == NAME
    with pytest.raises(ConfigError, match="compare_with: no published table 'nobody'; there is: vllm-offload-bench"):
        validate({**data, "compare_with": "nobody"})


def test_every_reference_has_a_value_in_every_cell() -> None:
    for reference in REFERENCES.values():
        assert reference.source and reference.hardware and reference.model
        for each in reference.rows:
            assert set(each.values) == set(reference.kinds), each.what


@pytest.mark.usefixtures("no_pdf")
def test_pitfalls_are_in_the_report_and_in_the_key_reference(tmp_path: Path) -> None:
    folders = write_judged(tmp_path, {"plain": DEMO["plain"]}, repeats=1)
    words = Page(report(tmp_path, folders, config_of(["plain"], repeats=1))["html"].read_text(encoding="utf-8")).words
    for items in pitfalls.PITFALLS.values():
        for title, text in items:
            assert f"- **{title}**: {text}" in schema.reference()
            assert text.count("`") % 2 == 0
            assert " ".join(text.replace("`", " ").split())[:40] in words, title


def test_code_in_a_text_is_marked_and_everything_escaped() -> None:
    assert _code("a `<b>` & c") == "a <code>&lt;b&gt;</code> &amp; c"
