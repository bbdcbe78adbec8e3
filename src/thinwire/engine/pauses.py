"""Pauses between the steps of a run: time in which the training stood still, as seen from outside."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

LONG = 1.5
"""A step that takes so many times what is typical holds a pause."""

LEAST_SECONDS = 0.1
"""What nobody notices is no pause."""


def durations(ends: Sequence[float], began: float = 0.0) -> list[float]:
    """Seconds of every step, from the end of the one before, or from the start of the run."""
    return [end - before for before, end in itertools.pairwise([began, *ends])]


def pauses(seconds: Sequence[float], paths: Sequence[str]) -> list[float]:
    """For every step the seconds of its pause; 0 where it has none.

    A pause is what a step took beyond the median of the steps on the same path (DDP alone, dense, by the layout).
    """
    typical = {
        path: statistics.median(s for s, at in zip(seconds, paths, strict=True) if at == path) for path in paths
    }
    found = []
    for each, path in zip(seconds, paths, strict=True):
        excess = each - typical[path]
        found.append(excess if excess > max(LEAST_SECONDS, (LONG - 1.0) * typical[path]) else 0.0)
    return found


def longest(seconds: Sequence[float]) -> float:
    """The longest step less the median of all: how long a person who watches waits at most for a sign of life."""
    return max(seconds) - statistics.median(seconds) if seconds else 0.0
