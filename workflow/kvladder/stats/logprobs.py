"""How far two answers to one prompt are apart, by the log probabilities of their most probable tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping


def deviation(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Largest |Δ log probability| (nats) over the tokens of two lists of the most probable ones.

    A token that one list lacks is no more probable there than the list's last one, which is what it counts with: the
    true difference is that or more. Raises ValueError for an empty list, and for a value that isn't finite: nothing
    is far from NaN.
    """
    if not all(map(math.isfinite, (*one.values(), *other.values()))):
        raise ValueError("a log probability is no finite number")
    least_one, least_other = min(one.values()), min(other.values())
    both = [abs(one[token] - other[token]) for token in one.keys() & other.keys()]
    only_one = [one[token] - least_other for token in one.keys() - other.keys()]
    only_other = [other[token] - least_one for token in other.keys() - one.keys()]
    return max(0.0, *both, *only_one, *only_other)


def greedy(logprobs: Mapping[str, float]) -> str:
    """The most probable token; of equally probable ones the same in every list that holds them."""
    return max(sorted(logprobs), key=logprobs.__getitem__)
