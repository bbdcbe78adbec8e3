"""How magnitudes are distributed: models fitted by their moments to a histogram, and how far each is from it.

The distance is Wasserstein-1, the area between the two distribution functions: how far magnitudes must move, on average, to be
distributed as the model says. It is given as a share of the mean magnitude, so that groups can be compared. Zeros do not count.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu import laplace

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Counts = NDArray[np.int64]

SHIFT = 20
"""Bins by exponent and three bits of the mantissa: eight in each octave."""
BINS = 255 << 3
EDGES = (np.arange(BINS, dtype=np.int32) << SHIFT).view(np.float32).astype(np.float64)
EDGES = np.append(EDGES, 2.0**128)
"""Bin i holds magnitudes from EDGES[i] to EDGES[i + 1]. The first one holds zeros, and what is next to nothing."""
_FIRST = 2  # of those that a drawing has, in pairs


class Model(Protocol):
    """A distribution of magnitudes."""

    @property
    def name(self) -> str: ...

    def above(self, x: Doubles) -> Doubles:
        """The share of magnitudes above x."""

    def area(self, x: Doubles) -> Doubles:
        """The integral of `above` from x on."""

    def threshold(self, share: float) -> float:
        """The magnitude above which this share lies, 0 < share < 1."""


@dataclass(frozen=True)
class Exponential:
    """Magnitudes of a Laplacian around zero."""

    scale: float
    name = "laplace"

    def above(self, x: Doubles) -> Doubles:
        return np.exp(-x / self.scale)

    def area(self, x: Doubles) -> Doubles:
        return self.scale * self.above(x)

    def threshold(self, share: float) -> float:
        return -self.scale * math.log(share)


@dataclass(frozen=True)
class HalfNormal:
    """Magnitudes of a Gaussian around zero."""

    scale: float
    name = "gauss"

    def above(self, x: Doubles) -> Doubles:
        return np.array([math.erfc(value / (self.scale * math.sqrt(2.0))) for value in x])

    def area(self, x: Doubles) -> Doubles:
        density = self.scale * math.sqrt(2.0 / math.pi) * np.exp(-0.5 * np.square(x / self.scale))
        return np.maximum(density - x * self.above(x), 0.0)

    def threshold(self, share: float) -> float:
        return -self.scale * NormalDist().inv_cdf(0.5 * share)


@dataclass(frozen=True)
class Pareto:
    """Generalised Pareto: a heavy tail where shape < 0, an exponential in between, an end at scale / shape above."""

    scale: float
    shape: float
    name = "pareto"

    def above(self, x: Doubles) -> Doubles:
        return self._rest(x) ** (1.0 / self.shape)

    def area(self, x: Doubles) -> Doubles:
        return self.scale / (1.0 + self.shape) * self._rest(x) ** (1.0 / self.shape + 1.0)

    def threshold(self, share: float) -> float:
        return self.scale * -math.expm1(self.shape * math.log(share)) / self.shape

    def _rest(self, x: Doubles) -> Doubles:
        return np.maximum(1.0 - self.shape * x / self.scale, 0.0)


class Fit(NamedTuple):
    model: Model
    distance: float
    """Wasserstein-1, as a share of the mean magnitude."""


@dataclass(frozen=True)
class Fitted:
    """The models fitted to one histogram, the closest first."""

    counts: Counts
    nonzero: int
    mean: float
    fits: tuple[Fit, ...]

    @property
    def best(self) -> Fit:
        return self.fits[0]

    def curve(self) -> tuple[Doubles, Doubles]:
        """For a drawing: edges of bins, four in an octave, without the smallest thousandth, and the share in each."""
        shares = self.counts[_FIRST:].reshape(-1, 2).sum(axis=1) / self.nonzero
        reached = np.cumsum(shares)
        start, stop = np.searchsorted(reached, 1e-3), np.flatnonzero(shares)[-1] + 1
        return EDGES[_FIRST::2][start : stop + 1], shares[start:stop]


def count(x: Floats) -> Counts | None:
    """The histogram of x float32 (n,); None where something is not finite.  Memory: one read pass."""
    counts = np.empty(BINS, np.int64)
    return counts if laplace.histogram(x, 0, SHIFT, counts) == 0 else None


def fit(counts: Counts) -> Fitted | None:
    """Fit all models to a histogram, int64 (BINS,); None where there is nothing but zeros."""
    filled = np.flatnonzero(counts[1:]) + 1
    if filled.size == 0:
        return None
    inside = slice(int(filled[0]), int(filled[-1]) + 1)
    edges = EDGES[inside.start : inside.stop + 1]
    nonzero = int(counts[inside].sum())
    shares = counts[inside] / nonzero
    left, right = edges[:-1], edges[1:]
    mean = float(shares @ (left + right)) / 2.0
    square = float(shares @ (left * left + left * right + right * right)) / 3.0  # of what is uniform within a bin
    above = np.append(np.cumsum(shares[::-1])[::-1], 0.0)
    fits = [Fit(model, distance(edges, above, model) / mean) for model in _models(mean, square)]
    return Fitted(counts, nonzero, mean, tuple(sorted(fits, key=lambda fit: fit.distance)))


def _models(mean: float, square: float) -> tuple[Model, ...]:
    """By maximum likelihood, and for generalised Pareto by mean and variance: as in SIDCo, `docs/methods/laplace.md`."""
    ratio = mean * mean / (square - mean * mean)
    shape = 0.5 * (ratio - 1.0)
    if abs(shape) < 1e-6:
        shape = 1e-6  # the exponential, which its formulas do not reach
    scale = 0.5 * mean * (ratio + 1.0)
    return Exponential(mean), HalfNormal(math.sqrt(square)), Pareto(scale, shape)


def distance(edges: Doubles, above: Doubles, model: Model) -> float:
    """Wasserstein-1 of a model from data of which the share `above[i]` lies above `edges[i]`, uniform within bins.

    Within a bin the two distribution functions are taken not to cross, which they do in a few at most.
    """
    area = model.area(np.append(edges, 0.0))
    data = 0.5 * (above[:-1] + above[1:]) * np.diff(edges)
    between = np.abs(data - (area[:-2] - area[1:-1])).sum()
    below = edges[0] - (area[-1] - area[0])  # no data: all of it lies above
    return float(between + abs(below) + area[-2])
