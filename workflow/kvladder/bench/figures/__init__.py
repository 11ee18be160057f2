"""The truth bench's figures, one file each: bench tables in, matplotlib figure out.

Each module has ``NAME`` (file name), ``TITLE``, ``CAPTION`` (plain text) and ``draw(tables, width)``, width in inches.
"""

from kvladder.bench.figures import bias, cost, in_flight

FIGURES = {module.NAME: module for module in (bias, in_flight, cost)}
"""Every figure by name, in the report's order."""
