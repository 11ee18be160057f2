# The experiment, its plan, and what rules share. There is no rule here.
import os
import re
import sys
import time
from functools import cache
from pathlib import Path

from kvladder.config import registry, rooflines
from kvladder.config import stack as stacks
from kvladder.config.experiment import block_id, model_id, plan
from kvladder.config.sources import read
from kvladder.config.yaml import ConfigError
from kvladder.plan import bringup, digest, estimate, stored
from kvladder.plan.captions import constants
from kvladder.plan.parent import WORKFLOW_PID
from kvladder.provenance.host import describe_host
from kvladder.serving.errors import PortInUse
from kvladder.serving.ports import check_free
from kvladder.stack import paths, variants

# Config files are read here and not by `configfile:`, which lets a duplicate key win silently, takes 1e9 for a string,
# and would mix the default experiment into every other one.
try:
    EXPERIMENT = read(
        workflow.config_settings.configfiles or [Path("config/config.yaml")],
        workflow.config_settings.config_args or (),
    )
    STACK_FOLDER = paths.find(EXPERIMENT.stack)
    STACK = stacks.load(STACK_FOLDER)
    STACK_FILES = paths.definition_files(STACK_FOLDER, STACK)
    variants.check(EXPERIMENT, STACK)
    BUDGET_S = estimate.budget(EXPERIMENT.budget_s)
except (ConfigError, ValueError) as problem:
    # One message, no trace-back; nothing has been started.
    print(f"kvladder: {problem}", file=sys.stderr)
    sys.exit(1)

# What rules look up is the effective configuration, every default filled in.
config.clear()
config.update(EXPERIMENT.model_dump(mode="json", by_alias=True))

PYTHON = sys.executable
RESULTS = Path("results", EXPERIMENT.experiment)
PLAN = plan(EXPERIMENT)
FOLDED = EXPERIMENT.start == "folded"
GPUS = EXPERIMENT.engine.tensor_parallel if STACK.device == "cuda" else 0
# Trials don't share their cores with other jobs, whatever --cores says; a command line's --resources would replace the
# profile's cap on `host`, so the cap is set here as well.
TRIAL_THREADS = max(1, (workflow.resource_settings.cores or 1) // EXPERIMENT.host_slots)
if "host" not in workflow.global_resources or EXPERIMENT.host_slots > 1:
    workflow.register_resource("host", EXPERIMENT.host_slots)


def shown(path):
    """A path relative to the working directory where it lies below it."""
    path = Path(path)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def program(name):
    """A script that is run by `shell`."""
    return shown(Path(workflow.basedir) / "scripts" / name)


STACK_DIGEST = digest.digest(STACK_FILES, paths.ROOT)
STAMP = shown(paths.stamp_of(STACK_FOLDER, STACK_DIGEST))
MODEL = f"results/{{experiment}}/models/{model_id(EXPERIMENT)}/config.json"
START = "results/{experiment}/start/{setup}-{start}.json"
TRIAL = "results/{experiment}/trials/{setup}/{suite}/r{repeat}-{run}/trial.json"
OWN_VERDICT = "results/{experiment}/trials/{setup}/{suite}/r{repeat}-{run}/own-verdict.json"
VERDICT = "results/{experiment}/trials/{setup}/{suite}/r{repeat}-{run}/verdict.json"
BLOCK = "results/{experiment}/blocks/{suite}/r{repeat}-{block}.json"
ROOFLINES = "results/{experiment}/rooflines/{host}.json"
CAPTURE = "results/{experiment}/timelines/captures/{setup}/capture.json"
HOST = describe_host([]).host_id
TABLE_NAMES = (
    "trials",
    "passes",
    "requests",
    "metrics",
    "summary",
    "break_even",
    "gates",
    "right_kv",
    "oracle",
    "parity",
    "limits",
    "pcie_trace",
    "pcie_bytes",
    "held",
    "sharing",
    "ladder",
    "turns",
    "cliffs",
    "rooflines",
)
TABLE = [f"results/{{experiment}}/tables/{name}.{ending}" for name in TABLE_NAMES for ending in ("parquet", "csv")]
TABLE.append("results/{experiment}/tables/context.json")
FIGURES = [kind.replace("-", "_") for kind in registry.kinds("figures")]  # the names of their files
FIGURE = [f"results/{{experiment}}/figures/{{figure}}.{ending}" for ending in ("svg", "narrow.svg", "png")]
REPORT = ["reports/{experiment}.html", "reports/{experiment}.pdf", "results/{experiment}/summary.md"]


STARTS = {setup: str(bringup.start_path(EXPERIMENT, RESULTS, setup, STACK_DIGEST)) for setup in config["setups"]}
SELECTION = estimate.select(
    PLAN,
    RESULTS,
    started=[setup for setup, path in STARTS.items() if FOLDED or Path(path).is_file()],
    budget_s=BUDGET_S,
)
TRIALS = sorted(SELECTION.done + SELECTION.todo, key=lambda trial: trial.order)
BY_KEY = {(trial.setup, trial.suite, str(trial.repeat), trial.run): trial for trial in PLAN}


def one_of(names):
    """A wildcard constraint: these names and nothing else."""
    return "|".join(re.escape(name) for name in sorted(set(names), key=len, reverse=True))


wildcard_constraints:
    experiment=re.escape(EXPERIMENT.experiment),
    setup=one_of(config["setups"]),
    suite=one_of(EXPERIMENT.suite_map()),
    repeat=r"\d+",
    run=one_of(trial.run for trial in PLAN),
    start=r"[0-9a-f]{8}",
    block=r"[0-9a-f]{8}",
    host=r"[0-9a-z]+",


def of_experiment(pattern, **wildcards):
    """Paths of this experiment."""
    return expand(pattern, experiment=EXPERIMENT.experiment, **wildcards)


def of_trials(pattern, trials):
    """The file of a pattern for every trial, in the plan's order."""
    return [str(RESULTS / trial.folder / Path(pattern).name) for trial in trials]


def judged(trials):
    """Trials and their verdicts. Targets name both: snakemake makes no intermediate file again that is merely missing."""
    trials = list(trials)
    return of_trials(TRIAL, trials) + of_trials(VERDICT, trials)


JUDGED = judged(TRIALS)


def known_rooflines():
    """Rooflines that trials are judged by: those on disk, and this machine's where this run measures trials on it.

    A run that measures no trial measures no roofline either: what was measured elsewhere isn't this machine's. Nor does
    a stand-in engine have links.
    """
    here = of_experiment(ROOFLINES, host=HOST) if SELECTION.todo and STACK.device != "none" else []
    return sorted({*map(str, rooflines.files(RESULTS)), *here})


KNOWN_ROOFLINES = known_rooflines()


def planned(wildcards):
    """The trial of a job."""
    return BY_KEY[wildcards.setup, wildcards.suite, wildcards.repeat, wildcards.run]


def trial_priority(wildcards):
    """Earlier in the plan's order, higher."""
    return len(PLAN) - planned(wildcards).order


def start_record(wildcards):
    """The bring-up that a trial waits for; nothing where its first trial is the bring-up."""
    return [] if FOLDED else ancient(STARTS[wildcards.setup])


@cache
def code_of_setup(setup, suite=None):
    """Modules that make raw data of a setup, as shown, and their digest: the same for every repeat, so made once."""
    modules = bringup.code_of_setup(EXPERIMENT, setup, suite)
    return [shown(path) for path in modules], digest.digest(modules, paths.ROOT)


def measuring_code(wildcards):
    """Modules that make a job's raw data; their content counts, not their time."""
    modules, _ = code_of_setup(wildcards.setup, wildcards.get("suite"))
    return ancient(modules)


def code_digest(wildcards):
    """Content of `measuring_code`, without comments and formatting."""
    _, content = code_of_setup(wildcards.setup, wildcards.suite)
    return content


def code_of(*names):
    """Folders and modules of the library that a later stage runs."""
    return [shown(path) for path in digest.source_files(*names)]


def newest(files):
    """The file that was changed last: where it isn't newer than an output, none of them is.

    For rules that have a job a trial: each input costs snakemake a tenth of a millisecond, and there are thousands of
    jobs. Which files there are belongs to the rule's `params`, so that one that is gone counts.
    """
    return max(files, key=lambda path: (os.stat(path).st_mtime_ns, path))


BLOCKS = {}
for trial in TRIALS:
    BLOCKS.setdefault((trial.suite, str(trial.repeat)), []).append(trial)


def of_block(pattern):
    """Input function: the files of a block's trials."""

    def files(wildcards):
        return of_trials(pattern, BLOCKS[wildcards.suite, wildcards.repeat])

    return files


def block_path(wildcards):
    """Where the findings across a trial's block are: another set of trials, another file."""
    block = block_id(BLOCKS[wildcards.suite, wildcards.repeat])
    return str(RESULTS / "blocks" / wildcards.suite / f"r{wildcards.repeat}-{block}.json")


def figure_caption(wildcards):
    """A figure's caption, from its module."""
    return constants(wildcards.figure).get("CAPTION", "")


def figure_labels(wildcards):
    """What a figure is called in snakemake's report, from its module."""
    return {"figure": constants(wildcards.figure).get("TITLE", wildcards.figure)}


def figure_category(wildcards):
    """A figure's category in snakemake's report, from its module."""
    return constants(wildcards.figure).get("CATEGORY", "Figures")


if workflow.is_main_process:
    print(f"kvladder: {EXPERIMENT.experiment}: {SELECTION.describe(GPUS)}", file=sys.stderr)
    for warning in EXPERIMENT.short_prompts():
        print(f"kvladder: {warning}", file=sys.stderr)
    os.environ[WORKFLOW_PID] = str(os.getpid())
    if BUDGET_S is not None:
        os.environ.setdefault(estimate.DEADLINE, str(time.time() + BUDGET_S))


def check_port():
    """A port that others hold would fail one start after the other; what starts no server doesn't mind."""
    starts_servers = any(job.rule.name in ("measure_trial", "start_setup") for job in workflow.dag.needrun_jobs())
    if EXPERIMENT.engine.port is None or not starts_servers:
        return
    try:
        check_free(EXPERIMENT.engine.port)
    except PortInUse as problem:
        print(f"kvladder: engine.port: {problem}; free it, or leave the key out", file=sys.stderr)
        sys.exit(1)


def claim_results():
    """From here on the results are this run's: the lock's file stays open as long as the process lives."""
    try:
        stored.claim(RESULTS)
    except stored.NotOurs as problem:
        print(f"kvladder: {problem}", file=sys.stderr)
        sys.exit(1)


# Jobs read the effective configuration from here. It is no rule's output: trials must not depend on it as a whole.
onstart:
    check_port()
    claim_results()
    stored.write(EXPERIMENT, RESULTS)


def sweep():
    """A trial that its job refused to start leaves a record that says so: the next run is to measure it."""
    swept = estimate.sweep(RESULTS)
    if swept:
        print(f"kvladder: {len(swept)} trials were not started for lack of time; run again", file=sys.stderr)


onsuccess:
    sweep()


onerror:
    sweep()
