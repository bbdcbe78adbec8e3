"""Random-k: random elements, the same on every rank."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels, ranges
from . import draws
from .base import Codec, CodecState, Estimate, GroupInfo, Steps, Sum


@dataclass
class RandomKState(CodecState):
    """This step's indices, the values taken there, and the buffer that is all-reduced."""

    indices: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    taken: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    buffer: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True)
class RandomK(Codec):
    """`density` of the elements, redrawn every step, the same on every rank (Random-k with a shared seed).

    No communication is needed to agree on them: the set follows from (seed, step, group name). Values are not scaled up by
    1 / density: what is not sent stays in the residual.

    Bytes: 4 * density * elements, all-reduced, no indices.  Memory passes: the one that accumulates, one write pass for
    the result, the cache lines of the elements taken, and a few sorts of density * elements numbers.
    Source: Stich et al. 2018, "Sparsified SGD with memory".
    """

    density: float = 0.01
    seed: int = 0

    rides: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (isinstance(self.density, int | float) and 0.0 < self.density <= 1.0):
            raise ValueError(f"density must be a number above 0 and at most 1, not {self.density!r}")
        ranges.whole("seed", self.seed, -ranges.SEEDS, ranges.SEEDS)

    def start(self, group: GroupInfo, rank: int, world: int) -> RandomKState:
        count = self._target(group)
        taken, buffer = np.zeros(count, np.float32), torch.zeros(count + group.tail)
        return RandomKState(group, rank, world, taken=taken, buffer=buffer)

    def exchange(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Steps:
        assert isinstance(state, RandomKState)
        flat, count = residual.numpy(), state.taken.size
        finite = kernels.sliced.accumulate(flat, gradient.numpy())
        state.indices = self._draw(state.group, state.step)
        if finite:
            kernels.basic.take(flat, state.indices, state.taken)
        else:
            state.taken[:] = 0.0
        # Divided before the sum: a mean of finite values is finite, their sum need not be.
        np.multiply(state.taken, np.float32(1.0 / state.world), out=state.buffer.numpy()[:count])
        yield Sum(state.buffer, tail=True, finite=finite)
        kernels.basic.write_at(gradient.numpy(), state.indices, state.buffer.numpy()[:count], 1.0)

    def undo(self, residual: Tensor, state: CodecState) -> None:
        assert isinstance(state, RandomKState)
        kernels.basic.put_back(residual.numpy(), state.indices, state.taken)

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        return Estimate(summed=4 * (self._target(group) + group.tail), passes=2.6)

    def _target(self, group: GroupInfo) -> int:
        elements = sum(parameter.elements for parameter in group.parameters)
        return min(elements, max(1, round(self.density * elements))) if elements else 0

    def _draw(self, group: GroupInfo, step: int) -> NDArray[np.int32]:
        """This step's indices, ascending, all of them inside parameters."""
        elements = sum(parameter.elements for parameter in group.parameters)
        places = draws.subset(draws.generator(self.seed, step, group.name), elements, self._target(group))
        if elements == group.elements:
            return places
        before = np.cumsum([0, *(parameter.elements for parameter in group.parameters)])
        borders = np.searchsorted(places, before)
        for i, parameter in enumerate(group.parameters):
            places[borders[i] : borders[i + 1]] += parameter.offset - before[i]
        return places
