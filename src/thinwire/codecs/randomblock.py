"""Random blocks: one random contiguous block per tensor, the same on every rank."""

import hashlib
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels, ranges
from .base import Codec, CodecState, Estimate, GroupInfo, Steps, Sum


@dataclass
class BlockState(CodecState):
    """Offsets and sizes of the tensors, this step's blocks, and the values taken out of the residual."""

    offsets: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    sizes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    starts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    buffer: Tensor = field(default_factory=lambda: torch.empty(0))
    taken: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))


@dataclass(frozen=True)
class RandomBlock(Codec):
    """One random contiguous block per tensor, the same on every rank.

    No communication is needed to agree on it: the block follows from (seed, step, tensor name). Values are not scaled up by
    the ratio: what is not sent stays in the residual. With plain error feedback a large ratio costs accuracy.

    Bytes: 4 * elements / ratio, all-reduced.  Memory passes: the one that accumulates.
    Source: the baseline of detached error feedback, see `docs/methods/def.md`.
    """

    ratio: float = 64.0
    seed: int = 0

    rides: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.number("ratio", self.ratio, 1.0)
        ranges.whole("seed", self.seed, -ranges.SEEDS, ranges.SEEDS)

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
        assert isinstance(state, BlockState)
        parameters = [parameter for parameter in state.group.parameters if parameter.elements]
        for i, parameter in enumerate(parameters):
            state.starts[i] = draw(self.seed, state.step, parameter.name, parameter.elements)
        flat, places = residual.numpy(), (state.offsets, state.sizes, state.starts, state.lengths)
        finite = kernels.sliced.accumulate(flat, gradient.numpy())
        kernels.blocks.take_blocks(flat, *places, state.taken)
        buffer = state.buffer.numpy()
        buffer[: state.taken.size] = state.taken
        yield Sum(state.buffer, tail=True, finite=finite)
        kernels.sliced.clear(gradient.numpy())
        kernels.blocks.add_blocks(gradient.numpy(), *places, buffer[: state.taken.size], 1.0 / state.world)

    def undo(self, residual: Tensor, state: CodecState) -> None:
        assert isinstance(state, BlockState)
        places = (state.offsets, state.sizes, state.starts, state.lengths)
        kernels.blocks.add_blocks(residual.numpy(), *places, state.taken, 1.0)

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        count = sum(
            max(1, int(parameter.elements / self.ratio)) for parameter in group.parameters if parameter.elements
        )
        return Estimate(summed=4 * (count + group.tail), passes=1.2)


def draw(seed: int, step: int, name: str, below: int) -> int:
    """A uniform integer in [0, below), the same in every process, unlike Python's `hash` of a string."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little") % below
