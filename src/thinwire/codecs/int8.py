"""A byte an element."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Estimate, GroupInfo
from .blockwise import BlockwiseCodec, Kernels


@dataclass(frozen=True)
class Int8(BlockwiseCodec):
    """Every element rounded to one of 255 levels: a whole number from -127 to 127 times the scale of its block.

    The scale is the largest magnitude of the block over 127; what rounding leaves, at most half a scale, stays in
    the residual. A block whose scale would be denormal waits there as a whole.

    Bytes: elements * (1 + 4 / block) a message. Sent two-shot by default (chain K): parts by all-to-all, summed in float32,
    coded again, gathered: about twice that whatever the number of ranks. Gathered at once (chain J) it grows with them.
    Memory passes: one, which accumulates, measures and rounds; decoding reads each message once, writes once.
    Source: block-wise 8-bit quantisation (Dettmers et al. 2022), linear levels, with error feedback.
    """

    block: int = 1024

    def kernels(self) -> Kernels:
        from ..kernels.cpu import int8

        return int8

    def code_bytes(self, elements: int) -> int:
        return elements

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        return Estimate(gathered=self._size(group), passes=1.8)
