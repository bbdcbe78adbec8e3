"""Blocks of bits: the compiled passes equal the reference, and taking never makes the residual larger."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.kernels.cpu import sign
from thinwire.kernels.reference import sign as reference

unhurried = settings(deadline=None)  # the first call of a kernel compiles it


def blocks_of(sizes: list[int], gap: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks of these sizes with a gap before each, their bits from a byte of its own on."""
    starts = np.cumsum([gap, *(size + gap for size in sizes)])[: len(sizes)].astype(np.int64)
    places = np.cumsum([0, *((size + 7) // 8 for size in sizes)])[: len(sizes)].astype(np.int64)
    return starts, starts + np.array(sizes, np.int64), places


def draw_vector(data: st.DataObject, size: int) -> np.ndarray:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = np.clip(random.standard_normal(size), -1.0, 1.0) * data.draw(st.sampled_from([1e-45, 1e-6, 1.0, 3.4e38]))
    x[random.random(size) < data.draw(st.sampled_from([0.0, 0.9, 1.0]))] *= 0.0  # zeros of both signs
    return x.astype(np.float32)


@unhurried
@given(st.data())
def test_equals_reference(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 300) | st.sampled_from([64, 128]), max_size=5))
    starts, stops, places = blocks_of(sizes, data.draw(st.sampled_from([0, 3])))
    size = int(stops[-1]) if sizes else 0
    residual, gradient = draw_vector(data, size), draw_vector(data, size)
    if size:
        for place in data.draw(st.lists(st.integers(0, size - 1), max_size=2)):
            gradient[place] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    scales, codes = np.ones(len(sizes), np.float32), np.ones(sum((s + 7) // 8 for s in sizes), np.uint8)
    where = [torch.from_numpy(array) for array in (starts, stops, places)]
    expected = [torch.from_numpy(array.copy()) for array in (residual, gradient, scales, codes)]
    good = reference.encode(expected[0], expected[1], *where, expected[2], expected[3])
    assert sign.encode(residual, gradient, starts, stops, places, scales, codes) == good
    for mine, theirs in zip((residual, scales, codes), (expected[0], expected[2], expected[3]), strict=True):
        np.testing.assert_array_equal(mine, theirs.numpy())
    assert np.isfinite(residual).all()

    out = draw_vector(data, size)
    factor = data.draw(st.sampled_from([1.0, 1 / 3]))
    same = torch.from_numpy(out.copy())
    reference.add(same, *where, expected[2], expected[3], factor)
    sign.add(out, starts, stops, places, scales, codes, factor, 0, len(sizes))
    np.testing.assert_array_equal(out, same.numpy())


@unhurried
@given(st.data())
def test_taking_contracts(data: st.DataObject) -> None:
    """|x - sent|^2 = |x|^2 - elements * scale^2, block by block, whatever the zeros do."""
    size = data.draw(st.integers(1, 500))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = (random.standard_normal(size) * (random.random(size) < 0.7)).astype(np.float32)
    starts, stops, places = blocks_of([size], 0)
    scales, codes, residual = np.zeros(1, np.float32), np.zeros((size + 7) // 8, np.uint8), np.zeros(size, np.float32)
    assert sign.encode(residual, x, starts, stops, places, scales, codes)
    before, after = np.square(x.astype(np.float64)).sum(), np.square(residual.astype(np.float64)).sum()
    np.testing.assert_allclose(after, before - size * np.float64(scales[0]) ** 2, rtol=1e-5, atol=1e-9)
    assert after <= before * (1.0 + 1e-6)
