"""Draw one figure from the tables."""

from pathlib import Path

from kvladder.config import registry
from kvladder.figures.parts.style import save
from kvladder.tables.model import load

module = registry.load("figures", snakemake.wildcards.figure.replace("_", "-"))
save(module, load(Path(snakemake.input.tables[0]).parent), Path(snakemake.output.svg).parent)
