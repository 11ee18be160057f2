"""Write what captures showed: HTML, PDF, and in short Markdown."""

import os
from pathlib import Path

from kvladder.timeline.report import build

given, (html, pdf, short) = snakemake.input, map(Path, snakemake.output)
perfetto = {Path(path).parent.name: Path(os.path.relpath(path, html.parent)).as_posix() for path in given.perfetto}
folders = Path(given.tables[0]).parent, Path(given.figures[0]).parent
build(*folders, (html, pdf, short), snakemake.params.title, perfetto)
