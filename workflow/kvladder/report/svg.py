"""A figure's SVG inside an HTML page: no clashing ids, no style of its own, and the page's colours."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from kvladder.figures.parts.style import COLOURS

_PROLOGUE = re.compile(r"^.*?(?=<svg\b)", re.DOTALL)
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_TITLE = re.compile(r"\s*<title>.*?</title>", re.DOTALL)
_COMMENT = re.compile(r"\s*<!--.*?-->", re.DOTALL)
_STYLE = re.compile(r"\s*<defs>\s*<style[^>]*>.*?</style>\s*</defs>", re.DOTALL)
_ROOT = re.compile(r"<svg\b[^>]*>")
_VIEW_BOX = re.compile(r'viewBox="([^"]*)"')


def inline(svg: str, name: str, label: str) -> Markup:
    """Markup for one figure drawn by `figures.parts.style.save`.

    Ids get `name` as a prefix, the root gets `label` as its accessible name, and each colour of `COLOURS` becomes
    ``var(--figure-<role>)`` with that colour as the fallback. `svg` is our own output and trusted; `label` is not.
    """
    text = _PROLOGUE.sub("", svg, count=1)
    for part in (_METADATA, _TITLE, _COMMENT, _STYLE):
        text = part.sub("", text)
    view_box = _VIEW_BOX.search(text)
    root = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-label="{escape(label)}" viewBox="{view_box[1] if view_box else ""}" '
        'style="stroke-linejoin: round; stroke-linecap: butt">'
    )
    text = _ROOT.sub(lambda _: root, text, count=1)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    for role, colour in COLOURS.items():
        text = text.replace(colour, f"var(--figure-{role}, {colour})")
    return Markup(text)  # noqa: S704 (drawn here, names in it are glyph outlines or escaped by matplotlib)
