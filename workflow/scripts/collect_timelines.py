"""Put the tables of all captures together."""

from pathlib import Path

from kvladder.timeline import tables

parts = [tables.load(folder) for folder in dict.fromkeys(Path(path).parent for path in snakemake.input.tables)]
tables.write(tables.collect(parts), Path(snakemake.output[0]).parent)
