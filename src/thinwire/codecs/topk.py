"""The largest elements, exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .base import CodecState, Estimate, GroupInfo
from .sparse import SparseCodec


@dataclass(frozen=True)
class TopK(SparseCodec):
    """Each rank sends its `density` largest accumulated elements by magnitude.

    Bytes: about density * elements * (32 + 8) bits at 1 %, gathered: grows with the number of ranks.
    Memory passes: the accumulate pass and those of `torch.topk`, about a hundred in its units; `LaplaceTopK` selects the
    same much faster.
    """

    def select(self, gradient: Tensor, residual: Tensor, state: CodecState) -> tuple[bool, NDArray[np.int32]]:
        from ..kernels.cpu import basic

        finite = basic.accumulate(residual.numpy(), gradient.numpy())
        largest = torch.topk(residual.abs(), self.target(state.group), sorted=False).indices
        ascending = largest.to(torch.int32).sort().values.numpy()
        return finite, ascending[residual.numpy()[ascending] != 0]

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        return Estimate(gathered=super().estimate(group, world).gathered, passes=100.0)
