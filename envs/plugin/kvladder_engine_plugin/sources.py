"""Which source each patched module really runs from: evidence that a stock engine is stock, and a patched one patched.

``KVLADDER_SOURCES`` names modules, separated by commas. Those that are imported from here on are compiled from their
source, past any cached bytecode, and what was compiled is what is reported: one line on standard error with its
SHA-256. A module that was there before can't be vouched for, and its line says so. `kvladder.stack.variants` reads the
lines.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

VARIABLE = "KVLADDER_SOURCES"


class _Reporter(SourceFileLoader):
    """Loads a module from its source alone, and says which one that was."""

    def get_code(self, fullname: str) -> CodeType:
        """Code object of what the file holds now. Raises OSError where it can't be read."""
        source = self.get_data(self.path)
        _say(f"{fullname} runs sha256:{hashlib.sha256(source).hexdigest()} from {self.path}")
        code: CodeType = self.source_to_code(source, self.path)
        return code


class _Watch:
    """First on the meta path: finds the watched modules as usual, and has `_Reporter` load them."""

    def __init__(self, modules: frozenset[str]) -> None:
        self.modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A watched module's spec; None, so that others look, for any other module, or what is no plain source file."""
        if name not in self.modules:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = _Reporter(name, spec.loader.path)
        return spec


def watch_sources() -> None:
    """Report the modules that the variable names; calling it again changes nothing."""
    modules = frozenset(name for name in os.environ.get(VARIABLE, "").split(",") if name)
    if not modules or any(isinstance(finder, _Watch) and finder.modules == modules for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Watch(modules))
    for name in sorted(modules):
        _say(f"{name} was loaded unwatched" if name in sys.modules else f"{name} is watched")


def _say(text: str) -> None:
    # Not logged: engines filter and reformat what they log. In one piece, as processes write at the same time.
    sys.stderr.write(f"kvladder source: {text}\n")
    sys.stderr.flush()
