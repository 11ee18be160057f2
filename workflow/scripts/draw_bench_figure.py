"""Draw one figure of the truth bench from its tables."""

from pathlib import Path

from kvladder.bench.figures import FIGURES
from kvladder.bench.tables import load
from kvladder.figures.parts.style import save

tables = load(Path(snakemake.input.tables[0]).parent)
save(FIGURES[snakemake.wildcards.figure], tables, Path(snakemake.output[0]).parent)
