"""No compression at all."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import Codec, CodecState, Estimate, GroupInfo, Steps, Sum


@dataclass(frozen=True)
class Dense(Codec):
    """The plain mean, as DDP without a hook computes it.

    Bytes: 4 * elements, all-reduced.  Memory passes: none.
    """

    keeps_residual: ClassVar[bool] = False
    direct: ClassVar[bool] = True

    def exchange(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Steps:
        yield Sum(gradient, average=True)

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        return Estimate(summed=4 * group.elements)
