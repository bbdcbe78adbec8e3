"""Robust line fits: a few disturbed measurements do not move them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..planner.profile import Line

_ROUNDS = 30


def fit(x: Sequence[float], seconds: Sequence[float]) -> Line:
    """max(floor, start + slope * x), closest in the mean relative distance; slope and floor are not negative.

    The floor holds for the first few sizes, the line for the others; every border between them is tried. With one or two
    points it goes through them.
    """
    order = np.argsort(np.asarray(x, np.float64), kind="stable")
    sizes, times = np.asarray(x, np.float64)[order], np.maximum(np.asarray(seconds, np.float64)[order], 1e-12)
    if len(sizes) == 0:
        raise ValueError("a line needs at least one measurement")
    best = Line()
    for border in range(max(1, len(sizes) - 1)):
        start, slope = _line(sizes[border:], times[border:])
        floor = float(np.median(times[:border])) if border else 0.0
        line = Line(floor, start, slope)
        error = float(np.mean(np.abs(np.array([line(value) for value in sizes]) / times - 1.0)))
        # A floor must earn its place: two more numbers always fit a little better.
        if border == 0 or error < 0.9 * best.error:
            best = Line(floor, start, slope, error)
    return best


def _line(sizes: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, float]:
    """Start and slope with the least sum of relative distances, by least squares that are weighted again and again."""
    if len(np.unique(sizes)) == 1:
        return float(np.median(times)), 0.0
    weight = 1.0 / times**2
    start, slope = 0.0, 0.0
    for _ in range(_ROUNDS):
        total = weight.sum()
        mean_x, mean_t = (weight * sizes).sum() / total, (weight * times).sum() / total
        spread = (weight * (sizes - mean_x) ** 2).sum()
        slope = max(0.0, float((weight * (sizes - mean_x) * (times - mean_t)).sum() / spread))
        start = float(mean_t - slope * mean_x)
        distance = np.abs(start + slope * sizes - times) / times
        weight = 1.0 / times**2 / np.maximum(distance, 1e-3)
    if start < 0.0:  # nothing takes less than no time
        ratios = np.sort(times / np.maximum(sizes, 1e-12))
        return 0.0, float(np.median(ratios))
    return start, slope
