"""SGD and random blocks: one pass over memory, and sums that travel while backward still runs.

The block of a tensor follows from (seed, step, name), so it is known before the gradient is. As soon as backward has left the
gradient of a parameter, what is pending on its block, error + update, can be handed over. `step()` computes it again: where
it differs (the gradient was clipped, unscaled or added to), the rank says so and all ranks hand over anew.

Nothing of shared model, error and momentum changes before the sums, and with them the flags of all ranks, are there.

Bytes: 4 * elements / ratio and two floats, all-reduced. Memory: shared model and error, 8 bytes a parameter beside SGD's
own, and two buffers as large as the blocks. Passes: one read for the finite test, one over everything (see
`kernels.cpu.updates`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ...codecs import RandomBlock
from ...codecs.randomblock import draw
from ...engine.layout import Exclude, excludes
from ...engine.sums import Sums
from ...errors import AttachError, ExchangeError
from ...feedback import Balance
from ...log import logger
from ...schemes.world import LocalWorld
from . import head
from .buckets import Bucket, Place, cut
from .replica import Replica, Slot

LIMIT = 1e30
"""A gradient beyond it counts as not finite: then momentum, error and sums stay finite too."""
STRIKES = 3
NAN = float("nan")

Floats = NDArray[np.float32]


@dataclass(slots=True)
class View:
    """A slot of one replica as the kernels see it: flat arrays, and the options of its parameter group."""

    error: Floats
    momentum: Floats
    gradient: Floats
    point: Floats
    options: Floats


def fits(replica: Replica, codec: object) -> bool:
    """Whether the one pass covers this job; otherwise it takes the general way."""
    return (
        type(codec) is RandomBlock
        and type(replica.optimizer) is torch.optim.SGD
        and all(slot.parameter.is_contiguous() and not slot.mastered for slot in replica.slots)
        and not any(_unusual(group) for group in replica.optimizer.param_groups)
    )


def _unusual(group: dict[str, Any]) -> str | None:
    for option in ("dampening", "maximize", "differentiable"):
        if group.get(option):
            return option
    return None


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
        self._flat_errors = [[e.view(-1).numpy() for e in own if e is not None] for own in self.errors]
        self._shared = [[slot.shared.view(-1).numpy() for slot in replica.slots] for replica in replicas]
        for replica in replicas:
            _make_momenta(replica)
        slots = replicas[0].slots
        small = (
            i for i, slot in enumerate(slots) if slot.info.elements < min_elements or excludes(exclude, slot.name)
        )
        self.overlap = overlap and not isinstance(process_group, LocalWorld)
        self.buckets = cut(slots, set(small), codec.ratio, overlap=self.overlap)
        for bucket in self.buckets:
            bucket.room(len(replicas))
        self.heads = [torch.zeros(2) for _ in replicas]
        named = {bucket.name: bucket.wire[0] for bucket in self.buckets} | {"head": self.heads[0]}
        self.exchange = Sums(named, process_group, timeout=timeout)
        self.wires = (self.exchange,)
        self.draws = 0
        self.strikes = 0
        self._scale = 1.0
        self._zeros = torch.zeros(0)
        self._scratch = torch.zeros(max(bucket.elements for bucket in self.buckets))
        self._hooks: list[Any] = []
        self._seen: dict[int, tuple[int, int, float]] = {}
        for bucket in self.buckets if self.overlap else ():
            for place in bucket.places:
                parameter, hook = slots[place.slot].parameter, _hook(weakref.ref(self), bucket, place.slot)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self.expects_exchange = False
        self.open_round()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def open_round(self) -> None:
        """Draw the blocks of the next exchange."""
        slots = self.replicas[0].slots
        for bucket in self.buckets:
            bucket.begun, bucket.missing = False, {place.slot for place in bucket.places}
            for place in bucket.places:
                if place.coded:
                    slot = slots[place.slot]
                    place.start = draw(self.codec.seed, self.draws, slot.name, slot.info.elements)

    def arrived(self, bucket: Bucket, index: int) -> None:
        """Backward has left the gradient of a slot; called by its hook."""
        if not self.overlap:
            return
        from ...kernels.cpu import updates

        gradient = self.replicas[0].slots[index].gradient()
        assert gradient is not None
        # Tested while it is in the cache; `step` need not read it again, unless somebody changes it.
        magnitude = updates.largest(gradient.detach().contiguous().view(-1).numpy())
        self._seen[index] = (gradient.data_ptr(), gradient._version, magnitude)
        if not self.expects_exchange or bucket.begun:
            return  # begun: this is a second backward; `step` will find that the gradient is another
        bucket.missing.discard(index)
        if bucket.missing:
            return
        groups = self.replicas[0].options()
        # In order, because all ranks must send in the same: a bucket may be complete before the one in front of it.
        for ready in itertools.takewhile(lambda bucket: not bucket.missing, self.buckets[:-1]):
            if not ready.begun:
                for place in ready.places:
                    view = self._view(0, place.slot, _numbers(groups[place.slot], self._scale))
                    _pend(view, place, ready.mine[0][place.offset : place.offset + place.length])
                self._begin(ready)

    def local(self, bad: Sequence[bool], scale: float) -> list[bool]:
        """A step that no exchange follows; whether each replica took it."""
        from ...kernels.cpu import updates

        taken = []
        for r, replica in enumerate(self.replicas):
            views = self._look(r, scale)
            taken.append(not (bad[r] or self._any_bad(r, views, scale)))
            if taken[-1]:
                for slot, view in zip(replica.slots, views, strict=True):
                    updates.drift(view.error, view.momentum, view.gradient, view.point, view.options)
                    torch.autograd.graph.increment_version(slot.parameter)
        return taken

    def step(self, bad: Sequence[bool], scale: float) -> bool:
        """A step with its exchange; False if it is void on all ranks."""
        self._scale = scale
        views = [self._look(r, scale) for r in range(len(self.replicas))]
        stale = self._fill(views)
        if stale:
            self._seen.clear()
        flags = [own or self._any_bad(r, views[r], scale) for r, own in enumerate(bad)]
        answer = self._ask(flags, stale=stale)
        if answer.stale and not answer.bad:
            self._strike()
            self.exchange.end()
            for bucket in self.buckets:
                bucket.begun = False
            self._fill(views)
            answer = self._ask(flags, stale=False)
        else:
            self.strikes = 0
        self.draws += 1
        if not answer.bad:
            self._advance(views)  # while the last blocks are on the wire
        self.exchange.end()
        if not answer.bad:
            self._settle(views, answer.statistic)
        self.open_round()
        return not answer.bad

    def _strike(self) -> None:
        """What was sent during backward was in vain; all ranks know it, and give up together when it goes on."""
        self.strikes += 1
        if self.overlap and self.strikes == STRIKES:
            self.overlap = False
            if self.exchange.world.members[0] == 0:
                logger.info(
                    "gradients change between backward and step() (clipping, accumulation or a scaler): blocks are sent "
                    "by step() from now on, not during backward"
                )

    def meet(self) -> None:
        """Come together with all ranks outside of a step; an error on all of them if some are in a step."""
        for bucket in self.buckets[:-1]:
            self._begin(bucket)
        self._say([head.MEETING for _ in self.replicas], in_step=False)
        self.exchange.end()
        self.open_round()

    def _fill(self, views: Sequence[Sequence[View]]) -> bool:
        """Hand over what was not handed over, all but the last; whether something that was is not valid any more."""
        stale = False
        for bucket in self.buckets:
            for mine, own in zip(bucket.mine, views, strict=True):
                out = self._scratch if bucket.begun else mine
                for place in bucket.places:
                    _pend(own[place.slot], place, out[place.offset : place.offset + place.length])
                if bucket.begun:
                    again, before = (t[: bucket.elements].view(torch.int32) for t in (out, mine))
                    stale |= not torch.equal(again, before)
            if bucket is not self.buckets[-1]:
                self._begin(bucket)
        return stale

    def _begin(self, bucket: Bucket) -> None:
        if bucket.begun:
            return
        for mine, wire in zip(bucket.mine, bucket.wire, strict=True):
            wire.copy_(mine)
        bucket.begun = True
        self.exchange.begin(bucket.name, bucket.wire)

    def _ask(self, flags: Sequence[bool], *, stale: bool) -> head.Head:
        from ...kernels.cpu import updates

        words = []
        for r, bad in enumerate(flags):
            own = sum(updates.squares(bucket.mine[r][: bucket.coded].numpy()) for bucket in self.buckets)
            words.append(head.words(statistic=NAN if stale else own if own == own else 0.0, bad=bad))
        return self._say(words, in_step=True)

    def _say(self, words: Sequence[tuple[float, float]], *, in_step: bool) -> head.Head:
        """Exchange the heads, and begin the last bucket, which need not be there to know what all ranks say."""
        for room, said in zip(self.heads, words, strict=True):
            room.copy_(torch.tensor(said))
        self.exchange.begin("head", self.heads)
        self._begin(self.buckets[-1])
        self.exchange.wait("head")
        return head.read(self.heads[0], self.exchange.world.size, in_step=in_step)

    def _advance(self, views: Sequence[Sequence[View]]) -> None:
        from ...kernels.cpu import updates

        strength = self.balance.adopt()
        for shared, own in zip(self._shared, views, strict=True):
            for x, view in zip(shared, own, strict=True):
                arrays = (x, view.error, view.momentum, view.gradient, view.point)
                if not updates.advance(*arrays, view.options, strength):
                    raise ExchangeError(
                        "an update is not finite though its gradient was: was the gradient changed behind torch's back, "
                        "through .data or numpy? Go on from a checkpoint"
                    )

    def _settle(self, views: Sequence[Sequence[View]], statistic: float) -> None:
        from ...kernels.cpu import updates

        for r, replica in enumerate(self.replicas):
            for bucket in self.buckets:
                wire = bucket.wire[r].numpy()
                for place in bucket.places:
                    view = views[r][place.slot]
                    mean = wire[place.offset : place.offset + place.length]
                    updates.settle(self._shared[r][place.slot], view.error, view.point, place.start, mean)
            for slot in replica.slots:
                # Tell autograd that the parameter was changed behind its back, as any in-place operation does.
                torch.autograd.graph.increment_version(slot.parameter)
        common = sum(updates.squares(bucket.wire[0][: bucket.coded].numpy()) for bucket in self.buckets)
        self.balance.observe(common, statistic)

    # -- small things --------------------------------------------------------------------------------------------------

    def _look(self, r: int, scale: float) -> list[View]:
        """What every slot of a replica holds at this moment."""
        _make_momenta(self.replicas[r])
        groups = self.replicas[r].options()
        numbers = {id(group): _numbers(group, scale) for group in groups}
        return [self._view(r, i, numbers[id(group)]) for i, group in enumerate(groups)]

    def _view(self, r: int, index: int, options: Floats) -> View:
        slot = self.replicas[r].slots[index]
        momentum = self.replicas[r].optimizer.state[slot.point].get("momentum_buffer")
        gradient = slot.gradient()
        return View(
            self._flat_errors[r][index],
            np.empty(0, np.float32) if momentum is None else momentum.view(-1).numpy(),
            self._nothing(slot) if gradient is None else gradient.detach().contiguous().view(-1).numpy(),
            slot.point.detach().view(-1).numpy(),
            options,
        )

    def _any_bad(self, r: int, views: Sequence[View], scale: float) -> bool:
        from ...kernels.cpu import updates

        seen, self._seen = self._seen, {}
        for index, (slot, view) in enumerate(zip(self.replicas[r].slots, views, strict=True)):
            gradient = slot.parameter.grad
            place, version, magnitude = seen.get(index, (0, 0, 0.0))
            if gradient is None or (place, version) != (gradient.data_ptr(), gradient._version):
                magnitude = updates.largest(view.gradient)
            if not magnitude <= LIMIT / scale:
                return True
        return False

    def _nothing(self, slot: Slot) -> Floats:
        """The gradient of a parameter that backward did not meet: zero, so that momentum and error go on."""
        if self._zeros.numel() < slot.info.elements:
            self._zeros = torch.zeros(slot.info.elements)
        return self._zeros[: slot.info.elements].numpy()

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
        for hook in self._hooks:
            hook.remove()
        self.exchange.close()


def _numbers(group: dict[str, Any], scale: float) -> Floats:
    option = _unusual(group)
    if option:
        raise AttachError(f"{option} was switched on after LocalUpdates was made; make it anew")
    nesterov = float(bool(group["nesterov"]))
    return np.array([group["lr"], group["momentum"], group["weight_decay"], scale, nesterov], np.float32)


def _pend(view: View, place: Place, out: Tensor) -> None:
    from ...kernels.cpu import updates

    updates.pending(view.error, view.momentum, view.gradient, view.point, view.options, place.start, out.numpy())


def _make_momenta(replica: Replica) -> None:
    """Momentum lives where SGD keeps it, and begins at zero, as SGD's does."""
    for slot, group in zip(replica.slots, replica.options(), strict=True):
        if group["momentum"] and replica.optimizer.state[slot.point].get("momentum_buffer") is None:
            replica.optimizer.state[slot.point]["momentum_buffer"] = torch.zeros_like(slot.shared)


def _hook(reference: weakref.ref[Blocks], bucket: Bucket, slot: int) -> Callable[[Tensor], None]:
    def arrive(parameter: Tensor) -> None:
        blocks = reference()
        if blocks is not None:
            blocks.arrived(bucket, slot)

    return arrive


def rehearse() -> None:
    """Compile every kernel."""
    from ...kernels.cpu import updates

    x, e, m, g, p = (np.ones(8, np.float32) for _ in range(5))
    options, block = np.array([0.1, 0.9, 0.0, 1.0, 0.0], np.float32), np.zeros(3, np.float32)
    updates.pending(e, m, g, p, options, 6, block)
    updates.advance(x, e, m, g, p, options, 0.5)
    updates.drift(e, m, g, p, options)
    updates.settle(x, e, p, 6, block)
    updates.largest(g)
    updates.squares(g)
