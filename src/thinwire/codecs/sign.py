"""A bit an element."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Estimate, GroupInfo
from .blockwise import BlockwiseCodec, Kernels


@dataclass(frozen=True)
class Sign(BlockwiseCodec):
    """The sign of every element, times the mean magnitude of its block.

    Of the norm's square it sends elements * scale^2 a block, so the residual never grows by compressing. One bit has no
    zero: an element that is exactly zero, in a block that is not, is sent as plus the scale, and taken back
    by the next steps. A block of zeros has scale 0 and stays zero.

    Bytes: elements * (1 / 8 + 4 / block), gathered: grows with the number of ranks.
    Memory passes: one, which accumulates, measures and takes; decoding reads each message once, writes once.
    Source: Karimireddy et al. 2019, "Error feedback fixes SignSGD".
    """

    block: int = 4096

    def kernels(self) -> Kernels:
        from ..kernels.cpu import sign

        return sign

    def code_bytes(self, elements: int) -> int:
        return -(-elements // 8)

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        return Estimate(gathered=self._size(group), passes=1.8)
