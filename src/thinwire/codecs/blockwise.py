"""Block-wise quantisation: a few bits per element and one scale per block."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels, ranges
from ..errors import MessageCoding, MessageCount, MessageLength
from ..messages import HEADER_BYTES, Flag, Header, IndexCoding, ValueCoding, read_header, write_header
from .base import CodecState, Estimate, GatheredCodec, GroupInfo, Message

CHUNK = 1 << 16  # elements whose sum over ranks stays in the cache while all messages are added

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass
class BlockwiseState(CodecState):
    """Block i covers elements [blocks[i, 0], blocks[i, 1]) of the group; its codes begin at byte blocks[i, 2] of all."""

    blocks: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 3), np.int64))
    chunks: list[slice] = field(default_factory=list)
    elements: int = 0
    payload: int = 0


@dataclass(frozen=True)
class BlockwiseCodec(GatheredCodec):
    """One float32 scale per block, then the codes of all elements. All messages have the same size.

    A block lies inside one parameter, so nothing is sent for gaps between parameters, and no tensor shares a scale with its
    neighbour. The payload is OPAQUE: the scales of all blocks, then the codes of all blocks. Subclasses give the bits per
    element, see `kernels.cpu.blockwise`.
    """

    block: int = 1024

    bits: ClassVar[int]

    def __post_init__(self) -> None:
        ranges.whole("block", self.block, 1)

    def code_bytes(self, elements: int) -> int:
        """Bytes for the codes of one block."""
        return -(-elements * self.bits // 8)

    def start(self, group: GroupInfo, rank: int, world: int) -> BlockwiseState:
        blocks, at = list[tuple[int, int, int]](), 0
        for parameter in group.parameters:
            end = parameter.offset + parameter.elements
            for start in range(parameter.offset, end, self.block):
                stop = min(start + self.block, end)
                blocks.append((start, stop, at))
                at += self.code_bytes(stop - start)
        each = max(1, CHUNK // self.block)
        return BlockwiseState(
            group,
            rank,
            world,
            blocks=np.array(blocks, np.int64).reshape(-1, 3),
            chunks=[slice(first, first + each) for first in range(0, len(blocks), each)],
            elements=sum(parameter.elements for parameter in group.parameters),
            payload=4 * len(blocks) + at,
        )

    def encode(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Message:
        assert isinstance(state, BlockwiseState)
        message, size = state.outgoing.numpy(), HEADER_BYTES + state.payload
        if message.size < size:
            raise ValueError(f"{self} sends {size} bytes or nothing; there is room for {message.size}")
        scales, codes = _parts(message, state)
        flat = residual.numpy()
        if kernels.blockwise.encode(flat, gradient.numpy(), state.blocks, scales, codes, self.bits):
            header = Header(IndexCoding.OPAQUE, ValueCoding.NONE, Flag(0), state.elements, size, state.payload)
        else:
            # Accumulation and encoding are one pass: return what was taken from the finite blocks.
            kernels.blockwise.add(flat, state.blocks, scales, codes, 1.0, self.bits)
            header = Header(IndexCoding.OPAQUE, ValueCoding.NONE, Flag.NONFINITE, 0, 0, 0)
        write_header(message, header)
        return Message(HEADER_BYTES + header.payload)

    def decode(self, messages: Sequence[Tensor], out: Tensor, scale: float, state: CodecState) -> None:
        assert isinstance(state, BlockwiseState)
        parts = [_parts(message.numpy(), state) for message in messages if self._check(message.numpy(), state)]
        for chunk in state.chunks:
            for scales, codes in parts:
                kernels.blockwise.add(out.numpy(), state.blocks[chunk], scales[chunk], codes, scale, self.bits)

    def _check(self, message: Bytes, state: BlockwiseState) -> bool:
        """Raise for a message of another codec; False for an empty one."""
        header = read_header(message)
        if (header.index, header.values) != (IndexCoding.OPAQUE, ValueCoding.NONE):
            raise MessageCoding(
                f"coding: found {header.index.name} with {header.values.name}, {self} has OPAQUE with NONE"
            )
        if header.entries not in (0, state.elements):
            raise MessageCount(f"entries: found {header.entries}, {self} sends all {state.elements} elements or none")
        payload = state.payload if header.entries else 0
        if header.payload != payload:
            raise MessageLength(
                f"payload: found {header.payload} bytes, {header.entries} elements of {self} take {payload}"
            )
        return payload > 0

    def smallest_capacity(self, group: GroupInfo) -> int:
        return self._size(group)

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        return Estimate(gathered=self._size(group), passes=1.8)

    def _size(self, group: GroupInfo) -> int:
        size = HEADER_BYTES
        for parameter in group.parameters:
            whole, rest = divmod(parameter.elements, self.block)
            size += whole * (4 + self.code_bytes(self.block))
            size += 4 + self.code_bytes(rest) if rest else 0
        return size


def _parts(message: Bytes, state: BlockwiseState) -> tuple[Floats, Bytes]:
    """Scales and codes in the payload of a sufficiently long message."""
    border = HEADER_BYTES + 4 * len(state.blocks)
    return message[HEADER_BYTES:border].view(np.float32), message[border : HEADER_BYTES + state.payload]
