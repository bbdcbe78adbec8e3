"""Blocks of bytes: the compiled passes equal the reference, and nothing that is finite overflows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.kernels.cpu import int8
from thinwire.kernels.reference import int8 as reference

unhurried = settings(deadline=None)  # the first call of a kernel compiles it

SCALES = [1e-45, 1e-42, 1e-37, 1e-6, 1.0, 1e30, 3.4e38]


def blocks_of(sizes: list[int], gap: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks of these sizes with a gap before each, their codes back to back."""
    starts = np.cumsum([gap, *(size + gap for size in sizes)])[: len(sizes)].astype(np.int64)
    places = np.cumsum([0, *sizes])[: len(sizes)].astype(np.int64)
    return starts, starts + np.array(sizes, np.int64), places


def draw_vector(data: st.DataObject, size: int) -> np.ndarray:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = np.clip(random.standard_normal(size), -1.0, 1.0) * data.draw(st.sampled_from(SCALES))
    x[random.random(size) < data.draw(st.sampled_from([0.0, 0.9, 1.0]))] = 0.0
    return x.astype(np.float32)


@unhurried
@given(st.data())
def test_equals_reference(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 300), max_size=5))
    starts, stops, places = blocks_of(sizes, data.draw(st.sampled_from([0, 3])))
    size = int(stops[-1]) if sizes else 0
    residual, gradient = draw_vector(data, size), draw_vector(data, size)
    if size:
        for place in data.draw(st.lists(st.integers(0, size - 1), max_size=2)):
            gradient[place] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    scales, codes = np.ones(len(sizes), np.float32), np.ones(sum(sizes), np.uint8)
    where = [torch.from_numpy(array) for array in (starts, stops, places)]
    expected = [torch.from_numpy(array.copy()) for array in (residual, gradient, scales, codes)]
    good = reference.encode(expected[0], expected[1], *where, expected[2], expected[3])
    with np.errstate(all="ignore"):
        assert int8.encode(residual, gradient, starts, stops, places, scales, codes) == good
    for mine, theirs in zip((residual, scales, codes), (expected[0], expected[2], expected[3]), strict=True):
        np.testing.assert_array_equal(mine, theirs.numpy())
    assert np.isfinite(residual).all()

    out = draw_vector(data, size)
    factor = data.draw(st.sampled_from([1.0, 1 / 3]))
    same = torch.from_numpy(out.copy())
    reference.add(same, *where, expected[2], expected[3], factor)
    int8.add(out, starts, stops, places, scales, codes, factor, 0, len(sizes))
    np.testing.assert_array_equal(out, same.numpy())


@pytest.mark.parametrize("scale", SCALES)
def test_error_is_at_most_half_a_scale(scale: float) -> None:
    x = (np.random.default_rng(0).uniform(-1.0, 1.0, 4096) * scale).astype(np.float32)
    starts, stops, places = blocks_of([1024] * 4, 0)
    scales, codes, residual = np.zeros(4, np.float32), np.zeros(4096, np.uint8), np.zeros(4096, np.float32)
    assert int8.encode(residual, x, starts, stops, places, scales, codes)
    assert np.isfinite(residual).all()
    sent = np.zeros(4096, np.float32)
    int8.add(sent, starts, stops, places, scales, codes, 1.0, 0, 4)
    assert np.isfinite(sent).all()
    np.testing.assert_array_equal(sent.astype(np.float64) + residual, x.astype(np.float64))
    if scale < 1e-36:
        np.testing.assert_array_equal(residual, x)  # denormal scales: all of it waits
    else:
        assert (np.abs(residual.reshape(4, 1024)) <= 0.50001 * scales[:, None]).all()
        np.testing.assert_allclose(scales, np.abs(x.reshape(4, 1024)).max(1) / 127, rtol=1e-6)
