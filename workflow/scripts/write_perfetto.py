"""Write one capture's events as a file that Perfetto opens."""

from pathlib import Path

from kvladder.timeline import perfetto, tables

found = tables.load(Path(snakemake.input.tables[0]).parent)
perfetto.write(found, snakemake.wildcards.setup, Path(snakemake.output[0]))
