"""A report's page and paper: templates rendered, figures put into them, HTML laid out as a PDF."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from kvladder.report.svg import inline
from kvladder.report.words import STRONG

TEMPLATES = Path(__file__).with_name("templates")


def drawing(folder: Path, module: Any) -> dict[str, Any]:
    """A figure module's files as `figures.parts.style.save` wrote them: a wide and a narrow drawing for the page and a
    plain one for paper; ``wide`` and ``narrow`` are None where there is no file."""
    wide, narrow = folder / f"{module.NAME}.svg", folder / f"{module.NAME}.narrow.svg"
    figure = {"name": module.NAME, "title": module.TITLE, "caption": module.CAPTION, "wide": None, "narrow": None}
    if wide.is_file():
        text = wide.read_text(encoding="utf-8")
        label = f"{module.TITLE}. {module.CAPTION}"
        figure["wide"] = inline(text, module.NAME, label)
        figure["data"] = "data:image/svg+xml;base64," + base64.b64encode(text.encode()).decode()
        if narrow.is_file():
            figure["narrow"] = inline(narrow.read_text(encoding="utf-8"), f"{module.NAME}-narrow", label)
    return figure


def render(template: str, seen: Mapping[str, Any], *, paged: bool) -> str:
    """A template of `TEMPLATES` with ``seen`` as its names, for paper where ``paged``. Every value is escaped."""
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
    environment.filters["code"] = _code
    styles = Markup((TEMPLATES / ("print.css" if paged else "screen.css")).read_text(encoding="utf-8"))  # noqa: S704
    return environment.get_template(template).render(**seen, paged=paged, styles=styles)


def _emphasis(text: str) -> Markup:
    """HTML of a sentence of `words`."""
    return Markup(escape(text).replace(STRONG[0], Markup("<strong>")).replace(STRONG[1], Markup("</strong>")))  # noqa: S704


def _code(text: str) -> Markup:
    """HTML of a text whose code stands in backticks, as in Markdown."""
    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else escape(part) for place, part in enumerate(parts)
    )


def _markdown(text: Any) -> Markup:
    """Text that Markdown shows as it is: HTML escaped, no table cell or emphasis broken."""
    escaped = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for character in "\\`*_[]|":
        escaped = escaped.replace(character, "\\" + character)
    bold = escaped.replace(STRONG[0], "**").replace(STRONG[1], "**")
    return Markup(" ".join(bold.split()))  # noqa: S704 (escaped above)


def pdf(html: str) -> bytes:
    """The PDF of a page rendered for paper. Equal pages give equal bytes on machines with equal fonts."""
    import weasyprint  # noqa: PLC0415 (loads Pango; only a PDF needs it)

    # A report fetches nothing: its figures are in the page.
    only_embedded = weasyprint.URLFetcher(allowed_protocols=["data"], fail_on_errors=True)
    document = weasyprint.HTML(string=html, url_fetcher=only_embedded)
    return bytes(document.write_pdf(pdf_identifier=b"kvladder"))
