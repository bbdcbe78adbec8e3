"""Fits of magnitudes: models against their own integrals, and distances against the sorted sample."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.kernels.cpu import laplace_fit
from thinwire.kernels.cpu.laplace_fit import Exponential, HalfNormal, Model, Pareto

from .test_laplace import DISTRIBUTIONS

MODELS = [Exponential(0.3), HalfNormal(2.0), Pareto(0.5, -0.3), Pareto(0.5, 0.3), Pareto(0.5, 1.5), Pareto(0.5, 1e-6)]
SIZE = 2**17


def _sample(model: Model, size: int = SIZE) -> np.ndarray:
    """Evenly spaced quantiles with alternating signs: a sample without luck."""
    shares = (np.arange(size) + 0.5) / size
    magnitudes = np.array([model.threshold(float(share)) for share in shares])
    return (magnitudes * np.where(np.arange(size) % 2, 1.0, -1.0)).astype(np.float32)


def _exact(x: np.ndarray, model: Model) -> float:
    """Wasserstein-1 of the non-zeros themselves: the mean distance of sorted magnitudes from the quantiles of the model."""
    magnitudes = np.sort(np.abs(x[x != 0]).astype(np.float64))
    shares = (np.arange(magnitudes.size) + 0.5) / magnitudes.size
    quantiles = np.array([model.threshold(float(1.0 - share)) for share in shares])
    return float(np.abs(magnitudes - quantiles).mean() / magnitudes.mean())


def _fitted(x: np.ndarray) -> laplace_fit.Fitted:
    counts = laplace_fit.count(x)
    assert counts is not None
    fitted = laplace_fit.fit(counts)
    assert fitted is not None
    return fitted


def _distances(fitted: laplace_fit.Fitted) -> dict[str, float]:
    return {fit.model.name: fit.distance for fit in fitted.fits}


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_models_agree_with_themselves(model: Model) -> None:
    for share in (0.9, 0.5, 0.1, 0.01, 0.001):
        assert float(model.above(np.array([model.threshold(share)]))[0]) == pytest.approx(share, rel=1e-6)
    # The area between two places is the integral of what lies above each place between them.
    places = np.linspace(0.0, model.threshold(0.01), 20_001)
    integral = float(np.trapezoid(model.above(places), places))
    area = model.area(places[[0, -1]])
    assert float(area[0] - area[1]) == pytest.approx(integral, rel=1e-6)
    assert float(model.above(np.zeros(1))[0]) == 1.0
    assert float(model.area(np.array([1e30]))[0]) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distances_are_those_of_the_sorted_sample(name: str) -> None:
    x = DISTRIBUTIONS[name](np.random.default_rng(2), SIZE).astype(np.float32)
    fitted = _fitted(x)
    assert fitted.nonzero == np.count_nonzero(x)
    # Within a bin, at most an eighth wide, magnitudes are not known.
    magnitudes = np.abs(x[x != 0]).astype(np.float64)
    single = name in ("constant", "one outlier")  # all that counts lies at one place in its bin
    assert fitted.mean == pytest.approx(magnitudes.mean(), rel=0.07 if single else 0.005)
    for fit in fitted.fits:
        allowed = (0.13 if single else 0.01) + 0.03 * fit.distance
        assert fit.distance == pytest.approx(_exact(x, fit.model), abs=allowed), fit
    assert [fit.distance for fit in fitted.fits] == sorted(fit.distance for fit in fitted.fits)


@pytest.mark.parametrize("model", MODELS[:4], ids=repr)
def test_what_was_drawn_from_a_model_is_closest_to_it(model: Model) -> None:
    fitted = _fitted(_sample(model))
    distances = _distances(fitted)
    # Generalised Pareto includes the exponential, so that either may come first there.
    assert distances[model.name] <= 1.1 * fitted.best.distance + 1e-3
    assert distances[model.name] < 0.02
    others = {"laplace": ("gauss",), "gauss": ("laplace", "pareto"), "pareto": ("laplace", "gauss")}[model.name]
    assert all(distances[other] > 2.0 * distances[model.name] for other in others), distances
    assert fitted.best.model.threshold(0.01) == pytest.approx(model.threshold(0.01), rel=0.1)


def test_scale_and_zeros_do_not_matter() -> None:
    x = _sample(MODELS[2], 10_000)
    expected = _distances(_fitted(x))
    assert _distances(_fitted(x * np.float32(2.0**-40))) == pytest.approx(expected, rel=1e-9)
    with_zeros = np.concatenate([x, np.zeros(30_000, np.float32)])
    assert _distances(_fitted(with_zeros)) == expected
    assert _fitted(with_zeros).nonzero == x.size


def test_there_may_be_nothing_to_fit() -> None:
    counts = laplace_fit.count(np.zeros(100, np.float32))
    assert counts is not None
    assert laplace_fit.fit(counts) is None
    for value in (math.nan, math.inf, -math.inf):
        assert laplace_fit.count(np.array([1.0, value], np.float32)) is None


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_any_numbers_have_finite_distances(numbers: list[float]) -> None:
    counts = laplace_fit.count(np.array(numbers, np.float32))
    assert counts is not None
    assert counts.sum() == len(numbers)
    fitted = laplace_fit.fit(counts)
    if fitted is not None:
        assert all(0.0 <= fit.distance < 1e3 for fit in fitted.fits), fitted
        assert all(math.isfinite(fit.model.threshold(0.01)) for fit in fitted.fits)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_drawing_shows_nearly_all(name: str) -> None:
    x = DISTRIBUTIONS[name](np.random.default_rng(3), 10_000).astype(np.float32)
    edges, shares = _fitted(x).curve()
    assert edges.size == shares.size + 1
    assert 0.998 <= shares.sum() <= 1.0 + 1e-9
    magnitudes = np.abs(x[x != 0]).astype(np.float64)
    expected, _ = np.histogram(magnitudes, edges)
    assert np.allclose(shares, expected / magnitudes.size, atol=2.0 / magnitudes.size)
