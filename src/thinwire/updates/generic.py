"""Backend for any optimizer and any codec: the optimizer steps, and what it changed is the update that is exchanged.

    start = x - strength * residual;   the optimizer moves p from start;   update = start - p
    the codec adds the update to the residual and sends a part;   x -= mean of what was sent;   p = x - strength * residual

`start` is recomputed, bit for bit, from x and the residual: no buffer is kept for it, and the parameters' own memory carries
the updates to the codec and the means back. The headers of all ranks travel first, in an all-reduce of two floats, so that a
gradient that is not finite changes nothing: not the optimizer's state, not the residual, not x.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..codecs import Codec
from ..codecs.driver import all_finite
from ..comm.world import LocalWorld
from ..engine.direct_reducer import DirectReducer
from ..engine.exchange import Exchange
from ..engine.executor import Executor
from ..engine.layout import Exclude
from ..feedback import Balance
from ..log import logger
from . import header
from .replica import ParameterSlot, Replica, detached


class GenericBackend:
    """Any optimizer's steps and any codec, for all replicas of this process."""

    one_pass: ClassVar[bool] = False

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
        self._headers = [torch.zeros(2) for _ in replicas]
        self._reducer = DirectReducer({header.NAME: self._headers[0]}, process_group, timeout=timeout)
        self.wires: Sequence[Exchange] = (self._reducer, self.exchange)
        self.expects_exchange = False
        self._sent = [0.0 for _ in replicas]
        self._common = 0.0

    @property
    def _executor(self) -> Executor:
        return self.exchange.executor

    @property
    def round(self) -> int:
        return self._executor.rank_states[0].step

    @property
    def residuals(self) -> list[list[Tensor | None]]:
        """What each replica has not sent, per slot; None where everything is sent at once."""
        named = [dict(rank_state.residuals.named()) for rank_state in self._executor.rank_states]
        pairs = zip(self.replicas, named, strict=True)
        return [[own.get(slot.name) for slot in replica.slots] for replica, own in pairs]

    # -- steps ---------------------------------------------------------------------------------------------------------

    def local_step(self, overflows: Sequence[bool], scale: float) -> list[bool]:
        """A step without an exchange; whether each replica took it."""
        taken = [not (overflows[r] or _overflows(replica)) for r, replica in enumerate(self.replicas)]
        for replica, good in zip(self.replicas, taken, strict=True):
            if good:
                _step(replica, scale)
                for slot in replica.slots:
                    slot.write(slot.point.detach())
        return taken

    def exchange_step(self, overflows: Sequence[bool], scale: float) -> bool:
        """A step with an exchange; False if it is void on all ranks."""
        pairs = enumerate(zip(self.replicas, overflows, strict=True))
        reports = [header.encode(self._sent[r], overflow=flag or _overflows(own)) for r, (own, flag) in pairs]
        answer = self._report(reports, in_step=True)
        if answer.overflows:
            return False
        updates = self._updates(scale)
        if self.balance.feedback.automatic:
            self._measure_before(updates, answer.statistic)
        self.exchange.reduce_(updates)
        void, residuals = self.exchange.skipped_last_step, self.residuals
        if void and self.exchange.world.local_ranks[0] == 0:
            logger.warning(
                "an update is not finite though all gradients were: the step is void, but the optimizer's own state is not "
                "restored"
            )
        if self.balance.feedback.automatic and not void:
            self._measure_after(updates, residuals)
        strength = self.balance.adopt()
        for replica, own, means in zip(self.replicas, residuals, updates, strict=True):
            for slot, residual in zip(replica.slots, own, strict=True):
                if not void:
                    slot.shared.sub_(means[slot.name])
                slot.write(detached(slot.shared, residual, strength))
        return not void

    def rendezvous(self) -> None:
        """Wait for all ranks outside of a step; an error on all of them if some are in a step."""
        self._report([header.OUTSIDE_OF_STEPS for _ in self.replicas], in_step=False)

    def _report(self, reports: Sequence[tuple[float, float]], *, in_step: bool) -> header.Header:
        for buffer, own in zip(self._headers, reports, strict=True):
            buffer.copy_(torch.tensor(own))
        self._reducer.reduce_([{header.NAME: buffer} for buffer in self._headers])
        return header.decode(self._headers[0], self._reducer.world.size, in_step=in_step)

    def _updates(self, scale: float) -> list[dict[str, Tensor]]:
        """Let each optimizer step; its update by name, where possible in the parameter's own memory."""
        for replica in self.replicas:
            _step(replica, scale)
        updates: list[dict[str, Tensor]] = []
        for replica, own in zip(self.replicas, self.residuals, strict=True):
            updates.append({})
            for slot, residual in zip(replica.slots, own, strict=True):
                point = slot.point.detach()
                update = detached(slot.shared, residual, self.balance.strength).sub_(point)
                updates[-1][slot.name] = point.copy_(update) if point.is_contiguous() else update
        return updates

    # -- the strength that follows from what is sent -------------------------------------------------------------------

    def _measure_before(self, updates: Sequence[dict[str, Tensor]], total: float) -> None:
        """This step's headers carry what ranks sent in the step before: observe both. Then measure residual + update."""
        if self._common:
            self.balance.observe(self._common, total)
        for r, (replica, own) in enumerate(zip(self.replicas, self.residuals, strict=True)):
            self._sent[r] = sum(
                _squares(residual + updates[r][slot.name])
                for slot, residual in zip(replica.slots, own, strict=True)
                if residual is not None
            )

    def _measure_after(self, means: Sequence[dict[str, Tensor]], residuals: Sequence[Sequence[Tensor | None]]) -> None:
        """|sent|^2 is |residual + update|^2 - |residual afterwards|^2: a codec sends what is orthogonal to what it keeps."""
        self._common = sum(
            _squares(means[0][slot.name])
            for slot, residual in zip(self.replicas[0].slots, residuals[0], strict=True)
            if residual is not None
        )
        for r, own in enumerate(residuals):
            self._sent[r] -= sum(_squares(residual) for residual in own if residual is not None)

    # -- state ---------------------------------------------------------------------------------------------------------

    def restart(self, round: int) -> None:
        """Continue with a state that was loaded, which has this round."""
        self._common = 0.0

    def reset(self, round: int) -> None:
        """Continue with this round, with empty residuals and a codec that has learnt nothing."""
        executor = self.exchange.session.make(self._executor.layout)
        self.exchange.session.use(executor)
        for rank_state in executor.rank_states:
            rank_state.step = round
        self.restart(round)

    def state_dict(self) -> dict[str, Any]:
        return self.exchange.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.exchange.load_state_dict(saved)

    def close(self) -> None:
        for wire in self.wires:
            wire.close()


def _overflows(replica: Replica) -> bool:
    gradients = (slot.gradient() for slot in replica.slots)
    return not all(all_finite(g.detach().reshape(-1)) for g in gradients if g is not None)


def _step(replica: Replica, scale: float) -> None:
    """Let the optimizer step. A parameter without a gradient gets a zero one, so that its momentum advances."""
    absent: list[ParameterSlot] = []
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
    for slot in [*absent, *(slot for slot in replica.slots if slot.mastered)]:
        slot.point.grad = None


def _squares(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())
