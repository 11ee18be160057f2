"""Write the truth bench's report, HTML and PDF."""

from pathlib import Path

from kvladder.bench.report import build

given = snakemake.input
html, pdf = map(Path, snakemake.output)
build(Path(given.tables[0]).parent, Path(given.figures[0]).parent, html, pdf, snakemake.params.config)
