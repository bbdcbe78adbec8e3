"""SGD and random blocks: one pass over memory, and sums that travel while backward still runs.

The block of a tensor follows from (seed, step, name), so it is known before the gradient is. As soon as backward has left the
gradients of a bucket, what is pending on their blocks, error + update, can be handed over. `step()` computes it again: where
it differs (a gradient was clipped, unscaled or added to), the rank says so and all ranks hand over anew. The last bucket
follows what the ranks say.

Nothing of shared model, error and momentum changes before the flags of all ranks are there.

Bytes: 4 * elements / ratio and two floats, all-reduced. Memory: shared model and error, 8 bytes a parameter beside SGD's
own, and two buffers as large as the blocks. Passes: one read for the finite test, one over everything (see
`kernels.cpu.updates`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...codecs import RandomBlock
from ...codecs.randomblock import draw
from ...engine.layout import Exclude, excludes
from ...engine.sums import Sums
from ...errors import ExchangeError
from ...feedback import Balance
from ...log import logger
from ...schemes.threads import give_way
from ...schemes.world import LocalWorld
from . import head
from .buckets import Bucket, cut
from .replica import Replica
from .table import Table, unusual

STRIKES = 3
NAN = float("nan")
NOTHING = np.zeros(0, np.float32)


def fits(replica: Replica, codec: object) -> bool:
    """Whether the one pass covers this job; otherwise it takes the general way."""
    return (
        type(codec) is RandomBlock
        and type(replica.optimizer) is torch.optim.SGD
        and all(slot.parameter.is_contiguous() and not slot.mastered for slot in replica.slots)
        and not any(unusual(group) for group in replica.optimizer.param_groups)
    )


class Blocks:
    """The way of updates from gradients to parameters, for all replicas of this process."""

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
        self.errors: list[list[Tensor | None]] = [[torch.zeros_like(s.shared) for s in r.slots] for r in replicas]
        self._tables = [
            Table(replica, [error for error in errors if error is not None])
            for replica, errors in zip(replicas, self.errors, strict=True)
        ]
        for table in self._tables:
            table.look(1.0)  # momenta begin with the job, so that a state of it always has them
        slots = replicas[0].slots
        whole = {
            i for i, slot in enumerate(slots) if slot.info.elements < min_elements or excludes(exclude, slot.name)
        }
        here = isinstance(process_group, LocalWorld)
        self.overlap = overlap and not here
        # Without overlap too: gloo adds three ranks in an order that depends on where in a buffer a value lies.
        self.buckets = cut(slots, whole, codec.ratio, several=not here)
        for bucket in self.buckets:
            bucket.room(len(replicas))
        self.heads = [torch.zeros(2) for _ in replicas]
        named = {bucket.name: bucket.wire[0] for bucket in self.buckets} | {"head": self.heads[0]}
        self.exchange = Sums(named, process_group, apart="head", timeout=timeout)
        self.wires = (self.exchange,)
        self.draws = 0
        self.strikes = 0
        self._scale = 1.0
        self._scratch = torch.zeros(max(bucket.elements for bucket in self.buckets))
        self._hooks: dict[int, Any] = {}
        self._learns = True
        if self.overlap:
            self._watch([bucket.slots for bucket in self.buckets[:-1]])
        self.expects_exchange = False
        self.open_round()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def open_round(self) -> None:
        """Draw the blocks of the next exchange."""
        slots = self.replicas[0].slots
        for bucket in self.buckets:
            bucket.begun, bucket.missing = False, set(bucket.watched)
            for place in bucket.places[: bucket.coded]:
                slot = slots[place[0]]
                place[3] = draw(self.codec.seed, self.draws, slot.name, slot.info.elements)

    def _watch(self, chosen: Sequence[Sequence[int]]) -> None:
        """Have hooks on these slots of each bucket that is sent during backward, and on no others."""
        slots, wanted = self.replicas[0].slots, set(itertools.chain(*chosen))
        for index in self._hooks.keys() - wanted:
            self._hooks.pop(index).remove()
        for bucket, indices in zip(self.buckets, chosen, strict=False):
            bucket.watched = list(indices)
            for index in set(indices) - self._hooks.keys():
                hook = _hook(weakref.ref(self), bucket, index)
                self._hooks[index] = slots[index].parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def arrived(self, bucket: Bucket, index: int) -> None:
        """Backward has left the gradient of a slot; called by its hook."""
        if not self.expects_exchange or bucket.begun:
            return  # begun: this is a second backward; `step` will find that the gradient is another
        bucket.missing.discard(index)
        if bucket.missing:
            return
        bucket.last = index
        (table,) = self._tables
        # In order, because all ranks must send in the same: a bucket may be complete before the one in front of it.
        for ready in itertools.takewhile(lambda bucket: not bucket.missing, self.buckets[:-1]):
            if not ready.begun:
                table.look(self._scale, ready.slots)
                self._fill(ready)
                self._send(ready)

    def _learn(self) -> None:
        """Where a bucket was complete with its last gradient, a hook on that one is enough from now on.

        A hook costs more than what it does, because Python has left the caches since the one before. Should gradients come in
        another order some day, what was sent is not valid, as when a gradient is changed after backward: see `_strike`.
        """
        if self._learns and all(bucket.begun for bucket in self.buckets[:-1]):
            self._learns = False
            self._watch([[bucket.last] for bucket in self.buckets[:-1]])

    def local(self, bad: Sequence[bool], scale: float) -> list[bool]:
        """A step that no exchange follows; whether each replica took it."""
        from ...kernels.cpu import updates

        taken = []
        for own, table in zip(bad, self._tables, strict=True):
            table.look(scale)
            taken.append(not (own or table.bad(scale)))
            if taken[-1]:
                updates.all_drift(table.rows, table.options)
                _changed(table.replica)
        return taken

    def step(self, bad: Sequence[bool], scale: float) -> bool:
        """A step with its exchange; False if it is void on all ranks."""
        self._scale = scale
        for table in self._tables:
            table.look(scale)
        stale = self._stale()
        if not stale and self.overlap:
            self._learn()
        flags = [own or table.bad(scale) for own, table in zip(bad, self._tables, strict=True)]
        answer = self._hand_over(lambda: self._words(flags, stale=stale), in_step=True)
        if answer.stale and not answer.bad:
            self._strike()
            self.exchange.end()
            for bucket in self.buckets:
                bucket.begun = False
            answer = self._hand_over(lambda: self._words(flags, stale=False), in_step=True)
        else:
            self.strikes = 0
        self.draws += 1
        if not answer.bad:
            self._advance()  # while the last blocks are on the wire
            self.balance.observe(self._common(), answer.statistic)
        self.exchange.end()
        self.open_round()
        return not answer.bad

    def _strike(self) -> None:
        """What was sent during backward was in vain; all ranks know it, and give up together when it goes on.

        Until then every gradient is waited for, in case the order in which they come is to blame.
        """
        self.strikes += 1
        if not self.overlap:
            return
        if self.strikes < STRIKES:
            self._learns = False
            self._watch([bucket.slots for bucket in self.buckets[:-1]])
            return
        self.overlap = False
        self._watch([])
        if self.exchange.world.members[0] == 0:
            logger.info(
                "gradients change between backward and step() (clipping, accumulation or a scaler): blocks are sent by "
                "step() from now on, not during backward"
            )

    def meet(self) -> None:
        """Come together with all ranks outside of a step; an error on all of them if some are in a step."""
        for table in self._tables:
            table.look(self._scale)
        self._hand_over(lambda: [head.MEETING for _ in self.replicas], in_step=False)
        self.exchange.end()
        self.open_round()

    def _stale(self) -> bool:
        """Whether something that was handed over is not what it would be now."""
        from ...kernels.cpu import updates

        for bucket in self.buckets:
            for mine, table in zip(bucket.mine, self._tables, strict=True):
                if bucket.begun:
                    again = self._scratch[: bucket.elements]
                    updates.all_pending(table.rows, table.options, bucket.places, again.numpy())
                    if not torch.equal(again.view(torch.int32), mine.view(torch.int32)):
                        return True
        return False

    def _hand_over(self, say: Callable[[], Sequence[tuple[float, float]]], *, in_step: bool) -> head.Head:
        """Hand over what is not on its way yet, blocks and heads; return when it is known what all ranks say.

        The last blocks follow when that is known, since heads would wait behind them on a slow link: what a step has to do
        once all agree hides them instead.
        """
        *first, last = self.buckets
        for bucket in first:
            if not bucket.begun:
                self._fill(bucket)
                self._send(bucket)
        self._fill(last)
        for room, said in zip(self.heads, say(), strict=True):
            room.copy_(torch.tensor(said))
        self.exchange.begin("head", self.heads)
        for bucket in first:
            self.exchange.there(bucket.name)  # sums of two ranks are added up here, while the heads travel
        self.exchange.wait("head")
        self._send(last)
        give_way()  # what comes now computes for a while
        return head.read(self.heads[0], self.exchange.world.size, in_step=in_step)

    def _fill(self, bucket: Bucket) -> None:
        """Compute what is to be sent. Its slots have been looked at."""
        from ...kernels.cpu import updates

        for mine, table in zip(bucket.mine, self._tables, strict=True):
            updates.all_pending(table.rows, table.options, bucket.places, mine.numpy())

    def _send(self, bucket: Bucket) -> None:
        for mine, wire in zip(bucket.mine, bucket.wire, strict=True):
            wire.copy_(mine)
        bucket.begun = True
        self.exchange.begin(bucket.name, bucket.wire)

    def _words(self, flags: Sequence[bool], *, stale: bool) -> list[tuple[float, float]]:
        """What each replica says of a step."""
        from ...kernels.cpu import updates

        words = []
        for r, bad in enumerate(flags):
            own = sum(updates.squares(bucket.mine[r][: bucket.coded_elements].numpy()) for bucket in self.buckets)
            words.append(head.words(statistic=NAN if stale else own if own == own else 0.0, bad=bad))
        return words

    def _advance(self) -> None:
        """Take the step, then put the means of the blocks in place: at once where they are there already."""
        from ...kernels.cpu import updates

        strength, good, late = self.balance.adopt(), True, []
        for bucket in self.buckets:
            there = self.exchange.there(bucket.name)
            if not there:
                late.append(bucket)
            for table, wire in zip(self._tables, bucket.wire, strict=True):
                mean = wire.numpy() if there else NOTHING
                good &= updates.all_advance(table.rows, table.options, strength, bucket.places, mean)
        if not good:
            raise ExchangeError(
                "an update is not finite though its gradient was: was the gradient changed behind torch's back, "
                "through .data or numpy? Go on from a checkpoint"
            )
        for bucket in late:
            self.exchange.wait(bucket.name)
            for table, wire in zip(self._tables, bucket.wire, strict=True):
                updates.all_settle(table.rows, bucket.places, wire.numpy())
        for table in self._tables:
            _changed(table.replica)

    def _common(self) -> float:
        """The sum of squares of what all ranks sent together."""
        from ...kernels.cpu import updates

        return sum(updates.squares(bucket.wire[0][: bucket.coded_elements].numpy()) for bucket in self.buckets)

    # -- small things --------------------------------------------------------------------------------------------------

    def pending(self, r: int, index: int) -> Tensor | None:
        """What a rank has not sent of a slot, the local steps since the last exchange included."""
        return self.errors[r][index]

    def forget(self, draws: int) -> None:
        """Nothing is pending on any rank any more."""
        for errors in self.errors:
            for error in errors:
                assert error is not None
                error.zero_()
        self.restart(draws)

    def restart(self, draws: int) -> None:
        """Go on with the blocks of this number."""
        self.draws = draws
        self.open_round()

    def close(self) -> None:
        self._watch([])
        self.exchange.close()


def _changed(replica: Replica) -> None:
    """Tell autograd that the parameters were changed behind its back, as any in-place operation does."""
    torch.autograd.graph.increment_version([slot.parameter for slot in replica.slots])


def _hook(reference: weakref.ref[Blocks], bucket: Bucket, slot: int) -> Callable[[Tensor], None]:
    def arrive(parameter: Tensor) -> None:
        blocks = reference()
        if blocks is not None:
            blocks.arrived(bucket, slot)

    return arrive


def rehearse() -> None:
    """Compile every kernel."""
    from ...kernels.cpu import updates

    rows, options = np.zeros((0, 6), np.int64), np.zeros((0, 5), np.float32)
    places, block = np.zeros((0, 4), np.int64), np.zeros(3, np.float32)
    updates.all_pending(rows, options, places, block)
    updates.all_advance(rows, options, 0.5, places, block)
    updates.all_drift(rows, options)
    updates.all_settle(rows, places, block)
    updates.all_within(rows, 1.0)
    updates.squares(block)
