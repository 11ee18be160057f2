"""Write the HTML and PDF report and the summary."""

from pathlib import Path

from kvladder.report.build import build

given, made = snakemake.input, snakemake.output
build(
    Path(given.tables[0]).parent,
    Path(given.figures[0]).parent,
    Path(made.html),
    Path(made.pdf),
    Path(made.summary),
    snakemake.params.config,
)
