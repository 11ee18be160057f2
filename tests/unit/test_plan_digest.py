"""Which code a result depends on: all of it, and nothing else's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvladder.plan.digest import PACKAGE, measuring_code, source_files


def names(setup: str) -> set[str]:
    return {path.relative_to(PACKAGE).as_posix() for path in measuring_code(setup, ["repeat"])}


def test_files_and_folders_by_name() -> None:
    assert source_files("judge.py") == [PACKAGE / "judge.py"]
    both = source_files("judge.py", "gates")
    assert {PACKAGE / "judge.py", PACKAGE / "gates" / "base.py"} <= set(both)
    assert both == sorted(both)


@pytest.mark.parametrize("name", ["judge", "gate", "judgement.py"])
def test_a_name_that_gives_nothing(name: str) -> None:
    with pytest.raises(LookupError, match=f"{name} is no file"):
        source_files("gates", name)


@pytest.mark.parametrize(
    ("setup", "counters"),
    [
        ("plain", set()),
        ("native", set()),
        ("lmcache-mp", {"counters/lmcache.py"}),
        ("mooncake-store", {"counters/mooncake.py"}),
    ],
)
def test_a_trial_depends_on_the_counters_that_its_drain_reads(setup: str, counters: set[str]) -> None:
    always = {"counters/scrape.py", "counters/drain.py", "counters/reading.py"}
    assert {name for name in names(setup) if name.startswith("counters/")} == always | counters


@pytest.mark.parametrize("rule", ["judge_trial", "judge_block"])
def test_a_verdict_depends_on_all_that_gates_lean_on(rule: str) -> None:
    """Of what judging imports, directly or not; servers, and what defines results, aren't code that judges."""
    text = (PACKAGE.parent / "rules" / "judge.smk").read_text(encoding="utf-8")
    shared = ast.literal_eval(text.split("JUDGING = ")[1].split("\n)")[0] + ")")
    text = text.replace("newest(JUDGING_CODE)", text.split("JUDGING_CODE = ")[1].split("\n")[0])
    listed = text.split(f"rule {rule}:")[1].split("code_of(")[1].split(")")[0]
    covered = set(source_files(*re.findall(r'"([^"]+)"', listed), *(shared if "*JUDGING" in listed else ())))
    todo, seen = [PACKAGE / "judge.py", *source_files("gates", "setups", "workloads")], set[Path]()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            imported = re.findall(r"^from kvladder\.([\w.]+) import", path.read_text(encoding="utf-8"), re.MULTILINE)
            places = [PACKAGE / f"{name.replace('.', '/')}.py" for name in imported]
            todo += [place for place in places if place.is_file()]
    outside = {path.relative_to(PACKAGE).as_posix() for path in seen - covered}
    assert {name for name in outside if not name.startswith(("config/", "serving/"))} == set()


def test_a_trial_depends_on_the_sampler_and_not_on_the_rooflines() -> None:
    assert {name for name in names("plain") if name.startswith("probes/")} == {"probes/sampler.py"}
