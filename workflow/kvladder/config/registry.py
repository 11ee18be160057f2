"""Kinds of setup and workload by name: one module a kind, found by its file, so that adding one touches nothing else.

The modules are imported when a configuration names them; ``config`` itself depends on none of them.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any, Literal

Family = Literal["setups", "workloads", "gates", "figures"]


@cache
def kinds(family: Family) -> tuple[str, ...]:
    """All kinds of a family, sorted: the modules of ``kvladder.<family>`` less ``base``, private ones and packages."""
    package = importlib.import_module(f"kvladder.{family}")
    names = (module.name for module in pkgutil.iter_modules(package.__path__) if not module.ispkg)
    return tuple(sorted(name.replace("_", "-") for name in names if name != "base" and not name.startswith("_")))


def load(family: Family, kind: str) -> Any:
    """The module of one kind.

    Raises ValueError, naming the kinds there are, when there is none of that name.
    """
    if kind not in kinds(family):
        raise ValueError(f"unknown kind {kind!r}; {family} are: {', '.join(kinds(family))}")
    return importlib.import_module(f"kvladder.{family}.{kind.replace('-', '_')}")
