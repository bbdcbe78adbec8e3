"""Any optimizer and any codec: the optimizer steps, and what it changed is the update that is exchanged.

    start = x - strength * e;   the optimizer moves p from start;   update = start - p
    the codec adds the update to e and sends a part of it;   x -= mean of what was sent;   p = x - strength * e

`start` is computed again, bit for bit, from x and e: no buffer is kept for it, and the parameters' own memory carries the
updates to the codec and the means back. The flags of all ranks travel first, in a sum of two floats, so that a gradient
which is not finite changes nothing: not the optimizer's state, not e, not x.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ...codecs import Codec, GatheredCodec
from ...engine.exchange import Exchange
from ...engine.layout import Exclude
from ...engine.sums import Sums
from ...errors import AttachError
from ...feedback import Balance
from ...kernels.finite import all_finite
from ...log import logger
from ...schemes.world import LocalWorld
from . import head
from .replica import Replica, Slot


class General:
    """The way of updates from gradients to parameters, for all replicas of this process."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        codec: Codec,
        balance: Balance,
        process_group: dist.ProcessGroup | LocalWorld | None,
        *,
        exclude: Exclude,
        min_elements: int,
        timeout: timedelta | None,
    ) -> None:
        self.replicas, self.balance = replicas, balance
        named = {slot.name: slot.shared for slot in replicas[0].slots}
        self.exchange = Exchange(
            named, codec, process_group, exclude=exclude, min_elements=min_elements, timeout=timeout, protected=True
        )
        self.heads = [torch.zeros(2) for _ in replicas]
        self.meetings = Sums({"head": self.heads[0]}, process_group, timeout=timeout)
        self.wires = (self.meetings, self.exchange)
        self.expects_exchange = False
        self.moved = False
        self._sent = [0.0 for _ in replicas]
        self._common = 0.0

    @property
    def draws(self) -> int:
        assert self.exchange.runner is not None
        return self.exchange.runner.members[0].step

    @property
    def errors(self) -> list[list[Tensor | None]]:
        """What each rank has not sent, slot by slot; None where everything is sent at once."""
        assert self.exchange.runner is not None
        result: list[list[Tensor | None]] = []
        for replica, member in zip(self.replicas, self.exchange.runner.members, strict=True):
            named = dict(member.residuals.named())
            result.append([named.get(slot.name) for slot in replica.slots])
        return result

    # -- steps ---------------------------------------------------------------------------------------------------------

    def local(self, bad: Sequence[bool], scale: float) -> list[bool]:
        """A step that no exchange follows; whether each replica took it."""
        taken = [not (bad[r] or _bad(replica)) for r, replica in enumerate(self.replicas)]
        for replica, good in zip(self.replicas, taken, strict=True):
            if good:
                _step(replica, scale)
                for slot in replica.slots:
                    slot.write(slot.point.detach())
                self.moved = True
        return taken

    def step(self, bad: Sequence[bool], scale: float) -> bool:
        """A step with its exchange; False if it is void on all ranks."""
        for r, replica in enumerate(self.replicas):
            said = head.words(statistic=self._sent[r], bad=bad[r] or _bad(replica))
            self.heads[r].copy_(torch.tensor(said))
        self.meetings.reduce_([{"head": room} for room in self.heads])
        answer = head.read(self.heads[0], self.meetings.world.size, in_step=True)
        if answer.bad:
            return False
        for replica in self.replicas:
            _step(replica, scale)
        strength = self.balance.strength
        updates: list[dict[str, Tensor]] = []
        for replica, errors in zip(self.replicas, self.errors, strict=True):
            updates.append({})
            for slot, error in zip(replica.slots, errors, strict=True):
                update = detached(slot.shared, error, strength).sub_(slot.point.detach())
                carrier = slot.point.detach()
                updates[-1][slot.name] = carrier.copy_(update) if carrier.is_contiguous() else update
        if self.balance.feedback.automatic:
            self._measure_before(updates, answer.statistic)
        self.exchange.reduce_(updates)
        void = self.exchange.skipped_last_step
        if void and self.exchange.world.members[0] == 0:
            logger.warning(
                "an update is not finite though all gradients were: the step is void, but the optimizer's own state is not "
                "restored"
            )
        errors_after = self.errors
        if self.balance.feedback.automatic and not void:
            self._measure_after(updates, errors_after)
        strength = self.balance.adopt()
        for replica, errors, means in zip(self.replicas, errors_after, updates, strict=True):
            for slot, error in zip(replica.slots, errors, strict=True):
                if not void:
                    slot.shared.sub_(means[slot.name])
                slot.write(detached(slot.shared, error, strength))
        self.moved = False
        return not void

    def meet(self) -> None:
        """Come together with all ranks outside of a step; an error on all of them if some are in a step."""
        for room in self.heads:
            room.copy_(torch.tensor(head.MEETING))
        self.meetings.reduce_([{"head": room} for room in self.heads])
        head.read(self.heads[0], self.meetings.world.size, in_step=False)

    # -- the strength that follows from what is sent -------------------------------------------------------------------

    def _measure_before(self, updates: Sequence[dict[str, Tensor]], total: float) -> None:
        """What ranks sent in the step before has come with the head of this one: learn from both. Then look at e + update."""
        if self._common:
            self.balance.observe(self._common, total)
        for r, (replica, errors) in enumerate(zip(self.replicas, self.errors, strict=True)):
            self._sent[r] = sum(
                _squares(error + updates[r][slot.name])
                for slot, error in zip(replica.slots, errors, strict=True)
                if error is not None
            )

    def _measure_after(self, means: Sequence[dict[str, Tensor]], errors: Sequence[Sequence[Tensor | None]]) -> None:
        """|sent|^2 is |e + update|^2 - |e afterwards|^2, since what a codec sends is orthogonal to what it keeps."""
        self._common = sum(
            _squares(means[0][slot.name])
            for slot, error in zip(self.replicas[0].slots, errors[0], strict=True)
            if error is not None
        )
        for r, own in enumerate(errors):
            self._sent[r] -= sum(_squares(error) for error in own if error is not None)

    # -- small things --------------------------------------------------------------------------------------------------

    def pending(self, r: int, index: int) -> Tensor | None:
        """What a rank has not sent of a slot, the local steps since the last exchange included."""
        slot, error = self.replicas[r].slots[index], self.errors[r][index]
        if not self.moved:
            return error
        drifted = detached(slot.shared, error, self.balance.strength).sub_(slot.point.detach())
        return drifted if error is None else drifted.add_(error)

    def forget(self, draws: int) -> None:
        """Nothing is pending on any rank any more; the codec begins anew."""
        assert self.exchange.runner is not None
        runner = self.exchange.freeze(self.exchange.runner.layout)
        for member in runner.members:
            member.step = draws
        self.restart(draws)

    def restart(self, draws: int) -> None:
        self.moved = False
        self._common = 0.0

    def close(self) -> None:
        for wire in self.wires:
            wire.close()


def check(codec: Codec, balance: Balance) -> None:
    if balance.feedback.automatic and (isinstance(codec, GatheredCodec) or not codec.keeps_residual):
        raise AttachError(
            f"Detached('auto') compares what ranks send of the same elements, but with {codec} every rank chooses its own: "
            "give a number, Detached(0.3), or take randomblock, randomk, micro or lowrank"
        )


def detached(shared: Tensor, error: Tensor | None, strength: float) -> Tensor:
    """shared - strength * error, a new tensor; the same bits as the kernels give."""
    return shared.clone() if error is None else shared - strength * error


def _bad(replica: Replica) -> bool:
    gradients = (slot.gradient() for slot in replica.slots)
    return not all(all_finite(g.detach().reshape(-1)) for g in gradients if g is not None)


def _step(replica: Replica, scale: float) -> None:
    """Let the optimizer step. A parameter without a gradient has a zero one: its momentum goes on."""
    absent: list[Slot] = []
    for slot in replica.slots:
        gradient = slot.gradient()
        if gradient is None:
            absent.append(slot)
            slot.point.grad = torch.zeros_like(slot.point)
        elif slot.mastered:
            slot.point.grad = gradient.float()
        if scale != 1.0 and slot.point.grad is not None:
            slot.point.grad.mul_(scale)
    replica.optimizer.step()
    for slot in replica.slots:
        if slot.mastered:
            slot.point.grad = None
    for slot in absent:
        slot.point.grad = None


def _squares(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())
