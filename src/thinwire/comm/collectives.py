"""One rank's part in a collective: operation, buffers, scope, and a handle to wait on; between two ranks, a swap."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
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
    """One rank's part in a collective over p ranks: all, those of its node, or those with its local rank on all nodes.

    gather      all-gather: `tensor` [size] of every rank arrives in `output` [p * size] of every rank, in rank order
    sum, average, max  all-reduce in place in `tensor`
    all to all  piece j of `tensor` [p * size] of rank i becomes piece i of `output` of rank j
    reduce      sum of `tensor`, in place on the first rank; undefined on the others afterwards
    collect     gather: `tensor` [size] of every rank arrives in `output` [p * size] of the first; None on the others
    broadcast   `tensor` of the first rank is copied to all others
    idle        this rank does not take part, as where only the first rank of each node does
    """

    operation: Operation
    tensor: Tensor
    output: Tensor | None = None
    scope: Scope = "flat"
    beside: Tensor | None = None
    """For sum and average: a second tensor, of another dtype, reduced the same way."""

    @property
    def name(self) -> str:
        name = _NAMES.get(self.operation) or f"all-reduce ({self.operation})"
        return name if self.scope == "flat" else f"{name} ({self.scope})"

    @property
    def bytes(self) -> int:
        """Bytes that this rank contributes."""
        return 0 if self.operation == "idle" else sum([tensor.nbytes for tensor in self.tensors])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,) if self.beside is None else (self.beside, self.tensor)

    def traffic(self, ranks: int) -> float:
        """Bytes that the busiest of `ranks` ranks sends or receives, whichever is more: see `thinwire.traffic`."""
        if self.operation == "gather" or self.operation == "collect":
            return float((ranks - 1) * self.bytes)
        if self.operation == "all to all":
            return (ranks - 1) * self.bytes / ranks
        if self.operation in ("reduce", "broadcast"):
            return float(self.bytes) if ranks > 1 else 0.0
        return 2 * (ranks - 1) * self.bytes / ranks


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a rank; ranks are numbered node by node. `ranks_per_node` is None where the nodes are unknown."""

    rank: int
    size: int
    ranks_per_node: int | None = None

    def ranks(self, scope: Scope) -> list[int]:
        """Ranks of the scope that this rank belongs to, itself included."""
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
    """A collective in flight."""

    def done(self) -> bool: ...

    def check(self) -> None:
        """Raise the error of the collective, if there was one. Only after `done()`."""


class Works:
    """The `torch.distributed` operations of one collective; `wake` is called when the last of them completes."""

    def __init__(self, works: Sequence[dist.Work], wake: Callable[[], None]) -> None:
        self._works = works
        self._futures = [work.get_future() for work in works]
        left = iter(range(len(works) - 1, -1, -1))  # the callback must not reference the futures: they reference it
        for future in self._futures:
            future.add_done_callback(lambda _: None if next(left) else wake())

    def done(self) -> bool:
        return not [future for future in self._futures if not future.done()]

    def check(self) -> None:
        for work in self._works:
            work.wait()


# -- two ranks: whatever they do together, each sends the other what it has, in one message -------------------------------

SUM_BYTES = 4 << 20
"""Up to this size two ranks exchange and add: as many bytes as gloo's all-reduce, in one message instead of four.

For larger sums it would only cost memory.
"""

DUPLEX_BYTES = 128 << 10
"""From this size on each direction uses its own group, see `_both_ways`. Below, a second operation costs more than it saves."""


class Pair:
    """One rank of two, with a process group for each direction."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = groups
        self._rank = groups[0].rank()
        self._spare: list[Tensor] = []

    def takes(self, part: Collective) -> bool:
        """Whether to carry this out as an exchange."""
        if part.tensor.device.type != "cpu":
            return False
        adds = part.operation in ("sum", "average") and part.bytes <= SUM_BYTES
        return adds or part.operation in ("gather", "all to all")

    def issue(self, part: Collective, wake: Callable[[], None]) -> Pending:
        if part.output is None:
            return self._add(part, wake)
        pieces, output = _bytes(part.tensor), _bytes(part.output).view(2, -1)
        pieces = pieces.expand(2, -1) if part.operation == "gather" else pieces.view(2, -1)
        us, them = self._rank, 1 - self._rank
        output[us].copy_(pieces[us])
        return Works(self._both_ways(pieces[them], output[them]), wake)

    def _add(self, part: Collective, wake: Callable[[], None]) -> Pending:
        pieces = [_bytes(tensor) for tensor in part.tensors]
        buffers, mine = [self._buffer(part.bytes)], pieces[0]
        if part.beside is not None:
            buffers.append(self._buffer(part.bytes))
            mine = buffers[1][: part.bytes]
            torch.cat(pieces, out=mine)
        theirs = buffers[0][: part.bytes]
        give_back = functools.partial(
            self._spare.extend, buffers
        )  # must not reference a group: groups end with the world
        return _Sum(self._both_ways(mine, theirs), wake, part, theirs, self._rank, give_back)

    def _buffer(self, size: int) -> Tensor:
        """A receive buffer, reused from an earlier sum if large enough."""
        for place, buffer in enumerate(self._spare):
            if buffer.numel() >= size:
                return self._spare.pop(place)
        del self._spare[:1]  # too small: free one for the one allocated next
        return torch.empty(size + size // 4, dtype=torch.uint8)

    def _both_ways(self, mine: Tensor, theirs: Tensor) -> list[dist.Work]:
        """Start to send `mine` to the other rank and to receive `theirs` from it.

        gloo sends nothing before the receiver has announced that it is ready, and its collectives queue that announcement
        behind their own data. The rank that arrives first would wait for all or half of the other's message, as if the link
        were half duplex. So large messages use a group for each direction, and the receive is posted first.
        """
        us, them = self._rank, 1 - self._rank
        if mine.numel() >= DUPLEX_BYTES:
            receiving = dist.broadcast(theirs, group=self._groups[them], group_src=them, async_op=True)
            return [receiving, dist.broadcast(mine, group=self._groups[us], group_src=us, async_op=True)]
        sizes = [mine.numel() if rank == them else 0 for rank in range(2)]  # nothing to itself, everything to the peer
        return [dist.all_to_all_single(theirs, mine, sizes, sizes, group=self._groups[0], async_op=True)]


class _Sum(Works):
    """A sum in flight; `check` adds, in rank order."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        wake: Callable[[], None],
        part: Collective,
        theirs: Tensor,
        rank: int,
        give_back: Callable[[], None],
    ) -> None:
        self._part, self._theirs, self._rank, self._give_back = part, theirs, rank, give_back
        self._added = False
        super().__init__(works, wake)

    def check(self) -> None:
        super().check()
        if self._added:
            return
        self._added, at = True, 0
        for tensor in self._part.tensors:
            target = tensor.view(-1)
            pair = [target, self._theirs[at : at + tensor.nbytes].view(target.dtype)]
            torch.add(
                pair[self._rank], pair[1 - self._rank], out=target
            )  # rank order: it decides the payload of a NaN
            if self._part.operation == "average":
                target.div_(2)
            at += tensor.nbytes
        self._give_back()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
