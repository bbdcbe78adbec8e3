"""The collectives that everything above stands on.

`TorchWorld` speaks through `torch.distributed` for the one rank of this process. `LocalWorld(n)` is n ranks in one
process, in lock-step, with collectives done in memory. Both are driven by the same engine: a collective is issued for all
`members`, the ranks that live in this process, at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Operation = Literal["gather", "sum", "average", "max"]


@dataclass(slots=True)
class Collective:
    """One rank's part in a collective.

    gather: `tensor` (uint8 [size]) of every rank comes to `output` (uint8 [world * size]) of every rank, in rank order.
    sum, average, max: over all ranks, in place in `tensor`.
    """

    operation: Operation
    tensor: Tensor
    output: Tensor | None = None

    @property
    def name(self) -> str:
        return "all-gather" if self.operation == "gather" else f"all-reduce ({self.operation})"

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


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

    def issue(self, round_: int, parts: Sequence[Collective], wake: Callable[[], None]) -> Pending:
        """Begin one collective, with one part for each member; `wake` is called when it ends, from any thread."""
        ...

    def close(self) -> None:
        """Give up: whatever is on its way fails, and nothing blocks the end of the process."""
        ...


class _TorchPending:
    def __init__(self, work: dist.Work, wake: Callable[[], None]) -> None:
        self._work = work
        self._future = work.get_future()
        self._future.add_done_callback(lambda _: wake())

    def done(self) -> bool:
        return bool(self._future.done())

    def check(self) -> None:
        self._work.wait()


class _PairPending(_TorchPending):
    """A sum of two ranks that travels as an all-gather; the addition comes with `check`, in rank order."""

    def __init__(
        self, work: dist.Work, wake: Callable[[], None], part: Collective, both: Tensor, spare: list[Tensor]
    ) -> None:
        self._part, self._both, self._spare = part, both, spare
        super().__init__(work, wake)

    def check(self) -> None:
        super().check()
        target = self._part.tensor
        halves = self._both[: 2 * self._part.bytes].view(target.dtype)
        torch.add(halves[: target.numel()], halves[target.numel() :], out=target)
        if self._part.operation == "average":
            target.div_(2)
        self._spare.append(self._both)


PAIR_BYTES = 4 << 20
"""Up to here two ranks add by an all-gather: as many bytes as gloo's all-reduce, in half the messages.

At 1 Gbit/s 240 KB take 3.3 ms instead of 5.9, and 2.2 ms of processor instead of 4.7. Large sums would only cost memory.
"""

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "average": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


class TorchWorld:
    """The ranks of a process group, over process groups of its own: one for each round of the protocol.

    DDP, SyncBatchNorm and the user speak on theirs while we are busy, and round 2 of one group and round 1 of the next
    would otherwise be issued in an order that depends on time. Making them is a collective.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, rounds: int, timeout: timedelta | None = None) -> None:
        parent = process_group if process_group is not None else dist.group.WORLD
        assert parent is not None
        ranks = dist.get_process_group_ranks(parent)
        if timeout is None:
            timeout = _timeout_of(parent)
        self.size = dist.get_world_size(parent)
        self.rank = dist.get_rank(parent)
        self.members: Sequence[int] = (self.rank,)
        self.parent = parent
        self.groups: list[dist.ProcessGroup] = []
        self._spare: list[Tensor] = []
        everybody = len(ranks) == dist.get_world_size()
        if not everybody:
            _take_fresh_names(parent, ranks, rounds)
        for i in range(1, rounds + 1):
            desc = f"thinwire round {i}"
            group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=not everybody, group_desc=desc)
            self.groups.append(group)

    def issue(self, round_: int, parts: Sequence[Collective], wake: Callable[[], None]) -> Pending:
        (part,) = parts
        group = self.groups[round_]
        if part.operation == "gather":
            work = dist.all_gather_single(part.output, part.tensor, group=group, async_op=True)
        elif self._by_gather(part):
            both = self._buffer(2 * part.bytes)
            mine = part.tensor.view(torch.uint8)
            work = dist.all_gather_single(both[: 2 * part.bytes], mine, group=group, async_op=True)
            return _PairPending(work, wake, part, both, self._spare)
        else:
            work = dist.all_reduce(part.tensor, op=_REDUCTIONS[part.operation], group=group, async_op=True)
        return _TorchPending(work, wake)

    def _by_gather(self, part: Collective) -> bool:
        on_cpu = part.tensor.device.type == "cpu"
        return self.size == 2 and on_cpu and part.operation != "max" and part.bytes <= PAIR_BYTES

    def _buffer(self, size: int) -> Tensor:
        """Room for a sum of two ranks, of an earlier one where there is enough."""
        for place, buffer in enumerate(self._spare):
            if buffer.numel() >= size:
                return self._spare.pop(place)
        del self._spare[:1]  # too small: give one back for the one that is made
        return torch.empty(size + size // 4, dtype=torch.uint8)

    def close(self) -> None:
        # Abort first: a gloo group joins its threads when it is destroyed, and they may wait for a peer until the timeout,
        # so that a process that was interrupted would not end. Then destroy: its connections close, and the peers
        # fail at once instead of at their timeout.
        groups, self.groups = self.groups, []
        for group in groups:
            group.abort()
        for group in groups:
            with contextlib.suppress(
                ValueError, RuntimeError, AssertionError
            ):  # the user destroyed all groups already
                dist.destroy_process_group(group)


_taken: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()


def _take_fresh_names(parent: dist.ProcessGroup, ranks: Sequence[int], rounds: int) -> None:
    """Make the next `rounds` groups of these ranks get names that all of them agree on and that are new. A collective.

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
    fresh = torch.tensor(max(len(names), taken.get(tuple(ranks), 0)))
    dist.all_reduce(fresh, op=dist.ReduceOp.MAX, group=parent)
    while len(names) < int(fresh):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True, group_desc="thinwire filler")
    taken[tuple(ranks)] = int(fresh) + rounds


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    try:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (RuntimeError, AttributeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


class _Done:
    def done(self) -> bool:
        return True

    def check(self) -> None:
        return None


class LocalWorld:
    """n ranks in one process. Sums are taken in rank order, so they are the same bits on every machine."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a world has at least one rank, not {size}")
        self.size = size
        self.members: Sequence[int] = range(size)

    def issue(self, round_: int, parts: Sequence[Collective], wake: Callable[[], None]) -> Pending:
        kinds = {(part.operation, part.tensor.shape, part.tensor.dtype) for part in parts}
        if len(parts) != self.size or len(kinds) != 1:
            raise ValueError(f"the ranks disagree in round {round_ + 1}: {sorted(map(str, kinds))}")
        if parts[0].operation == "gather":
            everything = torch.cat([part.tensor for part in parts])
            for part in parts:
                assert part.output is not None
                part.output.copy_(everything)
            return _Done()
        total = parts[0].tensor.clone()
        for part in parts[1:]:
            if part.operation == "max":
                torch.maximum(total, part.tensor, out=total)
            else:
                total += part.tensor
        if parts[0].operation == "average":
            total /= self.size
        for part in parts:
            part.tensor.copy_(total)
        return _Done()

    def close(self) -> None:
        return None
