"""Moments of CLOCK_REALTIME, in which the kernel stamps what it receives, on CLOCK_MONOTONIC."""

from __future__ import annotations

import sys
from time import monotonic_ns, time_ns

_LOOKS = 5
_CLOSE_NS = 500


def monotonic_less_real() -> int:
    """CLOCK_MONOTONIC less CLOCK_REALTIME in ns, good to the time that two looks at a clock take (0.1 µs).

    Changes only where somebody sets the clock: NTP slews both alike. The closest of a few looks counts, because the
    process may be held up inside one.
    """
    closest, difference = sys.maxsize, 0
    for _ in range(_LOOKS):
        before = monotonic_ns()
        real = time_ns()
        width = monotonic_ns() - before
        if width < closest:
            closest, difference = width, before + width // 2 - real
        if closest <= _CLOSE_NS:
            break
    return difference
