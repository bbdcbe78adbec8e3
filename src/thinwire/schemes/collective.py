"""One collective: what a rank hands over and gets, with whom, and how it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch.distributed as dist
from torch import Tensor

from ..errors import ChainError

Operation = Literal["gather", "sum", "average", "max", "all to all", "reduce", "collect", "broadcast", "idle"]
Scope = Literal["flat", "intra", "inter"]

_NAMES: dict[Operation, str] = {
    "gather": "all-gather",
    "all to all": "all-to-all",
    "reduce": "reduce",
    "collect": "gather",
    "broadcast": "broadcast",
    "idle": "wait",
}


@dataclass(slots=True)
class Collective:
    """One rank's part in a collective over p ranks: all of them, those of its node, or those of its place on all nodes.

    gather      `tensor` [size] of every rank comes to `output` [p * size] of every rank, in rank order
    sum, average, max  over all ranks, in place in `tensor`
    all to all  piece j of `tensor` [p * size] comes to rank j, as piece i of its `output` if this is rank i
    reduce      the sum of `tensor` comes to the first rank, in place; on the others `tensor` is spoilt
    collect     `tensor` [size] of every rank comes to `output` [p * size] of the first, which the others leave empty
    broadcast   `tensor` of the first rank comes to that of all others
    idle        this rank has no part in it; where only the first rank of each node speaks
    """

    operation: Operation
    tensor: Tensor
    output: Tensor | None = None
    scope: Scope = "flat"
    beside: Tensor | None = None
    """Of a sum or average: a second tensor, of another dtype, of which the same is asked."""

    @property
    def name(self) -> str:
        name = _NAMES.get(self.operation) or f"all-reduce ({self.operation})"
        return name if self.scope == "flat" else f"{name} ({self.scope})"

    @property
    def bytes(self) -> int:
        """What this rank hands over."""
        return 0 if self.operation == "idle" else sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,) if self.beside is None else (self.beside, self.tensor)

    def traffic(self, ranks: int) -> float:
        """Bytes on the link of the busiest of `ranks` ranks in one direction, as the cost formulas have it."""
        if self.operation == "gather" or self.operation == "collect":
            return float((ranks - 1) * self.bytes)
        if self.operation == "all to all":
            return (ranks - 1) * self.bytes / ranks
        if self.operation in ("reduce", "broadcast"):
            return float(self.bytes) if ranks > 1 else 0.0
        return 2 * (ranks - 1) * self.bytes / ranks


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is: ranks are numbered node by node. `ranks_per_node` is None where nodes are not known."""

    rank: int
    size: int
    ranks_per_node: int | None = None

    def ranks(self, scope: Scope) -> list[int]:
        """Those that this rank speaks with in a scope, itself among them."""
        if scope == "flat":
            return list(range(self.size))
        if self.ranks_per_node is None:
            raise ChainError("the nodes of these ranks are not known")
        node, local = divmod(self.rank, self.ranks_per_node)
        if scope == "intra":
            return list(range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node))
        return list(range(local, self.size, self.ranks_per_node))

    def count(self, scope: Scope) -> int:
        return len(self.ranks(scope))

    def index(self, scope: Scope) -> int:
        return self.ranks(scope).index(self.rank)


class Pending(Protocol):
    """A collective on its way."""

    def done(self) -> bool: ...

    def check(self) -> None:
        """Raise what went wrong, if anything did. Only after `done()`."""
        ...


class Works:
    """Operations of `torch.distributed` that make up one collective; `wake` is called when the last of them ends."""

    def __init__(self, works: Sequence[dist.Work], wake: Callable[[], None]) -> None:
        self._works = works
        self._futures = [work.get_future() for work in works]
        left = iter(range(len(works) - 1, -1, -1))  # holds no future, which would hold it
        for future in self._futures:
            future.add_done_callback(lambda _: None if next(left) else wake())

    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def check(self) -> None:
        for work in self._works:
            work.wait()
