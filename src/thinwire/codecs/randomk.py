"""Random elements, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import draws
from .base import Codec, CodecState, Estimate, GroupInfo, Steps, Sum


@dataclass
class RandomKState(CodecState):
    """The places of this step, what was taken there, and the buffer that is summed."""

    indices: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    taken: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    buffer: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True)
class RandomK(Codec):
    """`density` of the elements, drawn anew in each step, the same on every rank (Random-k with a shared seed).

    Nothing is exchanged to agree on them: the set follows from (seed, step, group name). Values are not scaled up by
    1 / density: what is not sent waits in the residual.

    Bytes: 4 * density * elements, all-reduced, no indices.  Memory passes: the one that accumulates, one write pass for
    the result, the cache lines of what is taken, and a few sorts of density * elements numbers.
    Source: Stich et al. 2018, "Sparsified SGD with memory".
    """

    density: float = 0.01
    seed: int = 0

    rides: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (isinstance(self.density, int | float) and 0.0 < self.density <= 1.0):
            raise ValueError(f"density must be a number above 0 and at most 1, not {self.density!r}")

    def start(self, group: GroupInfo, rank: int, world: int) -> RandomKState:
        count = self._target(group)
        taken, buffer = np.zeros(count, np.float32), torch.zeros(count + group.tail)
        return RandomKState(group, rank, world, taken=taken, buffer=buffer)

    def exchange(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Steps:
        from ..kernels.cpu import basic, sliced

        assert isinstance(state, RandomKState)
        flat, count = residual.numpy(), state.taken.size
        finite = sliced.accumulate(flat, gradient.numpy())
        state.indices = self._draw(state.group, state.step)
        if finite:
            basic.take(flat, state.indices, state.taken)
        else:
            state.taken[:] = 0.0
        # Divided before the sum: a mean of finite values is finite, their sum need not be.
        np.multiply(state.taken, np.float32(1.0 / state.world), out=state.buffer.numpy()[:count])
        yield Sum(state.buffer, tail=True, finite=finite)
        basic.write_at(gradient.numpy(), state.indices, state.buffer.numpy()[:count], 1.0)

    def undo(self, residual: Tensor, state: CodecState) -> None:
        from ..kernels.cpu import basic

        assert isinstance(state, RandomKState)
        basic.put_back(residual.numpy(), state.indices, state.taken)

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        return Estimate(summed=4 * (self._target(group) + group.tail), passes=2.6)

    def _target(self, group: GroupInfo) -> int:
        elements = sum(parameter.elements for parameter in group.parameters)
        return min(elements, max(1, round(self.density * elements))) if elements else 0

    def _draw(self, group: GroupInfo, step: int) -> NDArray[np.int32]:
        """This step's places, ascending, all of them inside the parameters."""
        elements = sum(parameter.elements for parameter in group.parameters)
        places = draws.subset(draws.generator(self.seed, step, group.name), elements, self._target(group))
        if elements == group.elements:
            return places
        before = np.cumsum([0, *(parameter.elements for parameter in group.parameters)])
        borders = np.searchsorted(places, before)
        for i, parameter in enumerate(group.parameters):
            places[borders[i] : borders[i + 1]] += parameter.offset - before[i]
        return places
