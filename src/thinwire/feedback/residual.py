"""What was not sent yet: one flat float32 tensor a group, seen by parameter name as well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..codecs import Codec, GroupInfo


class ResidualStore:
    """Residuals of all groups of one rank, in gradient units, unscaled. A codec without feedback has an empty one.

    `protected=True` keeps a second copy from the start of each step, so that a void step leaves them as they were, bit for
    bit; otherwise a void step leaves its finite gradients in them.
    """

    def __init__(self, groups: Sequence[GroupInfo], codecs: Sequence[Codec], *, protected: bool) -> None:
        self.groups = list(groups)
        self.flat = [
            torch.zeros(group.elements if codec.keeps_residual else 0)
            for group, codec in zip(groups, codecs, strict=True)
        ]
        self._before = [torch.empty_like(flat) for flat in self.flat] if protected else None

    def begin(self, index: int) -> None:
        """A group's exchange begins: remember its residual if that is promised."""
        if self._before is not None:
            self._before[index].copy_(self.flat[index])

    def roll_back(self, index: int) -> None:
        """The step is void: restore the residual if a copy is kept. Otherwise the codec has put back what it sent."""
        if self._before is not None:
            self.flat[index].copy_(self._before[index])

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """A view of each parameter's residual, shaped like the parameter."""
        for group, flat in zip(self.groups, self.flat, strict=True):
            if flat.numel():
                for parameter in group.parameters:
                    stop = parameter.offset + parameter.elements
                    yield parameter.name, flat[parameter.offset : stop].view(parameter.shape)

    def norm(self) -> float:
        return (
            float(torch.stack([flat.double().square().sum() for flat in self.flat]).sum().sqrt()) if self.flat else 0.0
        )

    @property
    def bytes(self) -> int:
        copies = 1 if self._before is None else 2
        return copies * sum(4 * flat.numel() for flat in self.flat)
