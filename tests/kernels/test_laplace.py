"""Top-k by threshold: the compiled passes equal the reference, and the search finds its k on every kind of data."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.kernels.cpu import laplace
from thinwire.kernels.cpu.laplace_search import Picked, Warm, accumulate_pick, search_bits
from thinwire.kernels.reference import laplace as reference

unhurried = settings(deadline=None)  # the first call of a kernel compiles it

SIZES = st.sampled_from([0, 1, 63, 64, 65, 4095, 4096, 4097, 8193, 12_345]) | st.integers(0, 9000)


def draw_vector(data: st.DataObject, size: int) -> np.ndarray:
    """Normal values, some exact zeros, perhaps rounded to few levels (ties), perhaps denormal."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = random.standard_normal(size)
    if data.draw(st.booleans()):
        x = np.round(x * 2) / 2
    x *= data.draw(st.sampled_from([1e-42, 1e-6, 1.0, 1e30]))
    x[random.random(size) < data.draw(st.sampled_from([0.0, 0.9, 1.0]))] = 0.0
    return x.astype(np.float32)


def draw_threshold(data: st.DataObject, x: np.ndarray) -> float:
    """0, infinite, anything, and often a value that an element has exactly."""
    choices = st.sampled_from([0.0, 1e-45, 0.5, 2.5, math.inf]).map(lambda t: float(np.float32(t)))
    present = [float(v) for v in np.abs(x[:20]) if np.isfinite(v)]
    return data.draw(choices | st.sampled_from(present) if present else choices)


def spoil(data: st.DataObject, gradient: np.ndarray) -> None:
    if gradient.size:
        for place in data.draw(st.lists(st.integers(0, gradient.size - 1), max_size=2)):
            gradient[place] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))


def same_bits(x: np.ndarray, y: torch.Tensor) -> bool:
    return x.tobytes() == y.numpy().tobytes()


@unhurried
@given(st.data())
def test_measures_equal_reference(data: st.DataObject) -> None:
    size = data.draw(SIZES)
    residual, gradient = draw_vector(data, size), draw_vector(data, size)
    spoil(data, gradient)
    assert laplace.measure(residual) == reference.measure(torch.from_numpy(residual))
    expected = torch.from_numpy(residual.copy())
    answer = reference.accumulate_measure(expected, torch.from_numpy(gradient))
    assert laplace.accumulate_measure(residual, gradient) == answer
    assert same_bits(residual, expected)


@unhurried
@given(st.data())
def test_counts_equal_reference(data: st.DataObject) -> None:
    x = draw_vector(data, data.draw(SIZES))
    threshold = draw_threshold(data, x)
    assert laplace.count_above(x, threshold) == reference.count_above(torch.from_numpy(x), threshold)
    first, shift = data.draw(st.sampled_from([(0, 20), (1, 20), (0x3F000000, 14), (0x3F800000, 9), (0x3F800000, 0)]))
    counts, expected = np.empty(2048, np.int64), torch.empty(2048, dtype=torch.int64)
    above = reference.histogram(torch.from_numpy(x), first, shift, expected)
    assert laplace.histogram(x, first, shift, counts) == above
    assert same_bits(counts, expected)


@unhurried
@given(st.data())
def test_candidates_equal_reference(data: st.DataObject) -> None:
    size = data.draw(SIZES)
    residual, gradient = draw_vector(data, size), draw_vector(data, size)
    spoil(data, gradient)
    threshold = draw_threshold(data, residual + gradient)
    capacity = data.draw(st.sampled_from([0, 1, 2, 3, 63, 64, 65, 130, size]))
    indices, values = np.empty(capacity, np.int32), np.empty(capacity, np.float32)
    places, listed = torch.empty(capacity, dtype=torch.int32), torch.empty(capacity)

    expected = torch.from_numpy(residual.copy())
    answer = reference.accumulate_collect(expected, torch.from_numpy(gradient), threshold, places, listed)
    assert laplace.accumulate_collect(residual, gradient, threshold, indices, values) == answer
    assert same_bits(residual, expected)
    written = min(answer[1], capacity)
    assert same_bits(indices[:written], places[:written])
    assert same_bits(values[:written], listed[:written])

    ties = data.draw(st.sampled_from([0, 1, 5, size]))
    wanted, excess = reference.collect(expected, threshold, ties, places, listed)
    assert laplace.collect(residual, threshold, ties, indices, values) == (wanted, excess)
    written = min(wanted, capacity)
    assert same_bits(indices[:written], places[:written])
    assert same_bits(values[:written], listed[:written])

    higher = draw_threshold(data, values[:written])
    kept = reference.take_above(expected, places[:written], listed[:written], higher, ties)
    assert laplace.take_above(residual, indices[:written], values[:written], higher, ties) == kept
    assert same_bits(residual, expected)
    assert same_bits(indices[: kept[0]], places[: kept[0]])
    assert same_bits(values[: kept[0]], listed[: kept[0]])


@unhurried
@given(st.data())
def test_what_is_taken_at_once_equals_reference(data: st.DataObject) -> None:
    size = data.draw(SIZES)
    residual, gradient = draw_vector(data, size), draw_vector(data, size)
    spoil(data, gradient)
    threshold = draw_threshold(data, residual + gradient)
    capacity = data.draw(st.sampled_from([0, 1, 3, 64, 130, size]))
    coding = data.draw(st.sampled_from([1, 2, 3]))
    indices, values = np.empty(capacity, np.int32), np.empty(capacity, np.float32)
    places, listed = torch.empty(capacity, dtype=torch.int32), torch.empty(capacity)
    expected = torch.from_numpy(residual.copy())
    answer = reference.accumulate_take(expected, torch.from_numpy(gradient), threshold, coding, places, listed)
    assert laplace.accumulate_take(residual, gradient, threshold, coding, indices, values) == answer
    assert np.array_equal(residual, expected.numpy())
    written = min(answer[1], capacity)
    assert same_bits(indices[:written], places[:written])
    assert same_bits(values[:written], listed[:written])


# ---- the search --------------------------------------------------------------------------------------------------


def mixture(random: np.random.Generator, size: int) -> np.ndarray:
    return np.where(random.random(size) < 0.9, 1.0, 10.0) * random.standard_normal(size)


def generalized_gauss(shape: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda random, size: random.choice([-1.0, 1.0], size) * random.gamma(1 / shape, size=size) ** (1 / shape)


def zeros(share: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda random, size: np.where(random.random(size) < share, 0.0, random.laplace(size=size))


def one_outlier(random: np.random.Generator, size: int) -> np.ndarray:
    x = random.standard_normal(size)
    x[size // 3] = 1e6
    return x


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "laplace": lambda random, size: random.laplace(size=size),
    "laplace, mean 0.5 b": lambda random, size: random.laplace(loc=0.5, size=size),
    "gauss": lambda random, size: random.standard_normal(size),
    "generalized gauss 0.8": generalized_gauss(0.8),
    "generalized gauss 0.5": generalized_gauss(0.5),
    "student t3": lambda random, size: random.standard_t(3, size),
    "uniform": lambda random, size: random.uniform(-1.0, 1.0, size),
    "mixture": mixture,
    "90 % zeros": zeros(0.9),
    "99.5 % zeros": zeros(0.995),
    "one outlier": one_outlier,
    "constant": lambda random, size: random.choice([-0.5, 0.5], size),
}


class Loop:
    """Residual, warm start and buffers of one rank, which checks conservation at every step."""

    def __init__(self, size: int, k: int, tolerance: float = 0.2, exact: bool = False) -> None:
        self.k, self.tolerance, self.exact = k, tolerance, exact
        self.residual = np.zeros(size, np.float32)
        self.warm = Warm()
        capacity = min(size, 8 * k)
        self.indices, self.values = np.empty(capacity, np.int32), np.empty(capacity, np.float32)

    def step(self, gradient: np.ndarray) -> Picked:
        whole = self.residual + gradient
        before = self.warm
        picked = accumulate_pick(
            self.residual, gradient, self.k, before, self.indices, self.values, self.tolerance, self.exact
        )
        self.warm = picked.warm
        places = self.indices[: picked.taken]
        assert (np.diff(places) > 0).all()
        if picked.finite:
            assert np.array_equal(self.values[: picked.taken], whole[places])
            assert not self.residual[places].any()
            rest = whole.copy()
            rest[places] = 0.0
            assert np.array_equal(self.residual, rest)
        return picked

    def expect(self, picked: Picked, nonzero: int) -> None:
        low, high = (self.k, self.k) if self.exact else ((1 - self.tolerance) * self.k, (1 + self.tolerance) * self.k)
        assert min(low, nonzero) <= picked.taken <= high


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_cold_start_is_within_tolerance(name: str, density: float, exact: bool) -> None:
    size = 2**18
    x = DISTRIBUTIONS[name](np.random.default_rng(1), size).astype(np.float32)
    loop = Loop(size, round(density * size), exact=exact)
    picked = loop.step(x)
    loop.expect(picked, np.count_nonzero(x))
    assert picked.passes <= 6 + 3 + 1
    if exact:
        expected = reference.top(torch.from_numpy(x), loop.k).numpy()
        assert np.array_equal(loop.indices[: picked.taken], expected)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_error_feedback_stays_within_tolerance_in_few_passes(name: str, exact: bool) -> None:
    size, steps = 2**16, 40
    random = np.random.default_rng(2)
    loop = Loop(size, size // 100, exact=exact)
    passes = 0
    for step in range(steps):
        gradient = DISTRIBUTIONS[name](random, size).astype(np.float32) * np.float32(0.3 if step >= 25 else 1.0)
        nonzero = np.count_nonzero(loop.residual + gradient)
        picked = loop.step(gradient)
        loop.expect(picked, nonzero)
        passes += picked.passes if step else 0
    # Sums of a constant have few levels: again and again no threshold is within tolerance, and the bits must decide.
    assert passes <= (2 if name != "constant" else 4) * (steps - 1)


@pytest.mark.parametrize("tolerance", [0.01, 0.05, 0.5])
def test_tolerance_is_kept(tolerance: float) -> None:
    loop = Loop(2**16, 655, tolerance)
    random = np.random.default_rng(3)
    for _ in range(10):
        loop.expect(loop.step(random.standard_normal(2**16).astype(np.float32)), 2**16)


@unhurried
@given(st.data())
def test_exact_equals_torch_topk_without_ties(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 3000))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    k = data.draw(st.integers(1, size))
    magnitudes = (random.permutation(4 * size)[:size] + 1.0) ** data.draw(st.sampled_from([1.0, 0.5]))  # all different
    x = (magnitudes * random.choice([-1.0, 1.0], size)).astype(np.float32)
    loop = Loop(size, k, exact=True)
    loop.warm = data.draw(st.sampled_from([Warm(), Warm(1e3, 1e2, k), Warm(1e6, 10.0, k), Warm(1e-3, 1e-4, k)]))
    capacity = data.draw(st.integers(k, size))
    loop.indices, loop.values = np.empty(capacity, np.int32), np.empty(capacity, np.float32)
    picked = loop.step(x)
    expected = torch.topk(torch.from_numpy(x).abs(), k).indices.sort().values.numpy()
    assert np.array_equal(loop.indices[: picked.taken], expected)


@unhurried
@given(st.data())
def test_anything_ends_with_a_count_that_is_right(data: st.DataObject) -> None:
    """Ties, zeros, denormals, tiny vectors, wrong warm starts and tight buffers."""
    x = draw_vector(data, data.draw(SIZES))
    k = data.draw(st.integers(0, max(1, x.size)))
    exact = data.draw(st.booleans())
    loop = Loop(x.size, max(k, 1), exact=exact)
    loop.k = k
    room = min(x.size, math.floor(1.2 * k)) + data.draw(st.integers(0, 100))
    loop.indices, loop.values = np.empty(room, np.int32), np.empty(room, np.float32)
    loop.warm = data.draw(st.sampled_from([Warm(), Warm(0.0, 1.0, 5), Warm(1.0, 0.3, 10), Warm(1e30, 1e-3, 1)]))
    picked = loop.step(x)
    nonzero = np.count_nonzero(x)
    loop.expect(picked, nonzero)
    if exact and k > 0:
        expected = reference.top(torch.from_numpy(x), k).numpy()
        assert np.array_equal(loop.indices[: picked.taken], expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("warm", [Warm(), Warm(2.0, 0.3, 100)])
def test_not_finite_takes_nothing_and_keeps_the_warm_start(value: float, warm: Warm) -> None:
    gradient = np.random.default_rng(4).standard_normal(10_000).astype(np.float32)
    gradient[7000] = value
    loop = Loop(10_000, 100)
    loop.warm = warm
    assert loop.step(gradient) == Picked(False, 0, warm, 0)
    assert np.isfinite(loop.residual).all()
    assert not loop.residual[4096:8192].any()


def test_search_by_bits_alone_finds_exactly_k() -> None:
    x = np.random.default_rng(5).standard_normal(5000).astype(np.float32)
    for k in (1, 50, 4999, 5000):
        cut = search_bits(x, k, (k, k), 0.0, float(np.finfo(np.float32).max))
        assert cut.selected == k
        assert cut.passes <= 3
        assert laplace.count_above(x, cut.threshold)[0] + cut.ties == k


def test_too_small_buffers_are_refused() -> None:
    with pytest.raises(ValueError, match="buffers of 5 indices"):
        accumulate_pick(
            np.zeros(100, np.float32),
            np.zeros(100, np.float32),
            10,
            Warm(),
            np.empty(5, np.int32),
            np.empty(5, np.float32),
        )
