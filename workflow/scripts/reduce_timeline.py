"""Reduce one capture to tables."""

from pathlib import Path

from kvladder.config.rooflines import Rooflines
from kvladder.plan import stored
from kvladder.timeline import tables
from kvladder.timeline.ceiling import of_setup

folder = Path(snakemake.input.capture).parent
setup = snakemake.wildcards.setup
config = stored.read(folder.parents[2])
known = [Rooflines.model_validate_json(Path(path).read_text(encoding="utf-8")) for path in snakemake.input.rooflines]
reduced = tables.reduce(folder, config.setups[setup].read, of_setup(config.setups[setup], folder, known))
tables.write(reduced, Path(snakemake.output[0]).parent)
