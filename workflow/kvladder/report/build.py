"""Writes the reports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvladder.config import registry
from kvladder.report import page
from kvladder.report.view import view
from kvladder.tables.model import Tables, load


def build(  # noqa: PLR0917
    tables_dir: Path, figures_dir: Path, out_html: Path, out_pdf: Path, out_md: Path, config: Mapping[str, Any]
) -> None:
    """Write HTML (one file, no network), PDF and Markdown. Equal inputs give equal files.

    `tables_dir` is what `kvladder.tables.build` wrote, `figures_dir` holds the figures as `figures.parts.style.save`
    writes them (one that is missing is left out and named), `config` the experiment's effective configuration as plain
    data.
    """
    tables = load(tables_dir)
    seen = {**view(tables, config), "figures": _figures(figures_dir, tables)}
    html = page.render("report.html.j2", seen, paged=False)
    paged = page.render("report.html.j2", seen, paged=True)
    summary = page.render("summary.md.j2", seen, paged=False)
    for path in (out_html, out_pdf, out_md):
        path.parent.mkdir(parents=True, exist_ok=True)
    out_html.write_text(html, encoding="utf-8")
    out_pdf.write_bytes(page.pdf(paged))
    out_md.write_text(summary, encoding="utf-8")


def _figures(folder: Path, tables: Tables) -> list[dict[str, Any]]:
    """Every figure that concerns this experiment, with its wide and narrow drawing for the page and a plain one for
    paper."""
    modules = [registry.load("figures", kind) for kind in registry.kinds("figures")]
    modules = [module for module in modules if not hasattr(module, "applies") or module.applies(tables)]
    return [page.drawing(folder, module) for module in sorted(modules, key=lambda each: (each.CATEGORY, each.NAME))]
