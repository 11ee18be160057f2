"""The report: HTML and PDF from one template, and ``summary.md``; made from tables and figures only."""

from kvladder.report.build import build

__all__ = ["build"]
