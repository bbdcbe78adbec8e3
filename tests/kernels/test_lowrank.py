"""Thin factors: the compiled passes equal the reference, rows come out orthonormal or zero."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.kernels.cpu import lowrank
from thinwire.kernels.reference import lowrank as reference

unhurried = settings(deadline=None)  # the first call of a kernel compiles it


def draw_factor(data: st.DataObject, rank: int, size: int) -> np.ndarray:
    """Rows that may be zero, equal to each other, or nearly so."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    p = random.standard_normal((rank, size)) * data.draw(st.sampled_from([1e-40, 1.0, 1e30]))
    for k in range(rank):
        kind = data.draw(st.sampled_from(["free", "free", "zero", "copy", "near"]))
        if kind == "zero":
            p[k] = 0.0
        elif k and kind == "copy":
            p[k] = -2.0 * p[k - 1]
        elif k and kind == "near":
            p[k] = p[k - 1] * (1.0 + 1e-4 * random.standard_normal(size))
    return p.astype(np.float32)


@unhurried
@given(st.data())
def test_orthonormal_rows(data: st.DataObject) -> None:
    p = draw_factor(data, data.draw(st.integers(1, 6)), data.draw(st.integers(1, 50)))
    expected = torch.from_numpy(p.copy())
    reference.orthonormalise(expected)
    lowrank.orthonormalise(p)
    np.testing.assert_array_equal(p, expected.numpy())
    norms = np.linalg.norm(p.astype(np.float64), axis=1)
    assert all(norm == 0.0 or abs(norm - 1.0) < 1e-6 for norm in norms)
    np.testing.assert_allclose(p.astype(np.float64) @ p.T, np.diag(norms**2), atol=1e-6)


@unhurried
@given(st.data())
def test_products_equal_reference(data: st.DataObject) -> None:
    rank, rows = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    columns = data.draw(st.sampled_from([1, 7, 1023, 1024, 1025, 2500]))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    p = random.standard_normal((rank, rows)).astype(np.float32)
    q = random.standard_normal((rank, columns)).astype(np.float32)
    out = random.standard_normal(rows * columns).astype(np.float32)
    expected, factors = torch.from_numpy(out.copy()), (torch.from_numpy(p), torch.from_numpy(q))
    for factor in (-1.0, 1.0):
        reference.add_product(*factors, factor, expected)
        lowrank.add_product(p, q, factor, out)
        np.testing.assert_array_equal(out, expected.numpy())
    lowrank.write_product(p, q, out)
    reference.write_product(*factors, expected)
    np.testing.assert_array_equal(out, expected.numpy())
    np.testing.assert_allclose(out.reshape(rows, columns), p.T @ q, rtol=1e-4, atol=1e-5)
