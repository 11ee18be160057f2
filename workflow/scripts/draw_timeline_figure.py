"""Draw one figure of timelines."""

import importlib
from pathlib import Path

from kvladder.figures.parts.style import save
from kvladder.timeline import tables

module = importlib.import_module(f"kvladder.timeline.figures.{snakemake.wildcards.figure}")
save(module, tables.load(Path(snakemake.input.tables[0]).parent), Path(snakemake.output.svg).parent)
