"""Which blocks travel together, and in which order."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .replica import ParameterSlot

ENDS = (0.35, 0.6, 0.76, 0.84)
"""Where buckets end, as shares of all that is sent. Few, since each all-reduce costs a core up to a millisecond; the last one
is what the pass over memory hides on a link of 100 Mbit/s, the one before it has been sent when backward ends."""
SMALLEST = 4096
"""Elements that are worth a separate all-reduce."""


@dataclass
class Bucket:
    """Blocks that travel together.

    places   int64 (blocks, 4): slot, offset in the buffer, length, start in the tensor
    coded    how many of the blocks are drawn in each round; the rest are tensors that are sent whole
    sent     what each replica sent
    means    the buffers of the all-reduce, which become the means; one for each replica
    watched  slots whose gradients are waited for: the bucket is complete when all of them have arrived
    missing  those that have not yet
    last     the slot whose gradient arrived last
    begun    whether its all-reduce has been issued
    """

    name: str
    places: NDArray[np.int64]
    coded: int
    sent: list[Tensor]
    means: list[Tensor]
    watched: list[int] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    last: int = -1
    begun: bool = False

    @cached_property
    def slots(self) -> list[int]:
        return [int(slot) for slot in self.places[:, 0]]

    @cached_property
    def coded_elements(self) -> int:
        return int(self.places[: self.coded, 2].sum())


def cut(
    slots: Sequence[ParameterSlot], whole: Collection[int], ratio: float, *, several: bool, replicas: int
) -> list[Bucket]:
    """Buckets in the order in which backward is expected to compute gradients: the last parameters first.

    whole     slots that are sent whole
    several   whether there is to be more than one
    replicas  for how many they have buffers
    """
    present = [i for i in reversed(range(len(slots))) if slots[i].info.elements]
    lengths = {i: slots[i].info.elements for i in present}
    lengths |= {i: max(1, int(size / ratio)) for i, size in lengths.items() if i not in whole}
    total, before, inside = sum(lengths.values()), 0, 0
    ends = [end * total for end in ENDS] if several else []
    parts: list[list[int]] = [[]]
    for slot, length in lengths.items():
        if ends and before >= ends[0] and inside >= SMALLEST:
            ends = [end for end in ends if end > before]
            parts.append([])
            inside = 0
        parts[-1].append(slot)
        before, inside = before + length, inside + length
    return [_bucket(f"blocks {i}", part, whole, lengths, replicas) for i, part in enumerate(parts)]


def _bucket(name: str, part: Sequence[int], whole: Collection[int], lengths: dict[int, int], replicas: int) -> Bucket:
    order = sorted(part, key=lambda slot: slot in whole)
    sizes = [lengths[slot] for slot in order]
    places = np.array([(slot, 0, size, 0) for slot, size in zip(order, sizes, strict=True)], np.int64).reshape(-1, 4)
    places[1:, 1] = np.cumsum(sizes)[:-1]
    sent, means = ([torch.zeros(sum(sizes)) for _ in range(replicas)] for _ in range(2))
    return Bucket(name, places, sum(slot not in whole for slot in order), sent, means)
