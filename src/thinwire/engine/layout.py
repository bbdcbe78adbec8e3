"""Layout of an exchange: groups of tensors in the order in which they are sent, and the codec of each group.

A group is a run of tensors that lie next to each other where they come from (a DDP bucket), so that nothing need be
copied. Small and excluded tensors inside that run are *holes*: they are lifted out before the codec sees the group and
travel dense, in the tail of the group's own sum (`ride`) or in one dense group of all small tensors (`elsewhere`).
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from torch import nn

from ..chains import tree
from ..chains.chain import places
from ..chains.tree import Leaf
from ..codecs import Codec, GroupInfo, ParameterInfo, parse
from ..codecs.names import to_text
from ..comm.collectives import Place, Scope
from ..ranges import Count

Role = Literal["coded", "ride", "elsewhere"]
Exclude = str | Sequence[str] | Callable[[str], bool]

SMALL_GROUP = "small tensors"


class Slot(msgspec.Struct, frozen=True):
    """One tensor inside a group: elements [offset, offset + elements)."""

    name: str
    offset: Count
    elements: Count
    shape: tuple[Count, ...]
    kind: str
    role: Role = "coded"


class Group(msgspec.Struct, frozen=True):
    """The unit of exchange. `chain` is a leaf of the tree; empty: the codec's own collectives, over all ranks."""

    name: str
    codec: str
    dtype: str
    elements: Count
    slots: tuple[Slot, ...]
    chain: str = ""

    def leaf(self) -> Leaf | None:
        return tree.parse(self.chain) if self.chain else None

    @property
    def direct(self) -> bool:
        """Whether the exchange is nothing but the all-reduce of the gradient, in its own dtype."""
        return not self.chain and parse(self.codec).direct

    def info(self) -> GroupInfo:
        coded = tuple(
            ParameterInfo(slot.name, slot.offset, slot.elements, slot.shape, slot.kind)
            for slot in self.slots
            if slot.role == "coded"
        )
        riders = sum(slot.elements for slot in self.slots if slot.role == "ride")
        return GroupInfo(self.name, self.elements, coded, tail=riders + 1)


class Layout(msgspec.Struct, frozen=True):
    """All groups, in the order in which their collectives are issued on every rank."""

    groups: tuple[Group, ...]

    def codecs(self) -> list[Codec]:
        return [parse(group.codec) for group in self.groups]

    def buckets(self) -> list[list[TensorInfo]]:
        """Its tensors, by run: from them another layout of the same tensors can be built."""
        seen: set[str] = set()
        found = []
        for group in self.groups:
            run = [slot for slot in group.slots if slot.name not in seen]
            seen.update(slot.name for slot in run)
            if run:
                found.append([TensorInfo(slot.name, slot.shape, group.dtype, slot.kind) for slot in run])
        return found

    def places(self, place: Place) -> set[tuple[int, Scope]]:
        """Rounds and scopes in which its groups speak."""
        found: set[tuple[int, Scope]] = {(0, "flat")}
        for group, codec in zip(self.groups, self.codecs(), strict=True):
            found.update(places(group.leaf(), codec, place))
        return found


class TensorInfo(msgspec.Struct, frozen=True):
    """A tensor to be exchanged, as a frontend describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str

    @property
    def elements(self) -> int:
        return int(torch.Size(self.shape).numel())


def describe(name: str, tensor: torch.Tensor, kind: str | None = None) -> TensorInfo:
    return TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), kind or kind_of(tensor))


def kind_of(tensor: torch.Tensor) -> str:
    """The layer kind of a tensor of which only the shape is known."""
    return "conv" if tensor.dim() >= 3 else "dense" if tensor.dim() == 2 else "vector"


def kinds_of(module: nn.Module) -> dict[str, str]:
    """Layer kind of each parameter: conv, dense, recurrent, embedding, vector (biases, norms)."""
    kinds: dict[str, str] = {}
    for prefix, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False):
            if parameter.dim() <= 1:
                kind = "vector"
            elif isinstance(child, nn.RNNBase | nn.RNNCellBase):
                kind = "recurrent"
            elif isinstance(child, nn.Embedding | nn.EmbeddingBag):
                kind = "embedding"
            else:
                kind = kind_of(parameter)
            kinds.setdefault(f"{prefix}.{name}" if prefix else name, kind)
    return kinds


def excludes(exclude: Exclude, name: str) -> bool:
    """Whether the user keeps this tensor dense: shell patterns on its name, or a function of it."""
    if callable(exclude):
        return bool(exclude(name))
    patterns = [exclude] if isinstance(exclude, str) else exclude
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def excluded(tensors: Sequence[TensorInfo], exclude: Exclude) -> list[str]:
    """The names of the tensors that the user keeps dense."""
    patterns: Sequence[object] = () if callable(exclude) or isinstance(exclude, str) else exclude
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"exclude takes patterns on parameter names, as in '*.bias', or a function; not {pattern!r}"
            )
    return [tensor.name for tensor in tensors if excludes(exclude, tensor.name)]


@dataclass(frozen=True)
class Run:
    """Tensors of one dtype that travel together, next to each other where they come from."""

    tensors: Sequence[TensorInfo]
    codec: Codec
    chain: str = ""


def build(
    buckets: Sequence[Sequence[TensorInfo]],
    codec: Codec,
    *,
    chain: str = "",
    exclude: Exclude = (),
    min_elements: int = 1024,
) -> Layout:
    """One run per bucket, all with the same codec; see `lay_out`."""
    runs = [Run(bucket, codec, chain) for bucket in buckets]
    return lay_out(runs, exclude=exclude, min_elements=min_elements)


def lay_out(runs: Sequence[Run], *, exclude: Exclude = (), min_elements: int = 1024) -> Layout:
    """Cut runs into groups.

    A large tensor that is excluded ends a run and travels as a separate dense group; one dense group per dtype, at the end,
    takes the small tensors that cannot ride. In a chain none can: a sum between nodes is not one over all ranks.
    """
    groups: list[Group] = []
    small: dict[str, list[TensorInfo]] = {}

    def flush(tensors: list[TensorInfo], holes: dict[str, Role], text: str, chain: str) -> None:
        lonely = all(tensor.name in holes for tensor in tensors)
        for tensor in tensors:
            if lonely or holes.get(tensor.name) == "elsewhere":
                small.setdefault(tensor.dtype, []).append(tensor)
        if not lonely:
            groups.append(_group(f"group {len(groups)}", text, tensors, holes, chain))

    for run in runs:
        codec, chain, text = run.codec, run.chain, to_text(run.codec)
        if codec.direct:
            if run.tensors:
                groups.append(_group(f"group {len(groups)}", text, run.tensors, {}, chain))
            continue
        tensors: list[TensorInfo] = []
        holes: dict[str, Role] = {}
        for tensor in run.tensors:
            out = excludes(exclude, tensor.name)
            if out and tensor.elements >= min_elements:
                flush(tensors, holes, text, chain)
                tensors, holes = [], {}
                groups.append(_group(f"group {len(groups)}", "dense", [tensor], {}))
                continue
            if out or (codec.keeps_residual and tensor.elements < min_elements):
                holes[tensor.name] = "ride" if codec.rides and not chain else "elsewhere"
            tensors.append(tensor)
        flush(tensors, holes, text, chain)
    for dtype, left in small.items():
        name = SMALL_GROUP if len(small) == 1 else f"{SMALL_GROUP} ({dtype})"
        groups.append(_group(name, "dense", left, {}))
    return Layout(tuple(groups))


def _group(name: str, codec: str, tensors: Sequence[TensorInfo], holes: dict[str, Role], chain: str = "") -> Group:
    ends = [0, *itertools.accumulate(tensor.elements for tensor in tensors)]
    slots = tuple(
        Slot(tensor.name, offset, tensor.elements, tensor.shape, tensor.kind, holes.get(tensor.name, "coded"))
        for tensor, offset in zip(tensors, ends, strict=False)
    )
    return Group(name, codec, tensors[0].dtype, ends[-1], slots, chain)
