"""Title, caption and category of a figure, read without importing it: figures import what a dry run doesn't need."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from kvladder.plan.digest import PACKAGE


@cache
def constants(figure: str) -> dict[str, str]:
    """The module's constant strings by name (``TITLE``, ``CAPTION``, ``CATEGORY``)."""
    path: Path = PACKAGE / "figures" / f"{figure.replace('-', '_')}.py"
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                continue
            if isinstance(value, str):
                found[node.targets[0].id] = value
    return found
