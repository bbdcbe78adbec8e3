"""The collectives that everything above stands on.

`TorchWorld` speaks through `torch.distributed` for the one rank of this process. `LocalWorld(n)` is n ranks in one
process, in lock-step, with collectives done in memory. Both are driven by the same engine: a collective is issued for all
`members`, the ranks that live in this process, at once.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ChainError
from .farewell import give_up
from .threads import patient_threads

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


class World(Protocol):
    """Ranks that can exchange tensors. Rounds are independent of each other; within one, order of issue is everything."""

    size: int
    members: Sequence[int]
    ranks_per_node: int | None
    why: str
    """Where `ranks_per_node` is None: why nodes are not known."""

    def prepare(self, places: Collection[tuple[int, Scope]]) -> None:
        """Make these rounds of these scopes ready, beside what is ready already. A collective."""
        ...

    def issue(self, round_: int, parts: Sequence[Collective], wake: Callable[[], None]) -> Pending:
        """Begin one collective, with one part for each member; `wake` is called when it ends, from any thread."""
        ...

    def close(self) -> None:
        """Give up: whatever is on its way fails, and nothing blocks the end of the process."""
        ...


class _TorchPending:
    def __init__(self, works: Sequence[dist.Work], wake: Callable[[], None]) -> None:
        self._works = works
        self._futures = [work.get_future() for work in works]
        for future in self._futures:
            future.add_done_callback(lambda _: wake())

    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def check(self) -> None:
        for work in self._works:
            work.wait()


class _SwapPending(_TorchPending):
    """A sum of two ranks, each of which sends the other what it has; the addition comes with `check`, in rank order."""

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
            torch.add(pair[self._rank], pair[1 - self._rank], out=target)  # the order matters for what a NaN carries
            if self._part.operation == "average":
                target.div_(2)
            at += tensor.nbytes
        self._give_back()


PAIR_BYTES = 4 << 20
"""Up to here two ranks add by a swap: as many bytes as gloo's all-reduce, in one message instead of four.

Large sums would only cost memory.
"""

DUPLEX_BYTES = 128 << 10
"""From here on two ranks use a group for each direction, see `_both_ways`. A second operation is not worth it for less."""

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "average": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


class TorchWorld:
    """The ranks of a process group, over process groups of its own: one for each round of the protocol and each scope, two if
    there are two ranks.

    DDP, SyncBatchNorm and the user speak on theirs while we are busy, and round 2 of one group and round 1 of the next
    would otherwise be issued in an order that depends on time. Making them is a collective.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        rounds: int,
        timeout: timedelta | None = None,
        ranks_per_node: int | None = None,
        why: str = "nobody said how many ranks share one",
        backend: str | None = None,
    ) -> None:
        parent = process_group if process_group is not None else dist.group.WORLD
        assert parent is not None
        self._ranks = dist.get_process_group_ranks(parent)
        self._backend = backend
        self._timeout = timeout if timeout is not None else _timeout_of(parent)
        self.size = dist.get_world_size(parent)
        self.rank = dist.get_rank(parent)
        self.members: Sequence[int] = (self.rank,)
        self.ranks_per_node = ranks_per_node
        self.why = why
        self.parent = parent
        self.groups: list[dist.ProcessGroup] = []
        self._spare: list[Tensor] = []
        self._placed: dict[tuple[int, Scope], list[dist.ProcessGroup]] = {}
        """One group; of two ranks, one for each direction: see `_both_ways`."""
        self.prepare([(round_, "flat") for round_ in range(rounds)])

    def prepare(self, places: Collection[tuple[int, Scope]]) -> None:
        fresh = sorted(set(places) - set(self._placed))
        everybody = len(self._ranks) == dist.get_world_size()
        mine = Place(self.rank, self.size, self.ranks_per_node)
        if fresh and not everybody:
            kinds = [tuple(self._ranks[rank] for rank in mine.ranks(scope)) for _, scope in fresh]
            count = sum(_directions(kind) for kind in kinds)
            _take_fresh_names(self.parent, [tuple(self._ranks), *sorted(set(kinds))], count)
        for round_, scope in fresh:
            # Without local synchronisation every rank makes the groups of all nodes, in the same order.
            others = range(self.size) if everybody else [self.rank]
            wanted = {tuple(Place(rank, self.size, self.ranks_per_node).ranks(scope)) for rank in others}
            for kind in sorted(wanted):
                made = [
                    self._new_group(kind, everybody, f"round {round_ + 1} {scope}") for _ in range(_directions(kind))
                ]
                if self.rank in kind:
                    self._placed[round_, scope] = made
                    self.groups += made

    def _new_group(self, kind: Sequence[int], everybody: bool, description: str) -> dist.ProcessGroup:
        with patient_threads():
            group: dist.ProcessGroup = dist.new_group(
                [self._ranks[rank] for rank in kind],
                timeout=self._timeout,
                backend=self._backend,
                use_local_synchronization=not everybody,
                group_desc=f"thinwire {description}",
            )
        return group

    def issue(self, round_: int, parts: Sequence[Collective], wake: Callable[[], None]) -> Pending:
        (part,) = parts
        if part.operation == "idle":
            wake()
            return _Done()
        groups, tensor = self._placed[round_, part.scope], part.tensor
        if len(groups) == 2 and self._by_swap(part):
            return self._swap(part, groups, wake)
        group = groups[0]
        if part.operation == "gather":
            work = dist.all_gather_single(part.output, tensor, group=group, async_op=True)
        elif part.operation == "all to all":
            work = dist.all_to_all_single(part.output, tensor, group=group, async_op=True)
        elif part.operation == "reduce":
            work = dist.reduce(tensor, group=group, group_dst=0, async_op=True)
        elif part.operation == "broadcast":
            work = dist.broadcast(tensor, group=group, group_src=0, async_op=True)
        elif part.operation == "collect":
            pieces = None if part.output is None else list(part.output.view(-1, tensor.numel()))
            work = dist.gather(tensor, pieces, group=group, group_dst=0, async_op=True)
        else:
            operation = _REDUCTIONS[part.operation]
            works = [dist.all_reduce(tensor, op=operation, group=group, async_op=True) for tensor in part.tensors]
            return _TorchPending(works, wake)
        return _TorchPending([work], wake)

    def _by_swap(self, part: Collective) -> bool:
        if part.tensor.device.type != "cpu":
            return False
        adds = part.operation in ("sum", "average") and part.bytes <= PAIR_BYTES
        return adds or part.operation in ("gather", "all to all")

    def _swap(self, part: Collective, groups: Sequence[dist.ProcessGroup], wake: Callable[[], None]) -> Pending:
        """What two ranks do together: each sends the other what it has, in one message."""
        rank = groups[0].rank()
        if part.output is not None:
            ours, out = _bytes(part.tensor), _bytes(part.output).view(2, -1)
            mine = ours if part.operation == "gather" else ours.view(2, -1)[1 - rank]
            out[rank].copy_(ours if part.operation == "gather" else ours.view(2, -1)[rank])
            return _TorchPending(_both_ways(groups, rank, mine, out[1 - rank]), wake)
        pieces = [_bytes(tensor) for tensor in part.tensors]
        buffers, mine = [self._buffer(part.bytes)], pieces[0]
        if part.beside is not None:
            buffers.append(self._buffer(part.bytes))
            mine = buffers[1][: part.bytes]
            torch.cat(pieces, out=mine)
        theirs = buffers[0][: part.bytes]
        works = _both_ways(groups, rank, mine, theirs)
        return _SwapPending(works, wake, part, theirs, rank, lambda: self._spare.extend(buffers))

    def _buffer(self, size: int) -> Tensor:
        """Room for a sum of two ranks, of an earlier one where there is enough."""
        for place, buffer in enumerate(self._spare):
            if buffer.numel() >= size:
                return self._spare.pop(place)
        del self._spare[:1]  # too small: give one back for the one that is made
        return torch.empty(size + size // 4, dtype=torch.uint8)

    def close(self) -> None:
        # Destroyed, so that connections close and the peers fail at once instead of at their timeout.
        groups, self.groups = self.groups, []
        self._placed.clear()
        give_up(groups)


def _directions(ranks: Sequence[int]) -> int:
    """How many groups these ranks need."""
    return 2 if len(ranks) == 2 else 1


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _both_ways(groups: Sequence[dist.ProcessGroup], rank: int, mine: Tensor, theirs: Tensor) -> list[dist.Work]:
    """Begin to send `mine` to the other rank of two, and to receive `theirs` from it.

    gloo sends nothing before the receiver has said that it is ready, and its collectives say so behind what they send
    themselves. The rank that comes first would wait until the message of the other is through, or half of it, as if a
    link had one direction only. So large messages have a group for each direction, and receiving begins first.
    """
    if mine.numel() >= DUPLEX_BYTES:
        receiving = dist.broadcast(theirs, group=groups[1 - rank], group_src=1 - rank, async_op=True)
        return [receiving, dist.broadcast(mine, group=groups[rank], group_src=rank, async_op=True)]
    sizes = [0, mine.numel()] if rank == 0 else [mine.numel(), 0]  # nothing to itself, all to the other
    return [dist.all_to_all_single(theirs, mine, sizes, sizes, group=groups[0], async_op=True)]


_taken: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()


def _take_fresh_names(parent: dist.ProcessGroup, kinds: Sequence[tuple[int, ...]], count: int) -> None:
    """Make the next `count` groups of these lists of ranks get names that all agree on and that are new. A collective.

    Torch names a group with local synchronisation after its ranks and the number of groups that the process has. Ranks
    with other numbers of groups would wait for each other under different names; and after a group was destroyed its
    name comes again, under which the store still holds the addresses of the dead. Either way `new_group` would hang.
    Groups of one rank bring the number to where it must be. (Without local synchronisation names are counted, but then
    every rank of the job must take part.)
    """
    world = dist.group.WORLD
    assert world is not None
    taken = _taken.setdefault(world, {})
    names = dist.distributed_c10d._world.pg_names
    fresh = torch.tensor(max(len(names), *(taken.get(kind, 0) for kind in kinds)), device=device_of(parent))
    dist.all_reduce(fresh, op=dist.ReduceOp.MAX, group=parent)
    wanted = int(fresh)
    while len(names) < wanted:
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True, group_desc="thinwire filler")
    for kind in kinds:
        taken[kind] = wanted + count


def ranks_per_node(group: dist.ProcessGroup | None) -> tuple[int | None, str]:
    """How many ranks of a group share a node, from LOCAL_RANK and LOCAL_WORLD_SIZE; or None, and why. A collective.

    The ranks must be laid out node by node, equally many on each, as torchrun does it.
    """
    words = [os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")]
    mine = torch.tensor([int(word) if word.isdecimal() else -1 for word in words], device=device_of(group))
    size = dist.get_world_size(group)
    everyone = torch.empty(2 * size, dtype=mine.dtype, device=mine.device)
    dist.all_gather_single(everyone, mine, group=group)
    local, counts = everyone.view(size, 2).T.tolist()
    each = counts[0]
    if min(local) < 0 or min(counts) < 1:
        return None, "LOCAL_RANK or LOCAL_WORLD_SIZE is not set on every rank; torchrun sets them"
    if any(count != each for count in counts):
        return None, f"the nodes have different numbers of ranks: LOCAL_WORLD_SIZE is {sorted(set(counts))}"
    if size % each or local != [rank % each for rank in range(size)]:
        return None, f"the {size} ranks are not laid out node by node, {each} on each: LOCAL_RANK is {local}"
    return each, ""


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where a group takes tensors from: the processor, if it can."""
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    kinds = {device.type for device in group._device_types}
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds.pop())


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    try:
        timeout = group._get_backend(device_of(group)).options._timeout
    except (RuntimeError, AttributeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


class _Done:
    def done(self) -> bool:
        return True

    def check(self) -> None:
        return None


class LocalWorld:
    """n ranks in one process. Sums are taken in rank order, so they are the same bits on every machine.

    `LocalWorld(6, ranks_per_node=3)` has two nodes, for chains that know of them.
    """

    def __init__(self, size: int, ranks_per_node: int | None = None) -> None:
        if size < 1:
            raise ValueError(f"a world has at least one rank, not {size}")
        if ranks_per_node is not None and (ranks_per_node < 1 or size % ranks_per_node):
            raise ValueError(f"{size} ranks cannot be {ranks_per_node} on every node")
        self.size = size
        self.members: Sequence[int] = range(size)
        self.ranks_per_node = ranks_per_node
        self.why = f"LocalWorld({size}, ranks_per_node=...) has some"

    def prepare(self, places: Collection[tuple[int, Scope]]) -> None:
        return None

    def issue(self, round_: int, parts: Sequence[Collective], wake: Callable[[], None]) -> Pending:
        scopes = {part.scope for part in parts if part.operation != "idle"}
        if len(parts) != self.size or len(scopes) > 1:
            raise ValueError(f"the ranks disagree in round {round_ + 1}: {len(parts)} parts in {sorted(scopes)}")
        for scope in scopes:
            done: set[int] = set()
            for rank in self.members:
                if rank not in done:
                    ranks = Place(rank, self.size, self.ranks_per_node).ranks(scope)
                    done.update(ranks)
                    _carry_out([parts[other] for other in ranks], round_)
        return _Done()

    def close(self) -> None:
        return None


def _carry_out(parts: Sequence[Collective], round_: int) -> None:
    """One collective in memory, among those who take part in it."""
    first = parts[0]
    kinds = {(part.operation, *((tensor.shape, tensor.dtype) for tensor in part.tensors)) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"the ranks disagree in round {round_ + 1}: {sorted(map(str, kinds))}")
    if first.operation == "idle":
        return
    if first.operation in ("gather", "collect"):
        everything = torch.cat([part.tensor for part in parts])
        for part in parts if first.operation == "gather" else parts[:1]:
            assert part.output is not None
            part.output.copy_(everything)
    elif first.operation == "all to all":
        pieces = torch.stack([part.tensor for part in parts]).view(len(parts), len(parts), -1)
        for index, part in enumerate(parts):
            assert part.output is not None
            part.output.copy_(pieces[:, index].reshape(-1))
    elif first.operation == "broadcast":
        for part in parts[1:]:
            part.tensor.copy_(first.tensor)
    else:
        for tensors in zip(*(part.tensors for part in parts), strict=True):
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                if first.operation == "max":
                    torch.maximum(total, tensor, out=total)
                else:
                    total += tensor
            if first.operation == "average":
                total /= len(parts)
            for tensor in tensors if first.operation != "reduce" else tensors[:1]:
                tensor.copy_(total)
