"""Worlds: the ranks of a job and the collectives between them.

`TorchWorld` is the one rank of this process, over `torch.distributed`. `LocalWorld(n)` is n ranks in one process, in
lock-step, with collectives in memory. The same engine drives both: it issues a collective for all `local_ranks`, the ranks
of this process, at once.
"""

import os
import weakref
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from ..errors import ExchangeError
from .collectives import Collective, Pair, Pending, Place, Scope, Works
from .teardown import give_up, give_up_with_all, not_with_all
from .thread_priority import patient_threads

GONE = "the process groups of this job are destroyed: its wires cannot go on"


class World(Protocol):
    """Ranks that can exchange tensors. Rounds are independent; within one, all ranks issue collectives in the same order."""

    size: int
    local_ranks: Sequence[int]
    ranks_per_node: int | None
    why: str
    """Why the nodes are unknown, where `ranks_per_node` is None."""

    def prepare(self, places: Collection[tuple[int, Scope]]) -> None:
        """Create process groups for these (round, scope) pairs where they are missing. A collective."""

    def issue(self, round_: int, parts: Sequence[Collective], wake: Callable[[], None]) -> Pending:
        """Start one collective, with one part per local rank; `wake` is called on completion, from any thread."""

    def close(self) -> None:
        """Tear down: collectives in flight fail, and nothing blocks the exit of the process."""


_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "average": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


class TorchWorld:
    """The ranks of a process group, over separate process groups: one per round and scope, two of them for two ranks.

    Separate, because DDP, SyncBatchNorm and the user issue collectives on theirs at any time, and because round 2 of one
    tensor group and round 1 of the next are issued in an order that depends on timing. Creating them is a collective.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        rounds: int,
        timeout: timedelta | None = None,
        ranks_per_node: int | None = None,
        why: str = "the number of ranks per node was not given",
        backend: str | None = None,
    ) -> None:
        parent = process_group if process_group is not None else dist.group.WORLD
        assert parent is not None
        self._ranks = dist.get_process_group_ranks(parent)
        self._backend = backend
        self._timeout = timeout if timeout is not None else _timeout_of(parent)
        self.size = dist.get_world_size(parent)
        self.rank = dist.get_rank(parent)
        self.local_ranks: Sequence[int] = (self.rank,)
        self.ranks_per_node = ranks_per_node
        self.why = why
        self._parent = {"parent": parent}
        give_up_with_all([], self._parent)  # a closed wire that is still referenced must not keep the job's own group
        self.groups: list[dist.ProcessGroup] = []
        self._placed: dict[tuple[int, Scope], dist.ProcessGroup] = {}
        self._pairs: dict[tuple[int, Scope], Pair] = {}
        self._tag = give_up_with_all(self.groups, self._placed, self._pairs)
        self.prepare([(round_, "flat") for round_ in range(rounds)])

    @property
    def parent(self) -> dist.ProcessGroup:
        """The group of the job, which the groups of this world are made like."""
        if not self._parent:
            raise ExchangeError(GONE)
        return self._parent["parent"]

    def prepare(self, places: Collection[tuple[int, Scope]]) -> None:
        fresh = sorted(set(places) - set(self._placed))
        everybody = len(self._ranks) == dist.get_world_size()
        mine = Place(self.rank, self.size, self.ranks_per_node)
        if fresh and not everybody:
            kinds = [tuple(self._ranks[rank] for rank in mine.ranks(scope)) for _, scope in fresh]
            count = sum(_directions(kind) for kind in kinds)
            _take_fresh_names(self.parent, [tuple(self._ranks), *sorted(set(kinds))], count)
        for round_, scope in fresh:
            # Without local synchronisation every rank creates the groups of all nodes, in the same order.
            others = range(self.size) if everybody else [self.rank]
            wanted = {tuple(Place(rank, self.size, self.ranks_per_node).ranks(scope)) for rank in others}
            for kind in sorted(wanted):
                made = [
                    self._new_group(kind, everybody, f"round {round_ + 1} {scope}") for _ in range(_directions(kind))
                ]
                if self.rank in kind:
                    self._placed[round_, scope] = made[0]
                    self.groups += made
                    if len(made) == 2:
                        self._pairs[round_, scope] = Pair(made)

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
        self.check()
        pair = self._pairs.get((round_, part.scope))
        if pair is not None and pair.takes(part):
            return pair.issue(part, wake)
        group, tensor = self._placed[round_, part.scope], part.tensor
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
            return Works(works, wake)
        return Works([work], wake)

    def check(self) -> None:
        """Raise if there is no group left to speak on."""
        if not self.groups:
            raise ExchangeError(GONE)

    def close(self) -> None:
        # Destroyed, so that connections close and peers fail now instead of at their timeout.
        self._placed.clear()
        self._pairs.clear()
        give_up(self.groups)
        not_with_all(self._tag)


def _directions(ranks: Sequence[int]) -> int:
    """Process groups that these ranks need: two ranks use one per direction."""
    return 2 if len(ranks) == 2 else 1


_taken: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()


def _take_fresh_names(parent: dist.ProcessGroup, kinds: Sequence[tuple[int, ...]], count: int) -> None:
    """Ensure that the next `count` groups of these lists of ranks get equal, unused names on all ranks. A collective.

    Torch names a group with local synchronisation after its ranks and the number of groups in the process. Ranks with
    different numbers of groups would wait for each other under different names; and after a group is destroyed its name is
    reused while the store still holds the old addresses. Either way `new_group` would hang. Filler groups of one rank
    raise the number to a common value. (Without local synchronisation names are counted, but then every rank of the job
    must take part.)
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
    """Ranks per node of a group, from LOCAL_RANK and LOCAL_WORLD_SIZE; or None and the reason. A collective.

    Ranks must be numbered node by node, the same number on each, as torchrun does it.
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
    """Device of the tensors that a group accepts: the CPU if possible."""
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
    """n ranks in one process. Sums are in rank order, so their bits are equal on every machine.

    `LocalWorld(6, ranks_per_node=3)` has two nodes, for hierarchical chains.
    """

    def __init__(self, size: int, ranks_per_node: int | None = None) -> None:
        if size < 1:
            raise ValueError(f"a world has at least one rank, not {size}")
        if ranks_per_node is not None and (ranks_per_node < 1 or size % ranks_per_node):
            raise ValueError(f"{size} ranks cannot be {ranks_per_node} on every node")
        self.size = size
        self.local_ranks: Sequence[int] = range(size)
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
            for rank in self.local_ranks:
                if rank not in done:
                    ranks = Place(rank, self.size, self.ranks_per_node).ranks(scope)
                    done.update(ranks)
                    _carry_out([parts[other] for other in ranks], round_)
        return _Done()

    def close(self) -> None:
        return None


def _carry_out(parts: Sequence[Collective], round_: int) -> None:
    """One collective in memory, between the ranks that take part."""
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
