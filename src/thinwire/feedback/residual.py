"""Residual store: what was not sent yet, one flat float32 tensor per group, or per Comp of its chain; by name as well."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..codecs import GroupInfo, ParameterInfo

TILE = 1 << 16
"""Elements whose squares are added in float32; the sums over tiles are added in float64."""


@dataclass
class Held:
    """One residual: elements [start, stop) of its group. `before` is a copy from the start of the step, where one is kept."""

    start: int
    stop: int
    weight: float
    flat: Tensor
    before: Tensor | None = None

    def of(self, parameter: ParameterInfo) -> tuple[slice, Tensor]:
        """Which elements of a parameter lie here, and their residual."""
        start, stop = max(parameter.offset, self.start), min(parameter.offset + parameter.elements, self.stop)
        stop = max(start, stop)
        inside = slice(start - parameter.offset, stop - parameter.offset)
        return inside, self.flat[max(0, start - self.start) : max(0, start - self.start) + stop - start]


class ResidualStore:
    """Residuals of all groups of one rank, in gradient units, unscaled. A codec without feedback has none.

    `protected=True` keeps a second copy from the start of each step, so that a void step leaves them as they were, bit for
    bit; otherwise a void step leaves its finite gradients in them. Where a chain has several, all but the first
    are always protected.
    """

    def __init__(
        self, groups: Sequence[GroupInfo], parts: Sequence[Sequence[tuple[int, int, float]]], *, protected: bool
    ) -> None:
        self.groups = list(groups)
        self.protected = protected
        self.held = [
            [Held(start, stop, weight, torch.zeros(stop - start)) for start, stop, weight in each] for each in parts
        ]
        for index in range(len(self.held)):
            self.protect(index, everything=False)

    def protect(self, index: int, *, everything: bool) -> None:
        """Keep a copy of all residuals of a group from its next exchange on; or only of those that always have one."""
        for position, held in enumerate(self.held[index]):
            needed = everything or self.protected or position > 0
            held.before = (held.before if held.before is not None else held.flat.clone()) if needed else None

    @property
    def flat(self) -> list[Tensor]:
        """The tensors of all groups; for a group without feedback an empty one."""
        return [held.flat for each in self.held for held in each or [Held(0, 0, 0.0, torch.empty(0))]]

    def of(self, index: int) -> list[Tensor]:
        return [held.flat for held in self.held[index]]

    def roll_back(self, index: int) -> None:
        """The step is void: restore the residual if a copy is kept. Otherwise the codec has put back what it sent."""
        for held in self.held[index]:
            if held.before is not None:
                held.flat.copy_(held.before)

    def pieces(self) -> Iterator[tuple[int, ParameterInfo, slice, Tensor]]:
        """For each Comp and parameter: the number of the Comp, the parameter, which of its elements are here, and where."""
        for group, each in zip(self.groups, self.held, strict=True):
            for number, held in enumerate(each):
                for parameter in group.parameters:
                    yield number, parameter, *held.of(parameter)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """What is unsent of each parameter on this rank, shaped like the parameter; the sum over ranks is what is not sent yet.

        Without a chain it is a view of the residual.
        """
        for group, each in zip(self.groups, self.held, strict=True):
            for parameter in group.parameters if each else ():
                if len(each) == 1 and each[0].stop - each[0].start == group.elements and each[0].weight == 1.0:
                    yield parameter.name, each[0].of(parameter)[1].view(parameter.shape)
                    continue
                total = torch.zeros(parameter.elements)
                for held in each:
                    inside, flat = held.of(parameter)
                    total[inside].add_(flat, alpha=held.weight)
                yield parameter.name, total.view(parameter.shape)

    def norm(self) -> float:
        """Of all of them together; one pass over memory, without copies."""
        return math.hypot(
            *(_norm(tile) for each in self.held for held in each for tile in torch.split(held.flat, TILE))
        )

    @property
    def bytes(self) -> int:
        return sum((4 if held.before is None else 8) * held.flat.numel() for each in self.held for held in each)


def _norm(tile: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(tile))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(tile, dtype=torch.float64))
