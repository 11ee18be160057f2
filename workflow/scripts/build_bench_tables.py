"""Make the truth bench's tables from its cells."""

from pathlib import Path

from kvladder.bench.tables import build
from kvladder.config.bench import BenchGoals

folders = [Path(path).parent for path in snakemake.input.cells]
build(folders, BenchGoals(**snakemake.params.goals), Path(snakemake.output[0]).parent)
