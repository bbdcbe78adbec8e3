"""The largest elements, exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .base import Estimate, GroupInfo
from .sparse import SparseCodec, SparseState


@dataclass(frozen=True)
class TopK(SparseCodec):
    """Each rank sends its `density` largest accumulated elements by magnitude.

    Bytes: about density * elements * (32 + 8) bits at 1 %, gathered: grows with the number of ranks.
    Memory passes: the accumulate pass and those of `torch.topk`, about a hundred in its units; `LaplaceTopK` selects the
    same much faster.
    """

    def pick(
        self, gradient: Tensor, residual: Tensor, state: SparseState
    ) -> tuple[bool, NDArray[np.int32], NDArray[np.float32]]:
        from ..kernels.cpu import basic, sliced

        flat = residual.numpy()
        if not sliced.accumulate(flat, gradient.numpy()):
            return False, state.indices[:0], state.values[:0]
        largest = torch.topk(residual.abs(), self.target(state.group), sorted=False).indices
        indices = largest.to(torch.int32).sort().values.numpy()
        indices = indices[flat[indices] != 0]
        state.room(indices.size)
        values = state.values[: indices.size]
        basic.take(flat, indices, values)
        return True, indices, values

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        return Estimate(gathered=super().estimate(group, world).gathered, passes=100.0)
