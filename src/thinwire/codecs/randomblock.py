"""One random contiguous block of each tensor, the same on every rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .base import Codec, CodecState, Estimate, GroupInfo, Steps, Sum


@dataclass
class BlockState(CodecState):
    """Where the tensors lie, where this step's blocks begin, and what was taken out of the residual."""

    offsets: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    sizes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    starts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    buffer: Tensor = field(default_factory=lambda: torch.empty(0))
    taken: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))


@dataclass(frozen=True)
class RandomBlock(Codec):
    """One random contiguous block per tensor, the same on every rank (DEF paper, section 2).

    Nothing is exchanged to agree on it: the block follows from (seed, step, tensor name). It is not scaled up by the
    ratio: what is not sent waits in the residual. With plain error feedback a large ratio costs accuracy.

    Bytes: 4 * elements / ratio, all-reduced.  Memory passes: the one that accumulates.
    """

    ratio: float = 64.0
    seed: int = 0

    rides: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.ratio >= 1.0:
            raise ValueError(f"ratio must be at least 1, not {self.ratio!r}")

    def start(self, group: GroupInfo, rank: int, world: int) -> BlockState:
        parameters = [parameter for parameter in group.parameters if parameter.elements]
        sizes = np.array([parameter.elements for parameter in parameters], np.int64)
        lengths = np.maximum(1, np.floor(sizes / self.ratio).astype(np.int64))
        count = int(lengths.sum())
        return BlockState(
            group,
            rank,
            world,
            offsets=np.array([parameter.offset for parameter in parameters], np.int64),
            sizes=sizes,
            lengths=lengths,
            starts=np.zeros(len(parameters), np.int64),
            buffer=torch.zeros(count + group.tail),
            taken=np.zeros(count, np.float32),
        )

    def exchange(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Steps:
        from ..kernels.cpu import blocks, sliced

        assert isinstance(state, BlockState)
        parameters = [parameter for parameter in state.group.parameters if parameter.elements]
        for i, parameter in enumerate(parameters):
            state.starts[i] = draw(self.seed, state.step, parameter.name, parameter.elements)
        flat, places = residual.numpy(), (state.offsets, state.sizes, state.starts, state.lengths)
        finite = sliced.accumulate(flat, gradient.numpy())
        blocks.take_blocks(flat, *places, state.taken)
        buffer = state.buffer.numpy()
        buffer[: state.taken.size] = state.taken
        yield Sum(state.buffer, tail=True, finite=finite)
        sliced.clear(gradient.numpy())
        blocks.add_blocks(gradient.numpy(), *places, buffer[: state.taken.size], 1.0 / state.world)

    def undo(self, residual: Tensor, state: CodecState) -> None:
        from ..kernels.cpu import blocks

        assert isinstance(state, BlockState)
        places = (state.offsets, state.sizes, state.starts, state.lengths)
        blocks.add_blocks(residual.numpy(), *places, state.taken, 1.0)

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        count = sum(
            max(1, int(parameter.elements / self.ratio)) for parameter in group.parameters if parameter.elements
        )
        return Estimate(summed=4 * (count + group.tail), passes=1.2)


def draw(seed: int, step: int, name: str, below: int) -> int:
    """A uniform integer in [0, below), the same in every process: Python's own `hash` of a text is not."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little") % below
