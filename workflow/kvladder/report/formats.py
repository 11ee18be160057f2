"""Numbers and units as a reader wants them. What is unknown is an en dash, never 0."""

from __future__ import annotations

from collections.abc import Iterable
from math import floor, log10

UNKNOWN = "–"


def scale(values: Iterable[float | None]) -> tuple[float, str, int]:
    """Factor, unit and decimals that suit a whole table of times in seconds, so that its columns line up.

    Three significant digits for the smallest value, but three decimals at most.
    """
    sizes = [abs(value) for value in values if value]
    if not sizes:
        return 1.0, "s", 2
    factor, unit = (1.0, "s") if max(sizes) >= 0.5 else (1e3, "ms")
    return factor, unit, min(3, max(0, 2 - floor(log10(min(sizes) * factor))))


def number(value: float | None, decimals: int = 0) -> str:
    """Fixed decimals, comma every three digits; an en dash for None."""
    return UNKNOWN if value is None else f"{value:,.{decimals}f}"


def significant(value: float | None, digits: int = 3) -> str:
    """That many significant digits, no exponent up to a million."""
    if value is None:
        return UNKNOWN
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def seconds(value: float | None) -> str:
    """Three significant digits with a unit that fits: s, ms or µs."""
    if value is None:
        return UNKNOWN
    for least, factor, unit in ((0.1, 1.0, "s"), (1e-4, 1e3, "ms")):
        if abs(value) >= least:
            return f"{significant(value * factor)} {unit}"
    return f"{significant(value * 1e6)} µs" if value else "0 s"


def _ratio_decimals(value: float) -> int:
    return 3 if abs(value) < 0.9995 else 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0


def ratio(value: float | None) -> str:
    """Setup ÷ baseline: three decimals below 1, two below 10, one below 100."""
    return UNKNOWN if value is None else f"{value:,.{_ratio_decimals(value)}f}"


def times(value: float | None) -> str:
    """A factor in running text, three significant digits: ``11.2×``, ``1.35×``."""
    return UNKNOWN if value is None else f"{significant(value)}×"


def span(low: float | None, high: float | None) -> str:
    """``low–high`` of a ratio, both with the decimals of the upper one, or more (up to three) to tell them apart."""
    if low is None or high is None:
        return UNKNOWN
    decimals = _ratio_decimals(high)
    while decimals < 3 and f"{low:.{decimals}f}" == f"{high:.{decimals}f}":
        decimals += 1
    return f"{low:,.{decimals}f}–{high:,.{decimals}f}"


def percent(share: float | None, decimals: int = 1) -> str:
    """A share (0–1) in per cent."""
    return UNKNOWN if share is None else f"{100 * share:.{decimals}f} %"


def size(value: float | None) -> str:
    """Bytes with a binary unit: ``1.90 GiB``."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:,.0f} B" if unit == "B" else f"{significant(value)} {unit}"


def plural(count: int, word: str, words: str | None = None) -> str:
    """``1 trial``, ``3 trials``."""
    return f"{count:,} {word if count == 1 else words or word + 's'}"


def listing(items: Iterable[str], most: int = 6) -> str:
    """``a, b and c``; a long list ends ``and 7 more``."""
    parts = list(items)
    if len(parts) > most + 1:
        parts = [*parts[:most], f"{len(parts) - most} more"]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""
