"""Packs what arrives (DDP's buckets, single tensors) into groups, and unpacks the means.

Groups are not buckets: DDP's first step has one single bucket, and a resumed job has its layout before the buckets are
final. Where a group is one piece of one bucket, the codec works on the bucket's own memory and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from ..errors import ExchangeError
from .layout import Layout, Slot


@dataclass(slots=True)
class Run:
    """Elements that lie side by side in a group and in a bucket."""

    group: int
    at_group: int
    at_bucket: int
    elements: int


@dataclass(slots=True)
class SmallTensorCopy:
    """Small tensors of a bucket that travel with the riders of a group, or in the dense group of small tensors."""

    group: int
    rides: bool
    source: Tensor
    target: Tensor
    values: Tensor


@dataclass(slots=True)
class BucketPlan:
    """What becomes of a bucket with a certain list of tensors."""

    elements: int
    runs: list[Run]
    copies: list[SmallTensorCopy]
    slots: dict[int, int]
    """How many slots of each group the bucket brings."""


@dataclass(slots=True, eq=False)
class Bucket:
    """One bucket of the current step."""

    buffer: Tensor
    plan: BucketPlan
    open: set[int] = field(default_factory=set)


class Packer:
    """The groups of one rank, filled by buckets in any order and cut."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.riders = [torch.zeros(group.info().tail - 1) for group in layout.groups]
        self._direct = [group.direct for group in layout.groups]
        self._home: dict[str, tuple[int, Slot]] = {}
        self._dense: dict[str, tuple[int, Slot]] = {}
        for index, group in enumerate(layout.groups):
            for slot in group.slots:
                # A hole has two places: in its run, where it is zero, and in the dense group.
                taken = slot.name in self._home and self._home[slot.name][1].role == "elsewhere"
                (self._dense if taken else self._home)[slot.name] = (index, slot)
        self._small = {index for index, _ in self._dense.values()}
        riding = [[slot for slot in group.slots if slot.role == "ride"] for group in layout.groups]
        self._ride_offset = [
            dict(
                zip(
                    (slot.name for slot in slots),
                    accumulate((slot.elements for slot in slots), initial=0),
                    strict=False,
                )
            )
            for slots in riding
        ]
        self._slots = [len(group.slots) for group in layout.groups]
        self._plans: dict[tuple[str, ...], BucketPlan] = {}
        self._scratch: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        self._missing = list(self._slots)
        self._open: list[Bucket] = []
        self.unused: dict[int, list[str]] = {}

    def arrive(self, names: tuple[str, ...], buffer: Tensor, unused: Sequence[str] = ()) -> tuple[Bucket, list[int]]:
        """A bucket with these tensors is there; returns it, and the groups that are now complete."""
        plan = self._plans.get(names)
        if plan is None:
            plan = self._plans[names] = self._plan(names, buffer)
        if plan.elements != buffer.numel():
            raise ExchangeError(f"a bucket has {buffer.numel()} elements where its tensors have {plan.elements}")
        bucket = Bucket(buffer, plan, set(plan.slots))
        self._open.append(bucket)
        for copy in plan.copies:
            torch.index_select(buffer, 0, copy.source, out=copy.values)
            self._target(copy).index_copy_(0, copy.target, copy.values.to(self._target(copy).dtype))
            buffer.index_fill_(0, copy.source, 0)
        for run in plan.runs:
            piece = buffer[run.at_bucket : run.at_bucket + run.elements]
            if self._whole(run, buffer):
                self._gradients[run.group] = piece
            else:
                gradient = self._gradients[run.group] = self._buffer_of(run.group)
                gradient[run.at_group : run.at_group + run.elements].copy_(piece)
        for name in unused:
            index, _ = self._home[name]
            self.unused.setdefault(index, []).append(name)
        complete = []
        for index, slots in plan.slots.items():
            self._missing[index] -= slots
            if self._missing[index] == 0:
                complete.append(index)
        return bucket, complete

    def gradient(self, index: int) -> Tensor:
        return self._gradients[index] if index in self._gradients else self._buffer_of(index)

    def finish(self, index: int) -> list[Bucket]:
        """The exchange of a group is done; returns the buckets that now hold all their results."""
        self._missing[index] = self._slots[index]
        self.unused.pop(index, None)
        finished = []
        for bucket in self._open:
            bucket.open.discard(index)
            if not bucket.open:
                self._hand_back(bucket)
                finished.append(bucket)
        self._open = [bucket for bucket in self._open if bucket.open]
        return finished

    def _hand_back(self, bucket: Bucket) -> None:
        for run in bucket.plan.runs:
            if not self._whole(run, bucket.buffer):
                piece = bucket.buffer[run.at_bucket : run.at_bucket + run.elements]
                piece.copy_(self._buffer_of(run.group)[run.at_group : run.at_group + run.elements])
        # After the runs: a codec leaves zeros in the holes of its group.
        for copy in bucket.plan.copies:
            values = torch.index_select(self._target(copy), 0, copy.target)
            bucket.buffer.index_copy_(0, copy.source, values.to(bucket.buffer.dtype))

    def _whole(self, run: Run, buffer: Tensor) -> bool:
        native = buffer.dtype == torch.float32 or self._direct[run.group]
        return native and run.elements == self.layout.groups[run.group].elements

    def _target(self, copy: SmallTensorCopy) -> Tensor:
        return self.riders[copy.group] if copy.rides else self._buffer_of(copy.group)

    def _buffer_of(self, index: int) -> Tensor:
        scratch = self._scratch.get(index)
        if scratch is None:
            group = self.layout.groups[index]
            dtype = getattr(torch, group.dtype) if self._direct[index] else torch.float32
            scratch = self._scratch[index] = torch.zeros(group.elements, dtype=dtype)
        return scratch

    def _plan(self, names: tuple[str, ...], buffer: Tensor) -> BucketPlan:
        plan = BucketPlan(0, [], [], {})
        copies: dict[tuple[int, bool], tuple[list[Tensor], list[Tensor]]] = {}

        def copy(index: int, rides: bool, elements: int, at_target: int) -> None:
            sources, targets = copies.setdefault((index, rides), ([], []))
            sources.append(torch.arange(plan.elements, plan.elements + elements))
            targets.append(torch.arange(at_target, at_target + elements))

        for name in names:
            if name not in self._home:
                raise ExchangeError(f"the tensor {name!r} is not in the layout")
            index, slot = self._home[name]
            plan.slots[index] = plan.slots.get(index, 0) + 1
            if index in self._small:
                copy(index, False, slot.elements, slot.offset)
            else:
                # Not an empty run: it would look like a second piece of a group that is whole already.
                if slot.elements:
                    _extend(plan, Run(index, slot.offset, plan.elements, slot.elements))
                if slot.role == "ride":
                    copy(index, True, slot.elements, self._ride_offset[index][name])
                elif slot.role == "elsewhere":
                    dense, there = self._dense[name]
                    plan.slots[dense] = plan.slots.get(dense, 0) + 1
                    copy(dense, False, slot.elements, there.offset)
            plan.elements += slot.elements
        for (index, rides), (sources, targets) in copies.items():
            source, target = torch.cat(sources), torch.cat(targets)
            plan.copies.append(
                SmallTensorCopy(index, rides, source, target, torch.empty(source.numel(), dtype=buffer.dtype))
            )
        return plan


def _extend(plan: BucketPlan, run: Run) -> None:
    """Add a run, to the last one if it goes on where that ends."""
    last = plan.runs[-1] if plan.runs else None
    if last and (last.group, last.at_group + last.elements, last.at_bucket + last.elements) == (
        run.group,
        run.at_group,
        run.at_bucket,
    ):
        last.elements += run.elements
    else:
        plan.runs.append(run)
