"""The statistics of a stage equal the reference."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.kernels.cpu import sidco
from thinwire.kernels.reference import sidco as reference


@settings(deadline=None)  # the first call of a kernel compiles it
@given(st.data())
def test_equals_reference(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([0, 1, 63, 64, 65, 4095, 4096, 4097, 8193]) | st.integers(0, 9000))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = (random.standard_normal(size) * data.draw(st.sampled_from([1e-42, 1.0, 1e30]))).astype(np.float32)
    x[random.random(size) < data.draw(st.sampled_from([0.0, 0.9, 1.0]))] = 0.0
    present = [float(value) for value in np.abs(x[:20])]
    threshold = data.draw(st.sampled_from([0.0, 0.5, math.inf, *present]).map(lambda t: float(np.float32(t))))
    assert sidco.tail(x, threshold) == reference.tail(torch.from_numpy(x), threshold)
