"""Which blocks travel together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .replica import Slot

ENDS = (0.35, 0.6, 0.76, 0.84)
"""Where buckets end, as shares of all that is sent. Few, since each sum costs a core up to a millisecond; the last one is
what the pass over memory hides on a link of 100 Mbit/s, the one before it is gone when backward ends."""
SMALLEST = 4096
"""Elements that are worth a sum of their own."""


@dataclass
class Bucket:
    """Blocks that travel together. `mine` is what this rank handed over, `wire` becomes the mean; one of each a replica.

    places   int64 (blocks, 4): slot, offset in the buffer, length, where it begins in the tensor
    coded    how many of the blocks change from round to round; behind them are tensors that are sent whole
    watched  slots that tell when they have their gradients: the bucket is complete when all of them have
    last     the one that was the last of them
    """

    name: str
    places: NDArray[np.int64]
    coded: int
    watched: list[int] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    last: int = -1
    begun: bool = False
    mine: list[Tensor] = field(default_factory=list)
    wire: list[Tensor] = field(default_factory=list)

    @cached_property
    def slots(self) -> list[int]:
        return [int(slot) for slot in self.places[:, 0]]

    @cached_property
    def elements(self) -> int:
        return int(self.places[:, 2].sum())

    @cached_property
    def coded_elements(self) -> int:
        return int(self.places[: self.coded, 2].sum())

    def room(self, replicas: int) -> None:
        self.mine = [torch.zeros(self.elements) for _ in range(replicas)]
        self.wire = [torch.zeros(self.elements) for _ in range(replicas)]


def cut(slots: Sequence[Slot], whole: Collection[int], ratio: float, *, several: bool) -> list[Bucket]:
    """Buckets in the order in which backward is expected to leave gradients: the last parameters first.

    whole    slots that are sent whole
    several  whether there is to be more than one
    """
    present = [i for i in reversed(range(len(slots))) if slots[i].info.elements]
    lengths = {i: slots[i].info.elements for i in present}
    lengths |= {i: max(1, int(size / ratio)) for i, size in lengths.items() if i not in whole}
    total, sent, inside = sum(lengths.values()), 0, 0
    ends = [end * total for end in ENDS] if several else []
    parts: list[list[int]] = [[]]
    for slot, length in lengths.items():
        if ends and sent >= ends[0] and inside >= SMALLEST:
            ends = [end for end in ends if end > sent]
            parts.append([])
            inside = 0
        parts[-1].append(slot)
        sent, inside = sent + length, inside + length
    return [_bucket(f"blocks {i}", part, whole, lengths) for i, part in enumerate(parts)]


def _bucket(name: str, part: Sequence[int], whole: Collection[int], lengths: dict[int, int]) -> Bucket:
    order = sorted(part, key=lambda slot: slot in whole)
    sizes = [lengths[slot] for slot in order]
    places = np.array([(slot, 0, size, 0) for slot, size in zip(order, sizes, strict=True)], np.int64).reshape(-1, 4)
    places[1:, 1] = np.cumsum(sizes)[:-1]
    return Bucket(name, places, sum(slot not in whole for slot in order))
