"""Cast to a 16-bit floating-point format: half the bytes."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .base import Codec, CodecState, Estimate, GroupInfo, Steps, Sum

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class CastState(CodecState):
    narrow: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True)
class Cast(Codec):
    """Round to bf16 or fp16, all-reduce, widen. No residual: the all-reduce itself rounds at every hop.

    Each rank divides by the world size before it rounds, so that a sum of fp16 values overflows only where the mean does.
    Bytes: 2 * elements, all-reduced.  Memory passes: two, half as wide on one side.
    """

    dtype: str = "bf16"

    keeps_residual: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, not {self.dtype!r}")

    def start(self, group: GroupInfo, rank: int, world: int) -> CastState:
        return CastState(group, rank, world, narrow=torch.empty(group.elements, dtype=_DTYPES[self.dtype]))

    def exchange(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Steps:
        assert isinstance(state, CastState)
        torch.mul(gradient, 1.0 / state.world, out=gradient)
        state.narrow.copy_(gradient)
        yield Sum(state.narrow)
        gradient.copy_(state.narrow)

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        return Estimate(summed=2 * group.elements, passes=1.3)
