"""The fault matrix: everything in `faults.FAULTS` is injected into whole runs, and no bad number becomes a valid one.

Most faults are a setup each of one experiment, beside healthy twins. A second, small one runs before it, under a busy
neighbour and with workloads that repeat themselves; it leaves the tier that makes a cold pass of the first one warm.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvladder.judge import judge_trial

from . import faults
from .conftest import CONFIG, STUB, Done, Project, clone
from .faults import FAULTS, HEALTHY, NATIVE_FILES, PLAIN, Fault, by_name

PROMPTS, PROMPT_TOKENS, US_PER_TOKEN = 25, 257, 10
REPEAT = {
    "kind": "repeat",
    "prompts": PROMPTS,
    "prompt_tokens": PROMPT_TOKENS,
    "output_tokens": 4,
    "warm_passes": 3,
}
"""A hundred measured requests a trial, so that one of them is 1 %."""

SETTINGS: dict[str, Any] = {
    "repeats": 1,
    "start": "folded",
    "model": CONFIG["model"] | {"weights": "seeded"},
    "engine": CONFIG["engine"] | {"kv_pool_bytes": "8MiB", "env": {"KVLADDER_STUB_US_PER_TOKEN": str(US_PER_TOKEN)}},
    "load": {"quiet_s": 0.05, "drain_s": 2, "request_s": 10, "stall_s": 1.5},
}
LONGEST_TRIAL_S = 90
"""Far beyond what a trial takes on a busy machine: the longest of its deadlines are 10 s."""

OF_TWO_ENGINES = ("pool-not-shared",)
"""Injected by ``test_sharing.py``."""

SWITCHED = [fault for fault in FAULTS if fault.switch is not None and fault.name not in OF_TWO_ENGINES]
OF_WORKLOAD = ("equal-prompts", "shared-seed", "noisy-neighbour", "truncated-raw-file")

BAD_WORKLOADS = {
    "equal_prompts": '''
from dataclasses import replace
from typing import Literal
from kvladder.workloads.base import Prompts, rounds
from kvladder.workloads.repeat import RepeatConfig


class CONFIG(RepeatConfig):
    """Sends one prompt under many names."""

    kind: Literal["equal-prompts"]

    def passes(self, name, context):
        (first,) = Prompts(name, context).requests(1, self.prompt_tokens, self.output_tokens)
        requests = [replace(first, index=index, key=f"p{index}") for index in range(self.prompts)]
        return rounds(name, requests, concurrency=1, warm_passes=self.warm_passes)
''',
    "shared_seed": '''
from typing import Literal
from kvladder.workloads.base import rounds, Prompts
from kvladder.workloads.repeat import RepeatConfig


class CONFIG(RepeatConfig):
    """Draws from the same seed whatever the workload's name."""

    kind: Literal["shared-seed"]

    def passes(self, name, context):
        requests = Prompts("shared", context).requests(self.prompts, self.prompt_tokens, self.output_tokens)
        return rounds(name, requests, concurrency=1, warm_passes=self.warm_passes)
''',
}
"""What somebody's own workload could do; kvladder's can't."""


@dataclass(frozen=True)
class Ended:
    """How a trial ended: its folder, its record, its verdict."""

    folder: Path
    trial: dict[str, Any]
    verdict: dict[str, Any]

    def requests(self) -> list[dict[str, Any]]:
        """What the client wrote of the requests of `repeat`."""
        text = (self.folder / "repeat.requests.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]


@dataclass(frozen=True)
class Run:
    """A run of snakemake that is over: what it printed, its trials by setup or suite, and another run beside it."""

    project: Project
    done: Done
    trials: dict[str, Ended]
    beside: Done | None = None


@pytest.fixture(scope="module")
def kept_tier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `tier-not-cleared` keeps its files from one run to the next."""
    return tmp_path_factory.mktemp("kept-tier")


def ended(project: Project, part: int) -> dict[str, Ended]:
    """Every trial that was planned, by one part of its path: 0 is the setup, 1 the suite."""
    root = project.folder / "results/tiny/trials"
    found = {}
    for path in root.glob("*/*/*/verdict.json"):
        texts = [path.with_name(name).read_text(encoding="utf-8") for name in ("trial.json", "verdict.json")]
        found[path.relative_to(root).parts[part]] = Ended(path.parent, *map(json.loads, texts))
    return found


@contextlib.contextmanager
def busy_neighbour() -> Iterator[None]:
    """Half of the machine's cores are taken by somebody else."""
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(-(-(os.cpu_count() or 1) // 2))
    ]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory, kept_tier: Path) -> Run:
    """One setup, a suite a fault; measured, then a raw file is cut, then judged. A second run is tried meanwhile."""
    project = clone(tmp_path_factory.mktemp("small") / "clone")
    for name, code in BAD_WORKLOADS.items():
        (project.folder / "workflow/kvladder/workloads" / f"{name}.py").write_text(code, encoding="utf-8")
    project.config(
        **SETTINGS,
        baseline="keeps",
        setups={"keeps": kept(by_name("tier-not-cleared"), kept_tier)},
        workloads={
            "repeat": REPEAT,
            "equal": {**REPEAT, "kind": "equal-prompts"},
            "one": {**REPEAT, "kind": "shared-seed"},
            "other": {**REPEAT, "kind": "shared-seed"},
            "cut": REPEAT,
        },
        suites={
            "repeat": ["repeat"],
            "equal-prompts": ["equal"],
            "shared-seed": ["one", "other"],
            "truncated-raw-file": ["cut"],
        },
    )
    beside: list[Done] = []
    second = threading.Thread(target=lambda: beside.append(second_run(project)))
    with busy_neighbour():
        second.start()
        measured = project.snakemake("measure", "--cores", "2", timeout=600)
        second.join()
    assert measured.code == 0, measured.text
    (cut,) = (project.folder / "results/tiny/trials/keeps/truncated-raw-file").glob("*/counters.jsonl")
    os.truncate(cut, cut.stat().st_size - 100)
    done = project.snakemake("judge", "--cores", "2")
    assert done.code == 0, done.text
    trials = ended(project, 1)
    return Run(project, done, trials | {"noisy-neighbour": trials["repeat"]}, *beside)


def second_run(project: Project) -> Done:
    """Start another run over the same results as soon as the first has begun, past snakemake's own lock."""
    begun = project.folder / "results/tiny/experiment.json"
    deadline = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return project.snakemake("measure", "--cores", "1", "--nolock")


def kept(fault: Fault, folder: Path) -> dict[str, Any]:
    """The fault's setup, with the folder that its stand-in wants to know."""
    setup = fault.served()
    return {**setup, "env": {**setup["env"], "KVLADDER_STUB_TIER": str(folder)}}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory, small_run: Run, kept_tier: Path) -> Run:
    """The healthy setups and one for each switch, each in one trial."""
    project = clone(tmp_path_factory.mktemp("matrix") / "clone")
    setups = HEALTHY | {fault.name: kept(fault, kept_tier) for fault in SWITCHED}
    project.config(**SETTINGS, host_slots=2, setups=setups, workloads={"repeat": REPEAT})
    done = project.snakemake("judge", "--cores", "2", timeout=1200)
    return Run(project, done, ended(project, 0))


def assert_seen(fault: Fault, status: str, text: str) -> None:
    """The status is the fault's, and its words stand in the text in their order."""
    assert status == fault.status, text
    rest = text
    for words in fault.words:
        assert words in rest, text
        rest = rest.partition(words)[2]


def test_the_run_goes_on_and_loses_nothing(matrix: Run) -> None:
    assert matrix.done.code == 0, matrix.done.text
    assert matrix.trials.keys() == HEALTHY.keys() | {fault.name for fault in SWITCHED}
    for ending in matrix.trials.values():
        for name, entry in ending.trial["files"].items():
            assert (ending.folder / name).stat().st_size == entry["bytes"]


@pytest.mark.parametrize("setup", HEALTHY)
def test_a_healthy_twin_is_valid(matrix: Run, setup: str) -> None:
    verdict = matrix.trials[setup].verdict
    assert verdict["status"] == "valid", verdict["reason"]
    tier = next(gate for gate in verdict["gates"] if gate["gate"] == "tier-was-used")
    # The older engine doesn't tell a hit on disk from one in host memory.
    unknown = setup in ("plain", "native-files-0.26")
    assert tier["decision"] == ("not-checked" if unknown else "pass"), tier


@pytest.mark.parametrize(
    "fault", [fault for fault in SWITCHED if fault.name != "client-overload"], ids=lambda f: f.name
)
def test_a_faulty_setup(matrix: Run, fault: Fault) -> None:
    verdict = matrix.trials[fault.name].verdict
    assert_seen(fault, verdict["status"], verdict["reason"] or "")


def test_client_overload(matrix: Run) -> None:
    # Its gate only advises in this experiment, because machines that run tests are busy; judged as usual it decides.
    ending = matrix.trials["client-overload"]
    gates = [gate for gate in ending.verdict["gates"] if gate["gate"] == "client-not-saturated"]
    assert "fail" in {gate["decision"] for gate in gates}
    verdict = judge_trial(ending.folder)
    assert_seen(by_name("client-overload"), verdict.status, verdict.reason or "")


def test_a_role_is_no_token(matrix: Run) -> None:
    # Every one of these prompts is computed, and a role comes before that.
    computing_ns = PROMPT_TOKENS * US_PER_TOKEN * 1000
    requests = matrix.trials["role-chunk"].requests()
    assert len(requests) == 4 * PROMPTS
    assert min(request["first_token_ns"] - request["send_ns"] for request in requests) >= computing_ns
    assert min(request["headers_ns"] - request["send_ns"] for request in requests) < computing_ns, "the role came early"


def test_no_token_is_no_time_to_first_token(matrix: Run) -> None:
    (silent,) = [request for request in matrix.trials["no-text"].requests() if request["status"] == "failed"]
    assert silent["first_token_ns"] is None, "unknown, and not 0"


@pytest.mark.parametrize("name", OF_WORKLOAD)
def test_a_faulty_suite(small_run: Run, name: str) -> None:
    fault, verdict = by_name(name), small_run.trials[name].verdict
    if fault.advisory is None:
        assert_seen(fault, verdict["status"], verdict["reason"] or "")
        return
    (gate,) = [gate for gate in verdict["gates"] if gate["gate"] == fault.advisory and gate["workload"] == "repeat"]
    assert gate["decision"] == "fail"
    assert float(gate["seen"].partition("%")[0]) > 20
    assert_seen(fault, verdict["status"], f"{verdict['reason'] or ''} {gate['expected']}")


def test_two_runs_at_once(small_run: Run) -> None:
    assert small_run.beside is not None
    assert small_run.beside.code != 0
    (message,) = [line for line in small_run.beside.messages if "in use" in line]
    assert_seen(by_name("two-runs-at-once"), "refused", message)
    assert "Traceback" not in small_run.beside.text


def test_nothing_hangs(matrix: Run, small_run: Run) -> None:
    seconds = {
        name: (ending.trial["end_ns"] - ending.trial["start_ns"]) / 1e9
        for run in (matrix, small_run)
        for name, ending in run.trials.items()
    }
    assert max(seconds.values()) < LONGEST_TRIAL_S, seconds


def test_nothing_is_left_behind(matrix: Run, small_run: Run) -> None:
    for run in (matrix, small_run):
        servers = [server for ending in run.trials.values() for server in ending.trial["servers"]]
        assert servers
        assert not run.project.processes()
        assert not carrying({server["env"]["KVLADDER_TAG"] for server in servers})
        tiers = [path for ending in run.trials.values() for path in ending.folder.glob("tier*")]
        assert not tiers, "a tier on disk goes with its trial"


def carrying(tags: set[str]) -> list[psutil.Process]:
    """Processes of these trials, wherever they went: their marks are inherited. Without one nobody listens either."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("KVLADDER_TAG") in tags:
                found.append(process)
    return found


def without_privileges() -> None:
    """Let permissions bind root as well: drop CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH before the program starts."""
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def test_read_only_results(project: Project) -> None:
    (project.folder / "results").mkdir()
    (project.folder / "results").chmod(0o555)
    done = project.snakemake("judge", "--cores", "1", preexec_fn=without_privileges)
    (project.folder / "results").chmod(0o755)
    assert done.code != 0
    (message,) = [line for line in done.messages if "results" in line]
    assert_seen(by_name("read-only-results"), "refused", message)
    assert "Traceback" not in done.text
    assert not project.processes()


def test_results_disk_full(project: Project) -> None:
    """A tier on disk on a disk of a few megabytes that has the results as well, and that somebody else fills."""
    (project.folder / "results").mkdir()
    mounted = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*mounted, "mount -t tmpfs none results"], cwd=project.folder, check=False).returncode != 0:
        pytest.skip("the kernel lets nobody here mount a file system of a few megabytes")
    model = SETTINGS["model"] | {"shape": SETTINGS["model"]["shape"] | {"num_hidden_layers": 16}}
    project.config(
        **SETTINGS | {"model": model},
        setups={"plain": PLAIN, "results-disk-full": NATIVE_FILES},
        workloads={"repeat": REPEAT},
    )
    # 256 KiB a block of 128 tokens, so 50 blocks: there is room for them before the first pass, and then there is not.
    trial = "results/tiny/trials/results-disk-full/repeat/*"
    neighbour = f"until ls {trial}/probes.jsonl; do sleep 0.02; done; cat /dev/zero >results/neighbour; "
    neighbour += f"until ls {trial}/trial.json; do sleep 0.02; done; rm results/neighbour"
    script = f'mount -t tmpfs -o size=32m none results; ({neighbour}) >/dev/null 2>&1 & "$@"; code=$?; '
    script += "cp -r results kept; exit $code"
    done = project.snakemake("judge", "--cores", "2", before=[*mounted, script, "sh"])
    (project.folder / "results").rmdir()
    (project.folder / "kept").rename(project.folder / "results")
    assert done.code == 0, done.text
    trials = ended(project, 0)
    assert trials["plain"].verdict["status"] == "valid", "what was finished is kept"
    verdict = trials["results-disk-full"].verdict
    assert_seen(by_name("results-disk-full"), verdict["status"], verdict["reason"])
    assert not project.processes()


def test_every_fault_is_injected() -> None:
    own = {"two-runs-at-once", "read-only-results", "results-disk-full", *OF_TWO_ENGINES}
    assert {fault.name for fault in FAULTS} == {fault.name for fault in SWITCHED} | set(OF_WORKLOAD) | own
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_every_switch_is_used() -> None:
    switches = runpy.run_path(str(STUB / "faults.py"))["FAULTS"]
    assert {fault.switch.partition(":")[0] for fault in FAULTS if fault.switch} == set(switches)


def test_the_readme_has_the_table() -> None:
    _, table, _ = faults.in_readme(faults.README.read_text(encoding="utf-8"))
    assert table == faults.table(), "run: make schemas"
