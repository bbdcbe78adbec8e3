"""Which blocks travel together, and which of them while backward still runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .replica import Slot

EARLY = (0.4, 0.3, 0.2)
"""Shares of all blocks that are sent during backward. Few, since each sum costs a core up to a millisecond; the last ones
small, since backward hides nothing of what is sent at its end."""
SMALLEST = 4096


@dataclass
class Place:
    """Where the block of a slot lies in the buffer of its bucket; `start` is where it begins in the tensor."""

    slot: int
    offset: int
    length: int
    coded: bool
    start: int = 0


@dataclass
class Bucket:
    """Blocks that travel together. `mine` is what this rank handed over, `wire` becomes the mean; one of each a replica.

    The last bucket ends in tensors that are sent whole.
    """

    name: str
    places: list[Place] = field(default_factory=list)
    elements: int = 0
    coded: int = 0
    mine: list[Tensor] = field(default_factory=list)
    wire: list[Tensor] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    begun: bool = False

    def add(self, slot: int, length: int, coded: bool) -> None:
        self.places.append(Place(slot, self.elements, length, coded))
        self.elements += length
        self.coded += length if coded else 0

    def room(self, replicas: int) -> None:
        self.mine = [torch.zeros(self.elements) for _ in range(replicas)]
        self.wire = [torch.zeros(self.elements) for _ in range(replicas)]


def cut(slots: Sequence[Slot], dense: Collection[int], ratio: float, *, overlap: bool) -> list[Bucket]:
    """Buckets in the order in which backward is expected to leave gradients: the last parameters first.

    dense    slots that are sent whole, in the last bucket
    overlap  whether some are to be sent early; otherwise there is one bucket
    """
    order = [i for i in reversed(range(len(slots))) if slots[i].info.elements]
    lengths = {i: max(1, int(slots[i].info.elements / ratio)) for i in order if i not in dense}
    total = sum(lengths.values())
    limits = [share * total for share in EARLY if overlap and share * total >= SMALLEST]
    buckets = [Bucket("blocks 0")]
    for slot, length in lengths.items():
        if len(buckets) <= len(limits) and buckets[-1].elements >= limits[len(buckets) - 1]:
            buckets.append(Bucket(f"blocks {len(buckets)}"))
        buckets[-1].add(slot, length, True)
    if limits and len(buckets) <= len(limits):
        buckets.append(Bucket(f"blocks {len(buckets)}"))
    for slot in order:
        if slot in dense:
            buckets[-1].add(slot, slots[slot].info.elements, False)
    return buckets
