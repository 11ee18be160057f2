"""Make every table from judged trials."""

from pathlib import Path

from kvladder.tables.build import build

folders = [Path(path).parent for path in snakemake.input.trials]
build(folders, Path(snakemake.output[0]).parent, baseline=snakemake.params.baseline)
