"""State of a rank between two operations of a chain: which elements, in how many messages from how many ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..codecs import GroupInfo, ParameterInfo
from ..comm.collectives import Place
from .tree import Op


@dataclass(frozen=True, slots=True)
class Range:
    """Elements [start, stop) of a group, in a tensor of `size` elements: those past `stop` are padding."""

    start: int
    stop: int
    size: int

    @property
    def elements(self) -> int:
        return self.stop - self.start

    def part(self, index: int, count: int) -> Range:
        """One of `count` parts of equal size. The last ones may hold fewer elements, or none."""
        size = -(-self.size // count)
        start = self.start + index * size
        return Range(start, max(start, min(start + size, self.stop)), size)

    def parts(self, counts: tuple[int, ...]) -> list[Range]:
        """Cut into counts[0] parts, each of them into counts[1], and so on."""
        if not counts:
            return [self]
        return [piece for i in range(counts[0]) for piece in self.part(i, counts[0]).parts(counts[1:])]

    def info(self, group: GroupInfo) -> GroupInfo:
        """The part of a group in this range. A parameter that is cut becomes a flat run of elements, same name and kind."""
        found = []
        for p in group.parameters:
            start, stop = max(p.offset, self.start), min(p.offset + p.elements, self.stop)
            if start < stop:
                shape = p.shape if stop - start == p.elements else (stop - start,)
                found.append(ParameterInfo(p.name, start - self.start, stop - start, shape, p.kind))
        return GroupInfo(group.name, self.elements, tuple(found))


@dataclass(frozen=True, slots=True)
class Partition:
    """The state of one rank.

    range    elements of its tensor or its messages
    splits   how `range` is cut into messages, outermost first; empty for a tensor and for one message
    sources  messages of each piece, not added up yet; 0 for a tensor
    holder   False on ranks that hold nothing, where only the first rank of a scope does
    nodes    False once all nodes hold the same
    outer    (range, holder) before each first step that is still open
    """

    range: Range
    splits: tuple[int, ...] = ()
    sources: int = 0
    holder: bool = True
    nodes: bool = True
    outer: tuple[tuple[Range, bool], ...] = ()

    @property
    def pieces(self) -> list[Range]:
        return self.range.parts(self.splits)

    def after(self, op: Op, place: Place) -> Partition:
        """The state after a collective."""
        assert op.scope is not None
        count, index = place.count(op.scope), place.index(op.scope)
        if op.first:
            outer = (*self.outer, (self.range, self.holder))
            sources = self.sources * count
            if op.divides:
                return dataclasses.replace(
                    self, range=self.range.part(index, count), splits=self.splits[1:], sources=sources, outer=outer
                )
            return dataclasses.replace(self, sources=sources, holder=self.holder and index == 0, outer=outer)
        nodes = self.nodes and op.scope == "intra"
        # A second step ends the first one that is open, inside of which nothing else is.
        ends = len(self.outer) == (2 if op.scope == "inter" else 1)
        if op.routine == "AR" or not ends:
            return dataclasses.replace(self, sources=self.sources * count, nodes=nodes)
        before, holder = self.outer[-1]
        splits = (count, *self.splits) if op.routine == "AG" and op.compressed else self.splits
        return dataclasses.replace(
            self, range=before, splits=splits, holder=holder, nodes=nodes, outer=self.outer[:-1]
        )
