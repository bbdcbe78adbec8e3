"""1-bit block-wise quantisation (SignSGD with error feedback)."""

from dataclasses import dataclass
from typing import ClassVar

from .blockwise import BlockwiseCodec


@dataclass(frozen=True)
class Sign(BlockwiseCodec):
    """The sign of every element, times the mean magnitude of its block.

    It removes elements * scale^2 per block from the squared norm, so compression never makes the residual larger. One bit has
    no zero: an element that is exactly zero, in a block that is not, is sent as plus the scale, which the next steps
    correct. A block of zeros has scale 0 and stays zero.

    Bytes: elements * (1 / 8 + 4 / block), all-gathered: grows with the number of ranks.
    Memory passes: one, which accumulates, measures and encodes; decoding reads each message once and writes once.
    Source: Karimireddy et al. 2019, "Error feedback fixes SignSGD".
    """

    block: int = 4096

    bits: ClassVar[int] = 1
