"""MiCRO in plain torch: accumulate everywhere, select in one partition."""

import torch
from torch import Tensor

from thinwire.kernels.reference.basic import accumulate


def accumulate_select_segments(
    residual: Tensor, gradient: Tensor, start: int, stop: int, ends: Tensor, thresholds: Tensor, indices: Tensor
) -> tuple[bool, int, int]:
    """`residual += gradient`; then the places in [start, stop) with `|residual| >= threshold`, never a zero.

    residual and gradient float32 (n,).  ends int64 (s,), ascending, and thresholds float32 (s,), s >= 1: segment i
    covers [ends[i - 1], ends[i]), the first one from 0 on, the last one as far as needed.  indices int32 (capacity,)
    receives ascending places relative to start; what lies behind the written ones is undefined.  Returns (finite,
    wanted, written): wanted counts on when indices is full.
    """
    finite = accumulate(residual, gradient)
    places = torch.arange(start, stop)
    magnitudes = residual[start:stop].abs()
    limits = thresholds[torch.searchsorted(ends[:-1], places, right=True)]
    selected = torch.nonzero((magnitudes >= limits) & (magnitudes > 0)).flatten()
    wanted = selected.numel()
    written = min(wanted, indices.numel())
    indices[:written] = selected[:written].int()
    return finite, wanted, written
