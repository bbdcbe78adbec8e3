"""Two ranks: whatever they do together, each sends the other what it has, in one message."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .collective import Collective, Pending, Works

SUM_BYTES = 4 << 20
"""Up to here two ranks add by a swap: as many bytes as gloo's all-reduce, in one message instead of four.

Large sums would only cost memory.
"""

DUPLEX_BYTES = 128 << 10
"""From here on each direction has its own group, see `_both_ways`. A second operation is not worth it for less."""


class Pair:
    """One rank of two, with a process group for each direction."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = groups
        self._rank = groups[0].rank()
        self._spare: list[Tensor] = []

    def takes(self, part: Collective) -> bool:
        """Whether a swap is the way to carry this out."""
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
        give_back = functools.partial(self._spare.extend, buffers)  # holds no group, which must end with the world
        return _Sum(self._both_ways(mine, theirs), wake, part, theirs, self._rank, give_back)

    def _buffer(self, size: int) -> Tensor:
        """Room for a sum, of an earlier one where there is enough."""
        for place, buffer in enumerate(self._spare):
            if buffer.numel() >= size:
                return self._spare.pop(place)
        del self._spare[:1]  # too small: give one back for the one that is made
        return torch.empty(size + size // 4, dtype=torch.uint8)

    def _both_ways(self, mine: Tensor, theirs: Tensor) -> list[dist.Work]:
        """Begin to send `mine` to the other rank, and to receive `theirs` from it.

        gloo sends nothing before the receiver has said that it is ready, and its collectives say so behind what they send
        themselves. The rank that comes first would wait until the message of the other is through, or half of it, as if a
        link had one direction only. So large messages have a group for each direction, and receiving begins first.
        """
        us, them = self._rank, 1 - self._rank
        if mine.numel() >= DUPLEX_BYTES:
            receiving = dist.broadcast(theirs, group=self._groups[them], group_src=them, async_op=True)
            return [receiving, dist.broadcast(mine, group=self._groups[us], group_src=us, async_op=True)]
        sizes = [mine.numel() if rank == them else 0 for rank in range(2)]  # nothing to itself, all to the other
        return [dist.all_to_all_single(theirs, mine, sizes, sizes, group=self._groups[0], async_op=True)]


class _Sum(Works):
    """A sum under way; the addition comes with `check`, in rank order."""

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


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
