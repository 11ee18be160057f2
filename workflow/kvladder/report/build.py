"""Writes the reports."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from kvladder.config import registry
from kvladder.report.svg import inline
from kvladder.report.view import view
from kvladder.report.words import STRONG
from kvladder.tables.model import Tables, load

TEMPLATES = Path(__file__).with_name("templates")


def build(  # noqa: PLR0917
    tables_dir: Path, figures_dir: Path, out_html: Path, out_pdf: Path, out_md: Path, config: Mapping[str, Any]
) -> None:
    """Write HTML (one file, no network), PDF and Markdown. Equal inputs give equal files.

    `tables_dir` is what `kvladder.tables.build` wrote, `figures_dir` holds the figures as `figures._style.save` writes
    them (one that is missing is left out and named), `config` the experiment's effective configuration as plain data.
    """
    tables = load(tables_dir)
    seen = view(tables, config)
    figures = _figures(figures_dir, tables)
    html = _render("report.html.j2", seen, figures, paged=False)
    paged = _render("report.html.j2", seen, figures, paged=True)
    summary = _render("summary.md.j2", seen, figures, paged=False)
    for path in (out_html, out_pdf, out_md):
        path.parent.mkdir(parents=True, exist_ok=True)
    out_html.write_text(html, encoding="utf-8")
    out_pdf.write_bytes(_pdf(paged))
    out_md.write_text(summary, encoding="utf-8")


def _figures(folder: Path, tables: Tables) -> list[dict[str, Any]]:
    """Every figure that concerns this experiment, with its wide and narrow drawing for the page and a plain one for
    paper."""
    found = []
    modules = [registry.load("figures", kind) for kind in registry.kinds("figures")]
    modules = [module for module in modules if not hasattr(module, "applies") or module.applies(tables)]
    for module in sorted(modules, key=lambda each: (each.CATEGORY, each.NAME)):
        wide, narrow = folder / f"{module.NAME}.svg", folder / f"{module.NAME}.narrow.svg"
        figure = {"name": module.NAME, "title": module.TITLE, "caption": module.CAPTION, "wide": None, "narrow": None}
        if wide.is_file():
            text = wide.read_text(encoding="utf-8")
            label = f"{module.TITLE}. {module.CAPTION}"
            figure["wide"] = inline(text, module.NAME, label)
            figure["data"] = "data:image/svg+xml;base64," + base64.b64encode(text.encode()).decode()
            if narrow.is_file():
                figure["narrow"] = inline(narrow.read_text(encoding="utf-8"), f"{module.NAME}-narrow", label)
        found.append(figure)
    return found


def _render(template: str, seen: Mapping[str, Any], figures: list[dict[str, Any]], paged: bool) -> str:
    # Escaping goes by no file ending: `select_autoescape()` leaves `.j2` alone.
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["emphasis"] = _emphasis
    environment.filters["md"] = _markdown
    styles = Markup((TEMPLATES / ("print.css" if paged else "screen.css")).read_text(encoding="utf-8"))  # noqa: S704
    return environment.get_template(template).render(**seen, figures=figures, paged=paged, styles=styles)


def _emphasis(text: str) -> Markup:
    """HTML of a sentence of `words`."""
    return Markup(escape(text).replace(STRONG[0], Markup("<strong>")).replace(STRONG[1], Markup("</strong>")))  # noqa: S704


def _markdown(text: Any) -> Markup:
    """Text that Markdown shows as it is: HTML escaped, no table cell or emphasis broken."""
    escaped = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for character in "\\`*_[]|":
        escaped = escaped.replace(character, "\\" + character)
    bold = escaped.replace(STRONG[0], "**").replace(STRONG[1], "**")
    return Markup(" ".join(bold.split()))  # noqa: S704 (escaped above)


def _pdf(html: str) -> bytes:
    import weasyprint  # noqa: PLC0415 (loads Pango; only a PDF needs it)

    # A report fetches nothing: its figures are in the page.
    only_embedded = weasyprint.URLFetcher(allowed_protocols=["data"], fail_on_errors=True)
    document = weasyprint.HTML(string=html, url_fetcher=only_embedded)
    return bytes(document.write_pdf(pdf_identifier=b"kvladder"))
