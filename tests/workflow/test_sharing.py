"""A whole run with two engines a trial: what one stored the other finds where the setup shares its pool, and nowhere
else; and a pool that is said to be shared and isn't makes the trial invalid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from .conftest import CONFIG, Project, clone
from .faults import LMCACHE, MOONCAKE, NATIVE, NATIVE_FILES, PLAIN, PREFIX_CACHE, SIMPLE_CPU, by_name
from .test_faults import assert_seen

PROMPTS, PROMPT_TOKENS, HIT = 3, 520, 512

SHARED = {"lmcache-mp": LMCACHE, "lmcache-files": LMCACHE | {"files": {}}, "mooncake-store": MOONCAKE}
APART = {"prefix-cache": PREFIX_CACHE, "native": NATIVE, "native-files": NATIVE_FILES, "simple-cpu": SIMPLE_CPU}
FAULT = by_name("pool-not-shared")
SETUPS: dict[str, Any] = {"plain": PLAIN, **APART, **SHARED, FAULT.name: FAULT.served()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The experiment, run to its report."""
    project = clone(tmp_path_factory.mktemp("sharing") / "clone")
    project.config(
        repeats=1,
        start="folded",
        host_slots=2,
        model=CONFIG["model"] | {"weights": "seeded"},
        engine=CONFIG["engine"] | {"kv_pool_bytes": "8MiB"},
        setups=SETUPS,
        workloads={"sharing": {"kind": "sharing", "prompts": PROMPTS, "prompt_tokens": PROMPT_TOKENS}},
    )
    done = project.snakemake("--cores", "2", timeout=600)
    assert done.code == 0, done.text
    return project


def files(run: Project, setup: str) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A trial's folder, record and verdict."""
    (folder,) = (run.folder / "results/tiny/trials" / setup / "sharing").iterdir()
    names = ("trial.json", "verdict.json")
    return folder, *(json.loads((folder / name).read_text(encoding="utf-8")) for name in names)  # type: ignore[return-value]


def hits(verdict: dict[str, Any]) -> dict[str, int]:
    """Tokens that weren't computed, by pass of the workload."""
    return {
        window["name"]: window["prompt_tokens"] - window["by_source"]["computed"]
        for window in verdict["windows"]
        if window["workload"] == "sharing"
    }


@pytest.mark.parametrize("setup", [*SHARED, *APART, "plain"])
def test_what_a_second_engine_finds(run: Project, setup: str) -> None:
    _, _, verdict = files(run, setup)
    assert verdict["status"] == "valid", verdict["reason"]
    found = {"cold": 0, "first-hit": PROMPTS * HIT if setup in SHARED else 0, "warm": PROMPTS * HIT}
    assert hits(verdict) == (found if setup != "plain" else dict.fromkeys(found, 0))
    gates = {
        (gate["gate"], gate["expected"].partition(":")[0]): gate["decision"]
        for gate in verdict["gates"]
        if gate["workload"] in (None, "sharing")
    }
    expected = f"{sum(found.values())} hit tokens in 2 passes"
    assert gates.get(("hits-as-predicted", expected)) == (None if setup == "plain" else "pass")
    assert gates["config-readback", "engine-2"] == "pass", "the second engine's configuration is read back too"


def test_a_trial_has_two_engines_with_ports_logs_and_pages_of_their_own(run: Project) -> None:
    folder, trial, _ = files(run, "mooncake-store")
    assert [server["name"] for server in trial["servers"]] == ["mooncake", "engine", "engine-2"]
    assert [item["engine"] for item in trial["passes"] if item["workload"] == "sharing"] == [0, 1, 0]
    assert {item["engine"] for item in trial["passes"] if item["workload"] == "right-kv"} == {0}
    argv = [server["argv"] for server in trial["servers"][1:]]
    assert len({each[each.index("--port") + 1] for each in argv}) == 2
    first, second = trial["effective"], trial["further_engines"]["engine-2"]["effective"]
    assert first["kv_pool_tokens"] == second["kv_pool_tokens"]
    assert (folder / "logs" / "engine-2.log").is_file() and "logs/engine-2.log" in trial["files"]
    lines = (folder / "counters.jsonl").read_text(encoding="utf-8").splitlines()
    assert all({"engine", "engine-2", "mooncake"} <= json.loads(line)["pages"].keys() for line in lines)


def test_the_engines_of_a_mooncake_trial_bring_the_pool_together(run: Project) -> None:
    folder, trial, _ = files(run, "mooncake-store")
    paths = (folder / "mooncake.json", folder / "engine-2" / "mooncake.json")
    segments = [json.loads(path.read_text(encoding="utf-8"))["global_segment_size"] for path in paths]
    assert segments == [32 << 20, 32 << 20]
    assert trial["expected"]["capacity_bytes"] == {"remote": 64 << 20}


def test_tiers_on_disk_lie_apart_and_are_gone(run: Project) -> None:
    folder, trial, _ = files(run, "native-files")
    roots = [
        connector["kv_connector_extra_config"]["secondary_tiers"][0]["root_dir"]
        for connector in (trial["expected"]["connector"], trial["further_engines"]["engine-2"]["connector"])
    ]
    assert roots == [str(folder / "tier"), str(folder / "engine-2" / "tier")]
    assert not any(Path(root).exists() for root in roots)


def test_a_second_engine_finds_on_disk_what_the_pool_has_lost(run: Project) -> None:
    """The server empties its pool before the first hit; the files are its own, not an engine's, and go with it."""
    folder, _, verdict = files(run, "lmcache-files")
    sources = {window["name"]: window["by_source"] for window in verdict["windows"] if window["workload"] == "sharing"}
    assert sources["first-hit"]["nvme"] == sources["warm"]["cpu"] == PROMPTS * HIT
    assert not list(folder.glob("**/tier"))


def test_a_pool_that_is_not_shared_after_all(run: Project) -> None:
    _, _, verdict = files(run, FAULT.name)
    assert_seen(FAULT, verdict["status"], verdict["reason"])


def test_the_table_and_the_report_say_who_finds_it(run: Project) -> None:
    table = pl.read_parquet(run.folder / "results/tiny/tables/sharing.parquet")
    answers = dict(table.select("setup", "answer").iter_rows())
    assert answers == dict.fromkeys(SHARED, "found") | dict.fromkeys([*APART, "plain"], "not found")
    html = (run.folder / "reports" / "tiny.html").read_text(encoding="utf-8")
    assert "Does a second engine find it?" in html
    assert "No trial is valid" not in html


def test_nothing_is_left(run: Project) -> None:
    assert not run.processes()
