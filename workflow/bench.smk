# The truth bench: how truly do load clients measure? A workflow of its own, for no engine is started.
#
#   make bench                                          config/client-truth.yaml to its report
#   snakemake -s workflow/bench.smk -n                  what would run
#   snakemake -s workflow/bench.smk --configfile FILE   another bench
import re
import sys
from pathlib import Path

from kvladder.bench.clients.registry import CLIENTS
from kvladder.bench.figures import FIGURES
from kvladder.bench.server import SOURCE
from kvladder.config import stack as stacks
from kvladder.config.bench import plan
from kvladder.config.sources import read_bench
from kvladder.config.yaml import ConfigError
from kvladder.plan import digest
from kvladder.stack import paths

try:
    BENCH = read_bench(
        workflow.config_settings.configfiles or [Path("config/client-truth.yaml")],
        workflow.config_settings.config_args or (),
    )
except ConfigError as problem:
    print(f"kvladder: {problem}", file=sys.stderr)
    sys.exit(1)

PYTHON = sys.executable
RESULTS = Path("results", BENCH.experiment)
CELLS = {str(RESULTS / cell.folder / "cell.json"): cell for cell in plan(BENCH)}
PEERS = sorted({cell.client for cell in CELLS.values()} - {"kvladder"})
# A cell has the machine to itself, whatever the command line says.
workflow.register_resource("host", 1)


def shown(path):
    """A path relative to the working directory where it lies below it."""
    path = Path(path)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def program(name):
    """A script that is run by `shell`."""
    return shown(Path(workflow.basedir) / "scripts" / name)


def environments(client):
    """Folders whose environments a client runs in, with what defines each."""
    folders = {"vllm": [paths.ROOT / "envs" / "cpu"]}.get(client, [])
    return {
        folder: paths.definition_files(folder, stacks.load(folder)) for folder in [*folders, CLIENTS[client].folder]
    }


def stamp(folder, definition):
    """What stands for an installed environment: another definition, another file."""
    return shown(paths.stamp_of(folder, digest.digest(definition, paths.ROOT)))


ENVIRONMENTS = {folder: files for peer in PEERS for folder, files in environments(peer).items()}
STAMPS = {peer: [stamp(*environment) for environment in environments(peer).items()] for peer in PEERS}
SERVER = str(RESULTS / "server" / digest.digest([SOURCE], paths.ROOT)[:8])
# Code whose change makes a cell another measurement. Only the own client's cells depend on the own client.
COMMON = digest.source_files("bench/cell.py", "bench/server.py", "bench/truth.py", "bench/usage.py", "config/bench.py")
COMMON += digest.source_files("bench/clients/base.py")
OWN = digest.source_files("load", "config/traffic.py")
TABLES = [
    RESULTS / "tables" / f"{name}.{ending}" for name in ("cells", "goals", "machines") for ending in ("parquet", "csv")
]
TABLES.append(RESULTS / "tables" / "summary.md")
FIGURE = [str(RESULTS / f"figures/{{figure}}.{ending}") for ending in ("svg", "narrow.svg", "png")]
REPORT = [f"reports/{BENCH.experiment}.html", f"reports/{BENCH.experiment}.pdf"]
# What the look of figures and pages comes from.
LOOK = digest.source_files("figures/parts", "bench/figures", "bench/tables.py")
PAGES = digest.source_files(
    "bench/report.py", "report/page.py", "report/svg.py", "report/formats.py", "report/words.py"
)
PAGES += digest.source_files("report/templates")


def cell_of(wildcards):
    """The cell of a job."""
    return CELLS[str(RESULTS / "cells" / wildcards.cell / "cell.json")]


def measuring_code(wildcards):
    """Modules that make a cell's raw data."""
    client = cell_of(wildcards).client
    files = [*COMMON, *digest.source_files(f"bench/clients/{client}.py"), *(OWN if client == "kvladder" else [])]
    return ancient([shown(path) for path in files])


def measured_by(wildcards):
    """Content of `measuring_code` and the server, so that a stale cell is known by more than file times."""
    return digest.digest([Path(path) for path in measuring_code(wildcards)] + [SOURCE], paths.ROOT)


def environment_stamps(wildcards):
    """The environments of a cell's client."""
    return ancient(STAMPS.get(cell_of(wildcards).client, []))


wildcard_constraints:
    cell="|".join(re.escape(str(cell.folder.relative_to("cells"))) for cell in CELLS.values()),


rule all:
    input:
        TABLES,
        REPORT,


rule cells:
    input:
        list(CELLS),


for FOLDER, DEFINITION in ENVIRONMENTS.items():

    rule:
        name:
            "install_" + "_".join(FOLDER.relative_to(paths.ROOT / "envs").parts)
        input:
            script=ancient(program("install_stack.py")),
            definition=ancient([shown(path) for path in DEFINITION]),
        output:
            stamp(FOLDER, DEFINITION),
        log:
            f"logs/install_client/{FOLDER.name}.log",
        message:
            f"install {FOLDER.name}"
        shell:
            "{PYTHON:q} {input.script:q} {output:q} {log:q}"


rule build_server:
    input:
        script=ancient(program("build_reference_server.py")),
        source=ancient(shown(SOURCE)),
    output:
        SERVER,
    log:
        f"logs/build_server/{BENCH.experiment}.log",
    message:
        "build the reference server"
    shell:
        "{PYTHON:q} {input.script:q} {output:q} {log:q}"


# A cell is named by its definition and its repeat. `shell` and `ancient` for the reasons given in rules/measure.smk.
rule measure_client:
    input:
        script=ancient(program("measure_client.py")),
        server=ancient(SERVER),
        environments=environment_stamps,
        code=measuring_code,
    output:
        cell=str(RESULTS / "cells/{cell}/cell.json"),
        requests=str(RESULTS / "cells/{cell}/requests.parquet"),
    log:
        f"logs/measure_client/{BENCH.experiment}/{{cell}}.log",
    threads: workflow.cores
    resources:
        host=1,
    params:
        code=measured_by,
        cell=lambda wildcards: cell_of(wildcards).model_dump_json(),
    message:
        "measure {wildcards.cell}"
    shell:
        "{PYTHON:q} {input.script:q} {output.cell:q} {log:q} {input.server:q} {params.cell:q}"


rule bench_tables:
    input:
        cells=list(CELLS),
        code=[shown(path) for path in digest.source_files("bench/tables.py", "bench/truth.py", "stats/samples.py")],
    output:
        TABLES,
    log:
        f"logs/bench_tables/{BENCH.experiment}.log",
    params:
        goals=BENCH.goals.model_dump(),
    message:
        "build the bench's tables"
    script:
        "scripts/build_bench_tables.py"


rule draw_bench_figure:
    input:
        tables=TABLES,
        code=[shown(path) for path in LOOK],
    output:
        FIGURE,
    log:
        f"logs/draw_bench_figure/{BENCH.experiment}/{{figure}}.log",
    wildcard_constraints:
        figure="|".join(FIGURES),
    message:
        "draw {wildcards.figure}"
    script:
        "scripts/draw_bench_figure.py"


rule write_bench_report:
    input:
        tables=TABLES,
        figures=expand(FIGURE, figure=FIGURES),
        code=[shown(path) for path in [*LOOK, *PAGES]],
    output:
        REPORT,
    log:
        f"logs/write_bench_report/{BENCH.experiment}.log",
    params:
        config=BENCH.model_dump(),
    message:
        "write the bench's report"
    script:
        "scripts/write_bench_report.py"
