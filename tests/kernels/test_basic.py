"""The compiled helpers equal the reference bit for bit, and conserve."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs.driver import all_finite
from thinwire.kernels.cpu import basic
from thinwire.kernels.reference import basic as reference

SIZES = st.sampled_from([0, 1, 2, 63, 64, 65, 1000, 4095, 4096, 4097, 8191, 8192, 8193, 12_289, 20_000])
BAD = st.sampled_from([np.nan, -np.nan, np.inf, -np.inf])
unhurried = settings(deadline=None)  # the first call of a kernel compiles it

LARGEST = float(np.finfo(np.float32).max)


def draw_vector(data: st.DataObject, size: int) -> np.ndarray:
    seed = data.draw(st.integers(0, 2**32 - 1))
    scale = data.draw(st.sampled_from([1e-42, 1e-6, 1.0, 1e30]))
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def spoil(data: st.DataObject, x: np.ndarray) -> None:
    """Put NaN or infinity at a few places, the borders of tiles among them."""
    if x.size:
        borders = [i for i in (0, x.size - 1, 4095, 4096, 8191, 8192) if i < x.size]
        for place in data.draw(st.lists(st.sampled_from(borders) | st.integers(0, x.size - 1), max_size=3)):
            x[place] = data.draw(BAD)


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    return x.dtype == y.dtype and x.tobytes() == y.tobytes()


@unhurried
@given(st.data())
def test_all_finite_equals_reference(data: st.DataObject) -> None:
    x = draw_vector(data, data.draw(SIZES))
    spoil(data, x)
    assert basic.all_finite(x) == reference.all_finite(torch.from_numpy(x))


@unhurried
@given(st.lists(st.floats(width=32), max_size=70))
def test_all_finite_of_bfloat16(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32).bfloat16()
    assert all_finite(x) == bool(torch.isfinite(x).all())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_all_finite_sees_every_place(value: float) -> None:
    x = np.ones(4100, np.float32)
    for place in range(x.size):
        x[place] = value
        assert not basic.all_finite(x)
        x[place] = LARGEST
    assert basic.all_finite(x)


@unhurried
@given(st.data())
def test_accumulate_equals_reference(data: st.DataObject) -> None:
    size = data.draw(SIZES)
    residual, gradient = draw_vector(data, size), draw_vector(data, size)
    spoil(data, gradient)
    expected = torch.from_numpy(residual.copy())
    expected_flag = reference.accumulate(expected, torch.from_numpy(gradient))
    assert basic.accumulate(residual, gradient) == expected_flag
    assert same_bits(residual, expected.numpy())
    assert np.isfinite(residual).all()


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 12_288, 12_300])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, LARGEST])
def test_a_bad_tile_stays_and_the_others_are_added(size: int, bad: float) -> None:
    for tile in range(-(-size // 4096)):
        gradient = np.ones(size, np.float32)
        residual = np.full(size, 2.0, np.float32)
        place = min(tile * 4096 + 17, size - 1)
        gradient[place] = bad
        residual[place] = LARGEST if bad == LARGEST else 2.0  # the sum overflows though both are finite
        before = residual.copy()
        assert not basic.accumulate(residual, gradient)
        kept = slice(tile * 4096, (tile + 1) * 4096)
        assert same_bits(residual[kept], before[kept])
        residual[kept] = 3.0
        assert (residual == 3.0).all()


@st.composite
def sparse(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    size = draw(st.integers(1, 300))
    x = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).standard_normal(size).astype(np.float32)
    places = draw(st.sets(st.integers(0, size - 1)))
    return x, np.array(draw(st.permutations(sorted(places))), np.int32)


@unhurried
@given(sparse())
def test_take_then_put_back_conserves(case: tuple[np.ndarray, np.ndarray]) -> None:
    residual, indices = case
    before = residual.copy()
    expected, expected_values = torch.from_numpy(residual.copy()), torch.empty(indices.size)
    reference.take(expected, torch.from_numpy(indices), expected_values)
    values = np.empty(indices.size, np.float32)
    basic.take(residual, indices, values)
    assert same_bits(residual, expected.numpy())
    assert same_bits(values, expected_values.numpy())
    assert not residual[indices].any()
    basic.put_back(residual, indices, values)
    assert same_bits(residual, before)


@unhurried
@given(sparse(), st.floats(-4, 4, width=32))
def test_put_back_equals_reference(case: tuple[np.ndarray, np.ndarray], factor: float) -> None:
    residual, indices = case
    values = np.float32(factor) * residual[indices]
    expected = torch.from_numpy(residual.copy())
    reference.put_back(expected, torch.from_numpy(indices), torch.from_numpy(values))
    basic.put_back(residual, indices, values)
    assert same_bits(residual, expected.numpy())


@unhurried
@given(case=sparse(), scale=st.sampled_from([1.0, 0.25, 1 / 3, 1e-3]))
def test_write_at_equals_reference(case: tuple[np.ndarray, np.ndarray], scale: float) -> None:
    out, indices = case
    values = np.random.default_rng(indices.size).standard_normal(indices.size).astype(np.float32)
    expected = torch.from_numpy(out.copy())
    reference.write_at(expected, torch.from_numpy(indices), torch.from_numpy(values), scale)
    basic.write_at(out, indices, values, scale)
    assert same_bits(out, expected.numpy())


@pytest.mark.parametrize(
    "elements", [0, 1, 7, 1000, basic.CACHED, basic.CACHED + 1, basic.CACHED + 12, 3 * basic.CACHED]
)
@pytest.mark.parametrize("offset", [0, 1, 5, 8])
def test_clear_stays_inside(elements: int, offset: int) -> None:
    whole = np.ones(elements + offset + 9, np.float32)
    basic.clear(whole[offset : offset + elements])
    assert not whole[offset : offset + elements].any()
    assert whole[:offset].all()
    assert whole[offset + elements :].all()
