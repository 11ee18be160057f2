"""Raw trials and their verdicts to tidy tables: parquet to compute with, CSV to look at.

`build` writes them, `load` reads them back; `model` says what is in each column. Figures and reports start from here
and never look at a raw file.
"""

from kvladder.tables.build import build, find_trials
from kvladder.tables.model import Tables, load

__all__ = ["Tables", "build", "find_trials", "load"]
