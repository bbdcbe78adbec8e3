"""What codecs share that send a few bits of every element and one scale for each block of elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..errors import MessageCoding, MessageCount, MessageLength
from ..messages import HEADER_BYTES, Flag, Header, IndexCoding, ValueCoding, read_header, write_header
from .base import CodecState, Estimate, GatheredCodec, GroupInfo, Message

CHUNK = 1 << 16  # elements whose sum over ranks stays in the cache while all messages are added

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Places = NDArray[np.int64]


class Kernels(Protocol):
    """What a kernel module must have; see `kernels.cpu.int8`."""

    def encode(
        self,
        residual: Floats,
        gradient: Floats,
        starts: Places,
        stops: Places,
        places: Places,
        scales: Floats,
        codes: Bytes,
    ) -> bool: ...

    def add(
        self,
        out: Floats,
        starts: Places,
        stops: Places,
        places: Places,
        scales: Floats,
        codes: Bytes,
        factor: float,
        first: int,
        last: int,
    ) -> None: ...


def _none() -> Places:
    return np.empty(0, np.int64)


@dataclass
class BlockwiseState(CodecState):
    """Block i covers elements [starts[i], stops[i]) of the group; its codes begin at byte places[i] of all codes."""

    starts: Places = field(default_factory=_none)
    stops: Places = field(default_factory=_none)
    places: Places = field(default_factory=_none)
    chunks: list[tuple[int, int]] = field(default_factory=list)
    elements: int = 0
    payload: int = 0


@dataclass(frozen=True)
class BlockwiseCodec(GatheredCodec):
    """One float32 scale a block, then the codes of all elements. Every message has the same size.

    Blocks lie inside one parameter, so nothing is sent for the places between parameters, and no tensor has the scale of
    its neighbour. The payload is OPAQUE: the scales of all blocks, then the codes of all blocks. Subclasses give
    the kernels and the bytes of a block.
    """

    block: int = 1024

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block must be at least 1, not {self.block!r}")

    def kernels(self) -> Kernels:
        raise NotImplementedError

    def code_bytes(self, elements: int) -> int:
        """Bytes for the codes of one block."""
        raise NotImplementedError

    def start(self, group: GroupInfo, rank: int, world: int) -> BlockwiseState:
        starts, stops, places, at = list[int](), list[int](), list[int](), 0
        for parameter in group.parameters:
            end = parameter.offset + parameter.elements
            for start in range(parameter.offset, end, self.block):
                starts.append(start)
                stops.append(min(start + self.block, end))
                places.append(at)
                at += self.code_bytes(stops[-1] - start)
        each = max(1, CHUNK // self.block)
        return BlockwiseState(
            group,
            rank,
            world,
            starts=np.array(starts, np.int64),
            stops=np.array(stops, np.int64),
            places=np.array(places, np.int64),
            chunks=[(first, min(first + each, len(starts))) for first in range(0, len(starts), each)],
            elements=sum(parameter.elements for parameter in group.parameters),
            payload=4 * len(starts) + at,
        )

    def encode(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Message:
        assert isinstance(state, BlockwiseState)
        message, size = state.outgoing.numpy(), HEADER_BYTES + state.payload
        if message.size < size:
            raise ValueError(f"{self} sends {size} bytes or nothing; there is room for {message.size}")
        scales, codes = _parts(message, state)
        flat, blocks = residual.numpy(), (state.starts, state.stops, state.places)
        kernels = self.kernels()
        if kernels.encode(flat, gradient.numpy(), *blocks, scales, codes):
            header = Header(IndexCoding.OPAQUE, ValueCoding.NONE, Flag(0), state.elements, size, state.payload)
        else:
            # One pass accumulates and takes; what it took before it met the bad block goes back.
            kernels.add(flat, *blocks, scales, codes, 1.0, 0, len(state.starts))
            header = Header(IndexCoding.OPAQUE, ValueCoding.NONE, Flag.NONFINITE, 0, 0, 0)
        write_header(message, header)
        return Message(HEADER_BYTES + header.payload)

    def decode(self, messages: Sequence[Tensor], out: Tensor, scale: float, state: CodecState) -> None:
        assert isinstance(state, BlockwiseState)
        parts = [_parts(message.numpy(), state) for message in messages if self._check(message.numpy(), state)]
        flat, add, blocks = out.numpy(), self.kernels().add, (state.starts, state.stops, state.places)
        for first, last in state.chunks:
            for scales, codes in parts:
                add(flat, *blocks, scales, codes, scale, first, last)

    def _check(self, message: Bytes, state: BlockwiseState) -> bool:
        """Raise for a message that is none of this codec's; False for one that holds nothing."""
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
        return Estimate(gathered=self._size(group))

    def _size(self, group: GroupInfo) -> int:
        size = HEADER_BYTES
        for parameter in group.parameters:
            whole, rest = divmod(parameter.elements, self.block)
            size += whole * (4 + self.code_bytes(self.block))
            size += 4 + self.code_bytes(rest) if rest else 0
        return size


def _parts(message: Bytes, state: BlockwiseState) -> tuple[Floats, Bytes]:
    """Scales and codes in the payload of a message that is long enough."""
    border = HEADER_BYTES + 4 * len(state.starts)
    return message[HEADER_BYTES:border].view(np.float32), message[border : HEADER_BYTES + state.payload]
