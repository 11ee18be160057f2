"""Which code a result depends on: all of it, and nothing else's."""

from __future__ import annotations

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


def test_a_trial_depends_on_the_sampler_and_not_on_the_rooflines() -> None:
    assert {name for name in names("plain") if name.startswith("probes/")} == {"probes/sampler.py"}
