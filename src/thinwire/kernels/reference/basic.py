"""Kernels that all codecs share, in plain torch: finite test, accumulation, gather and clear, put back, scatter.

Tensors are flat, contiguous float32; indices are int32 and distinct within a call unless said otherwise.
"""

import torch
from torch import Tensor

TILE = 4096


def lane_sum(values: Tensor, lanes: int) -> float:
    """The sum of float64 values: in `lanes` partial sums, of every `lanes`-th value each, which are added in order."""
    partial = torch.zeros(lanes, dtype=torch.float64)
    for row in range(0, values.numel(), lanes):
        part = values[row : row + lanes]
        partial[: part.numel()] += part
    total = 0.0
    for lane in partial.tolist():
        total += lane
    return total


def all_finite(x: Tensor) -> bool:
    """True when no element is NaN or infinite."""
    return bool(torch.isfinite(x).all())


def accumulate(residual: Tensor, gradient: Tensor) -> bool:
    """`residual += gradient`, tile by tile; a tile whose sum is not finite everywhere stays as it was.

    True when every tile was added.
    """
    return add_finite(residual, gradient, [slice(at, at + TILE) for at in range(0, residual.numel(), TILE)])


def add_finite(residual: Tensor, gradient: Tensor, places: list[slice]) -> bool:
    """`residual += gradient` in those of the places whose sum is finite; True when all are."""
    finite = True
    for place in places:
        total = residual[place] + gradient[place]
        if all_finite(total):
            residual[place] = total
        else:
            finite = False
    return finite


def take(residual: Tensor, indices: Tensor, values: Tensor) -> None:
    """`values[i] = residual[indices[i]]`, and zero there."""
    values[:] = residual[indices.long()]
    residual[indices.long()] = 0.0


def put_back(residual: Tensor, indices: Tensor, values: Tensor) -> None:
    """`residual[indices[i]] += values[i]`; what `take` took, or the part of it that was not sent."""
    residual[indices.long()] += values


def clear(out: Tensor) -> None:
    """Zero everywhere."""
    out.zero_()


def write_at(out: Tensor, indices: Tensor, values: Tensor, scale: float) -> None:
    """Zero everywhere, then `out[indices[i]] = values[i] * scale`."""
    out.zero_()
    out[indices.long()] = values * torch.tensor(scale, dtype=torch.float32)
