"""Block-wise quantisation: the compiled passes equal the reference, nothing finite overflows, and the residual shrinks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.kernels.cpu import blockwise
from thinwire.kernels.reference import blockwise as reference

unhurried = settings(deadline=None)  # the first call of a kernel compiles it

SCALES = [1e-45, 1e-42, 1e-37, 1e-6, 1.0, 1e30, 3.4e38]


def blocks_of(sizes: list[int], gap: int, bits: int) -> np.ndarray:
    """Blocks of these sizes with a gap before each, the codes of each beginning at a byte."""
    starts = np.cumsum([gap, *(size + gap for size in sizes)])[: len(sizes)]
    places = np.cumsum([0, *(-(-size * bits // 8) for size in sizes)])[: len(sizes)]
    return np.stack([starts, starts + np.array(sizes, np.int64), places], 1).astype(np.int64)


def draw_vector(data: st.DataObject, size: int) -> np.ndarray:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = np.clip(random.standard_normal(size), -1.0, 1.0) * data.draw(st.sampled_from(SCALES))
    x[random.random(size) < data.draw(st.sampled_from([0.0, 0.9, 1.0]))] *= 0.0  # zeros of both signs
    return x.astype(np.float32)


@pytest.mark.parametrize("bits", [8, 1])
@unhurried
@given(st.data())
def test_equals_reference(bits: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 300) | st.sampled_from([64, 128]), max_size=5))
    blocks = blocks_of(sizes, data.draw(st.sampled_from([0, 3])), bits)
    size = int(blocks[-1, 1]) if sizes else 0
    residual, gradient = draw_vector(data, size), draw_vector(data, size)
    if size:
        for place in data.draw(st.lists(st.integers(0, size - 1), max_size=2)):
            gradient[place] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    scales, codes = np.ones(len(sizes), np.float32), np.ones(sum(-(-s * bits // 8) for s in sizes), np.uint8)
    where = torch.from_numpy(blocks)
    expected = [torch.from_numpy(array.copy()) for array in (residual, gradient, scales, codes)]
    good = reference.encode(expected[0], expected[1], where, expected[2], expected[3], bits)
    with np.errstate(all="ignore"):
        assert blockwise.encode(residual, gradient, blocks, scales, codes, bits) == good
    for mine, theirs in zip((residual, scales, codes), (expected[0], expected[2], expected[3]), strict=True):
        np.testing.assert_array_equal(mine, theirs.numpy())
    assert np.isfinite(residual).all()

    out = draw_vector(data, size)
    factor = data.draw(st.sampled_from([1.0, 1 / 3]))
    same = torch.from_numpy(out.copy())
    reference.add(same, where, expected[2], expected[3], factor, bits)
    blockwise.add(out, blocks, scales, codes, factor, bits)
    np.testing.assert_array_equal(out, same.numpy())


@pytest.mark.parametrize("scale", SCALES)
def test_error_of_bytes_is_at_most_half_a_scale(scale: float) -> None:
    x = (np.random.default_rng(0).uniform(-1.0, 1.0, 4096) * scale).astype(np.float32)
    blocks = blocks_of([1024] * 4, 0, 8)
    scales, codes, residual = np.zeros(4, np.float32), np.zeros(4096, np.uint8), np.zeros(4096, np.float32)
    assert blockwise.encode(residual, x, blocks, scales, codes, 8)
    assert np.isfinite(residual).all()
    sent = np.zeros(4096, np.float32)
    blockwise.add(sent, blocks, scales, codes, 1.0, 8)
    assert np.isfinite(sent).all()
    np.testing.assert_array_equal(sent.astype(np.float64) + residual, x.astype(np.float64))
    if scale < 1e-36:
        np.testing.assert_array_equal(residual, x)  # denormal scales: all of it waits
    else:
        assert (np.abs(residual.reshape(4, 1024)) <= 0.50001 * scales[:, None]).all()
        np.testing.assert_allclose(scales, np.abs(x.reshape(4, 1024)).max(1) / 127, rtol=1e-6)


@unhurried
@given(st.data())
def test_taking_signs_contracts(data: st.DataObject) -> None:
    """|x - sent|^2 = |x|^2 - elements * scale^2, block by block, whatever the zeros do."""
    size = data.draw(st.integers(1, 500))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = (random.standard_normal(size) * (random.random(size) < 0.7)).astype(np.float32)
    blocks = blocks_of([size], 0, 1)
    scales, codes, residual = np.zeros(1, np.float32), np.zeros((size + 7) // 8, np.uint8), np.zeros(size, np.float32)
    assert blockwise.encode(residual, x, blocks, scales, codes, 1)
    before, after = np.square(x.astype(np.float64)).sum(), np.square(residual.astype(np.float64)).sum()
    np.testing.assert_allclose(after, before - size * np.float64(scales[0]) ** 2, rtol=1e-5, atol=1e-9)
    assert after <= before * (1.0 + 1e-6)
