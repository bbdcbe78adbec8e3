"""8-bit block-wise quantisation."""

from dataclasses import dataclass
from typing import ClassVar

from .blockwise import BlockwiseCodec


@dataclass(frozen=True)
class Int8(BlockwiseCodec):
    """Every element rounded to one of 255 levels: an integer from -127 to 127 times the scale of its block.

    The scale is the largest magnitude of the block / 127; the rounding error, at most half a scale, stays in the residual. A
    block whose scale would be denormal stays there as a whole.

    Bytes: elements * (1 + 4 / block) per message. Two-shot by default (chain K): parts by all-to-all, summed in float32,
    quantised again, all-gathered: about twice that for any number of ranks. A single all-gather (chain J) grows with them.
    Memory passes: one, which accumulates, measures and rounds; decoding reads each message once and writes once.
    Source: block-wise 8-bit quantisation (Dettmers et al. 2022), linear levels, with error feedback.
    """

    block: int = 1024

    bits: ClassVar[int] = 8
