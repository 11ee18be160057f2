"""Write what captures showed: HTML, PDF, and in short Markdown."""

import os
from pathlib import Path

from kvladder.timeline.report import build

given, (html, pdf, short) = snakemake.input, map(Path, snakemake.output)
shown = dict(zip(snakemake.params.setups, given.perfetto, strict=True))
perfetto = {setup: Path(os.path.relpath(path, html.parent)).as_posix() for setup, path in shown.items()}
folders = Path(given.tables[0]).parent, Path(given.figures[0]).parent
about = {name: snakemake.params[name] for name in ("missing", "compare_with")}
build(*folders, (html, pdf, short), snakemake.params.title, perfetto, **about)
