"""Sampled check that applied + residual equals input, independent of a codec's own bookkeeping.

Over some steps the mean of what was applied must be the mean over ranks of gradients, plus the residuals before, less the
residuals after. A codec that scales, loses or repeats fails that check; one whose residuals grow and grow passes it, and
is found by the growth of its residuals.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLE = 4096
"""Elements that are looked at, of all parameters together."""

WRONG, GROWTH, IN_A_ROW = 0.5, 8.0, 2
"""A relative difference, a factor by which residuals grow from window to window, and how often either is too much."""


@dataclass(frozen=True)
class Verdict:
    """What is wrong, for people."""

    reason: str


Names = tuple[str, ...]


class Watchdog:
    """Looks at the buckets of one rank; `sizes` are the elements of all parameters, by name."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = dict(sizes)
        self._stride = max(1, -(-sum(sizes.values()) // SAMPLE))
        self.forget()

    def forget(self) -> None:
        """Another codec: nothing that was seen before counts."""
        self._came: dict[Names, Tensor] = {}
        self._went: dict[Names, Tensor] = {}
        self._before: dict[Names, Tensor] = {}
        self._wrong = self._grown = 0
        self._residual = 0.0

    def begin(self, unsent: Mapping[str, Tensor]) -> None:
        """A window begins; `unsent` is what this rank has not sent yet, by name."""
        self._before = {names: self._sampled(names, unsent) for names in self._came}
        self._came, self._went = {}, {}

    def came(self, names: Names, buffer: Tensor, scale: float = 1.0) -> None:
        """A bucket holds the gradients of this rank, `scale` times too large."""
        self._add(self._came, names, buffer, scale)

    def went(self, names: Names, buffer: Tensor, scale: float = 1.0) -> None:
        """A bucket holds what will be applied."""
        self._add(self._went, names, buffer, scale)

    def _add(self, sums: dict[Names, Tensor], names: Names, buffer: Tensor, scale: float) -> None:
        part = buffer[:: self._stride].float()
        part = part / scale if scale != 1.0 else part
        sums[names] = sums[names] + part if names in sums else part.clone()

    def _sampled(self, names: Names, unsent: Mapping[str, Tensor]) -> Tensor:
        """The same elements of what is unsent as of a bucket with these tensors."""
        parts, start = [], 0
        for name in names:
            first = -start % self._stride
            if name in unsent:
                parts.append(unsent[name].reshape(-1)[first :: self._stride])
            else:
                parts.append(torch.zeros(len(range(first, self._sizes[name], self._stride))))
            start += self._sizes[name]
        return torch.cat(parts)

    def due(self, unsent: Mapping[str, Tensor]) -> Tensor | None:
        """This rank's part of what should have been applied in the window: its mean over ranks is to be shown to `judge`.

        Nothing in the first window, in which it is not known what was unsent before.
        """
        if not self._came or self._came.keys() != self._before.keys() or self._went.keys() != self._came.keys():
            return None
        squared, parts = 0.0, []
        for names, total in self._came.items():
            after = self._sampled(names, unsent)
            squared += float(after.square().sum())
            parts.append(total + self._before[names] - after)
        return torch.cat([torch.tensor([squared]), *parts])

    def applied(self) -> Tensor:
        return torch.cat([self._went[names] for names in self._came])

    def judge(self, due: Tensor, applied: Tensor) -> Verdict | None:
        """`due` is the mean over ranks. The same on all ranks, since both are."""
        residual, due = math.sqrt(max(0.0, float(due[0]))), due[1:]
        size, off = float(due.norm()), float((applied - due).norm())
        if not (math.isfinite(size) and math.isfinite(off) and math.isfinite(residual)):
            return Verdict("what should be applied is not finite")
        self._wrong = self._wrong + 1 if size > 0.0 and off > WRONG * size else 0
        grown = self._residual > 0.0 and residual > GROWTH * self._residual
        self._grown = self._grown + 1 if grown else 0
        self._residual = residual
        if self._wrong >= IN_A_ROW:
            ratio = float(applied.norm()) / size
            return Verdict(
                f"what is applied has {ratio:.2f} times the norm of what came in, and is {off / size:.2f} of it away"
            )
        if self._grown >= IN_A_ROW:
            return Verdict(f"residuals grow more than {GROWTH:g} times from window to window, now to {residual:.3g}")
        return None
