"""Backend for SGD and random blocks: one pass over memory, and all-reduces that overlap with backward.

The block of a tensor follows from (seed, round, name), so it is known before the gradient is. As soon as backward has computed
the gradients of a bucket, residual + update on its blocks is sent. `exchange_step` computes it again: where it differs (a
gradient was clipped, unscaled or accumulated), the rank reports so and all ranks send again. The last bucket is sent after
the reports are in.

Shared model, residual and momentum change only after the reports of all ranks are in.

Bytes: 4 * elements / ratio and two floats, all-reduced. Memory: shared model and residual, 8 bytes per parameter on top of
SGD's own, and two buffers as large as the blocks. Passes: one read for the finite test, one over everything (see
`kernels.cpu.updates`).
"""

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..codecs import RandomBlock
from ..codecs.randomblock import draw
from ..comm.thread_priority import give_way
from ..comm.world import LocalWorld
from ..engine.direct_reducer import DirectReducer
from ..engine.layout import Exclude, excludes
from ..engine.state_schema import tensor_of
from ..errors import ExchangeError
from ..feedback import Balance
from ..log import logger
from . import header
from .buckets import Bucket, cut
from .pointer_table import PointerTable, unusual
from .replica import Replica

STRIKES = 3
"""Steps in a row whose early sends were stale, after which blocks are no longer sent during backward."""
NOT_YET = np.zeros(0, np.float32)


def fits(replica: Replica, codec: object) -> bool:
    """Whether this backend covers the job."""
    return (
        type(codec) is RandomBlock
        and type(replica.optimizer) is torch.optim.SGD
        and all(slot.parameter.is_contiguous() and not slot.mastered for slot in replica.slots)
        and not any(unusual(group) for group in replica.optimizer.param_groups)
    )


class BlockBackend:
    """SGD's steps and random blocks, for all replicas of this process."""

    one_pass: ClassVar[bool] = True

    def __init__(
        self,
        replicas: Sequence[Replica],
        codec: RandomBlock,
        balance: Balance,
        process_group: dist.ProcessGroup | LocalWorld | None,
        *,
        exclude: Exclude,
        min_elements: int,
        overlap: bool,
        timeout: timedelta | None,
    ) -> None:
        self.replicas, self.codec, self.balance = replicas, codec, balance
        self.residuals = [[torch.zeros_like(slot.shared) for slot in replica.slots] for replica in replicas]
        self._tables = [PointerTable(*pair) for pair in zip(replicas, self.residuals, strict=True)]
        self._refresh(1.0)  # momenta begin with the job, so that its states always have them
        slots = replicas[0].slots
        whole = {
            i for i, slot in enumerate(slots) if slot.info.elements < min_elements or excludes(exclude, slot.name)
        }
        in_process = isinstance(process_group, LocalWorld)
        self.overlap, self.expects_exchange = overlap and not in_process, False
        # Without overlap too: gloo adds three ranks in an order that depends on a value's position in the buffer.
        self.buckets = cut(slots, whole, codec.ratio, several=not in_process, replicas=len(replicas))
        self._headers = [torch.zeros(2) for _ in replicas]
        named = {bucket.name: bucket.means[0] for bucket in self.buckets} | {header.NAME: self._headers[0]}
        self.exchange = DirectReducer(named, process_group, apart=header.NAME, timeout=timeout)
        self.wires = (self.exchange,)
        self.strikes, self._scale = 0, 1.0
        self._scratch = torch.zeros(max(bucket.sent[0].numel() for bucket in self.buckets))
        self._hooks: dict[int, Any] = {}
        self._narrows = True
        if self.overlap:
            self._watch([bucket.slots for bucket in self.buckets[:-1]])
        self.restart(0)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def local_step(self, overflows: Sequence[bool], scale: float) -> list[bool]:
        """A step without an exchange; whether each replica took it."""
        self._refresh(scale)
        taken = [not flag for flag in self._overflows(overflows, scale)]
        for good, table in zip(taken, self._tables, strict=True):
            if good:
                table.local_step()
        return taken

    def exchange_step(self, overflows: Sequence[bool], scale: float) -> bool:
        """A step with an exchange; False if it is void on all ranks."""
        self._scale = scale
        self._refresh(scale)
        stale = self._stale()
        if not stale and self.overlap:
            self._narrow()
        flags = self._overflows(overflows, scale)
        reports = self._send_all(lambda: self._reports(flags, stale=stale), in_step=True)
        if reports.stale and not reports.overflows:
            self._strike()
            self.exchange.end()
            for bucket in self.buckets:
                bucket.begun = False
            reports = self._send_all(lambda: self._reports(flags, stale=False), in_step=True)
        else:
            self.strikes = 0
        if not reports.overflows:
            self._advance()  # while the last blocks are on the wire
            self.balance.observe(self._squares(0, means=True), reports.statistic)
        self.exchange.end()
        self.restart(self.round + 1)
        return not reports.overflows

    def rendezvous(self) -> None:
        """Wait for all ranks outside of a step; an error on all of them if some are in a step."""
        self._refresh(self._scale)
        self._send_all(lambda: [header.OUTSIDE_OF_STEPS for _ in self.replicas], in_step=False)
        self.exchange.end()
        self.restart(self.round)

    def _refresh(self, scale: float) -> None:
        for table in self._tables:
            table.refresh(scale)

    def _overflows(self, flags: Sequence[bool], scale: float) -> list[bool]:
        return [flag or table.overflows(scale) for flag, table in zip(flags, self._tables, strict=True)]

    def _reports(self, overflows: Sequence[bool], *, stale: bool) -> list[tuple[float, float]]:
        """The header of each replica in a step."""
        squares = [self._squares(r) for r in range(len(self.replicas))]
        return [
            header.encode(math.nan if stale else own if own == own else 0.0, overflow=overflow)
            for own, overflow in zip(squares, overflows, strict=True)
        ]

    def _squares(self, r: int, *, means: bool = False) -> float:
        """The sum of squares of the blocks that a replica sent, or of their means over ranks."""
        buffers = [(bucket.means if means else bucket.sent)[r][: bucket.coded_elements] for bucket in self.buckets]
        return sum(self._tables[r].squares(buffer) for buffer in buffers)

    def _advance(self) -> None:
        """Take the step, then put the means of the blocks in place: at once where they have arrived."""
        strength, good, late = self.balance.adopt(), True, []
        for bucket in self.buckets:
            arrived = self.exchange.there(bucket.name)
            if not arrived:
                late.append(bucket)
            for table, means in zip(self._tables, bucket.means, strict=True):
                good &= table.advance(strength, bucket.places, means.numpy() if arrived else NOT_YET)
        if not good:
            raise ExchangeError(
                "an update is not finite though its gradient was: was the gradient changed behind torch's back, "
                "through .data or numpy? Resume from a checkpoint"
            )
        for bucket in late:
            self.exchange.wait(bucket.name)
            for table, means in zip(self._tables, bucket.means, strict=True):
                table.settle(bucket.places, means)
        for table in self._tables:
            table.mark_changed()

    # -- sending -------------------------------------------------------------------------------------------------------

    def _send_all(self, report: Callable[[], Sequence[tuple[float, float]]], *, in_step: bool) -> header.Header:
        """Send headers and what blocks have not been sent yet; return what all ranks reported.

        The last blocks are sent after the reports are in, since headers would queue behind them on a slow link: what a step
        computes once all ranks agree hides them instead.
        """
        *first, last = self.buckets
        for bucket in first:
            if not bucket.begun:
                self._fill(bucket)
                self._send(bucket)
        self._fill(last)
        for buffer, own in zip(self._headers, report(), strict=True):
            buffer.copy_(torch.tensor(own))
        self.exchange.begin(header.NAME, self._headers)
        for bucket in first:
            self.exchange.there(bucket.name)  # sums of two ranks are added up here, while the headers travel
        self.exchange.wait(header.NAME)
        self._send(last)
        give_way()  # a long computation follows
        return header.decode(self._headers[0], self.exchange.world.size, in_step=in_step)

    def _fill(self, bucket: Bucket) -> None:
        """Compute what is to be sent, from refreshed tables."""
        for sent, table in zip(bucket.sent, self._tables, strict=True):
            table.pending(bucket.places, sent)

    def _send(self, bucket: Bucket) -> None:
        for sent, buffer in zip(bucket.sent, bucket.means, strict=True):
            buffer.copy_(sent)
        bucket.begun = True
        self.exchange.begin(bucket.name, bucket.means)

    def _stale(self) -> bool:
        """Whether a gradient has changed since its blocks were sent."""
        for bucket in self.buckets:
            for sent, table in zip(bucket.sent, self._tables, strict=True):
                if bucket.begun:
                    now = self._scratch[: sent.numel()]
                    table.pending(bucket.places, now)
                    if not torch.equal(now.view(torch.int32), sent.view(torch.int32)):
                        return True
        return False

    # -- sending during backward ---------------------------------------------------------------------------------------

    def arrived(self, bucket: Bucket, index: int) -> None:
        """Backward has computed the gradient of a slot; called by its hook."""
        if not self.expects_exchange or bucket.begun:
            return  # begun: this is a second backward; `exchange_step` will find that the gradient has changed
        bucket.missing.discard(index)
        if bucket.missing:
            return
        bucket.last = index
        (table,) = self._tables
        # In order, because all ranks must send in the same: a bucket may be complete before the one in front of it.
        for ready in itertools.takewhile(lambda bucket: not bucket.missing, self.buckets[:-1]):
            if not ready.begun:
                table.refresh(self._scale, ready.slots)
                self._fill(ready)
                self._send(ready)

    def _watch(self, chosen: Sequence[Sequence[int]]) -> None:
        """Have hooks on these slots of each bucket that is sent during backward, and on no others."""
        slots, wanted = self.replicas[0].slots, set(itertools.chain(*chosen))
        for index in self._hooks.keys() - wanted:
            self._hooks.pop(index).remove()
        for bucket, indices in zip(self.buckets, chosen, strict=False):
            bucket.watched = list(indices)
            for index in set(indices) - self._hooks.keys():
                hook = partial(_arrived, weakref.ref(self), bucket, index)
                self._hooks[index] = slots[index].parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _narrow(self) -> None:
        """Where a bucket was complete with its last gradient, a hook on that one is enough from now on.

        A hook costs more than its work, because Python has left the caches since the one before. If gradients arrive in
        another order later, what was sent is stale, as when a gradient is changed after backward: see `_strike`.
        """
        if self._narrows and all(bucket.begun for bucket in self.buckets[:-1]):
            self._narrows = False
            self._watch([[bucket.last] for bucket in self.buckets[:-1]])

    def _strike(self) -> None:
        """What was sent during backward was stale. All ranks know it, and stop sending early together if it happens again.

        Until then every gradient is waited for, in case the cause is the order in which they arrive.
        """
        self.strikes += 1
        if not self.overlap:
            return
        if self.strikes < STRIKES:
            self._narrows = False
            self._watch([bucket.slots for bucket in self.buckets[:-1]])
            return
        self.overlap = False
        self._watch([])
        if self.exchange.world.local_ranks[0] == 0:
            logger.info(
                "gradients change between backward and step() (clipping, accumulation or a scaler): blocks are sent by "
                "step() from now on, not during backward"
            )

    # -- state ---------------------------------------------------------------------------------------------------------

    def restart(self, round: int) -> None:
        """Continue with the blocks of this round."""
        self.round = round
        slots = self.replicas[0].slots
        for bucket in self.buckets:
            bucket.begun, bucket.missing = False, set(bucket.watched)
            for place in bucket.places[: bucket.coded]:
                slot = slots[place[0]]
                place[3] = draw(self.codec.seed, round, slot.name, slot.info.elements)

    def reset(self, round: int) -> None:
        """Continue with this round and with empty residuals."""
        for _, residual in self._named():
            residual.zero_()
        self.restart(round)

    def state_dict(self) -> dict[str, Any]:
        return {key: residual.clone() for key, residual in self._named()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        found = [(residual, tensor_of(saved, key, residual)) for key, residual in self._named()]
        for residual, values in found:
            residual.copy_(values)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for rank, replica, own in zip(self.exchange.world.local_ranks, self.replicas, self.residuals, strict=True):
            for slot, residual in zip(replica.slots, own, strict=True):
                yield f"rank{rank}.residual.{slot.name}", residual

    def close(self) -> None:
        self._watch([])
        self.exchange.close()


def _arrived(reference: weakref.ref[BlockBackend], bucket: Bucket, slot: int, parameter: Tensor) -> None:
    """The hook on a parameter, which does not keep the backend alive."""
    if (backend := reference()) is not None:
        backend.arrived(bucket, slot)
