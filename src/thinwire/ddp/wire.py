"""Wire of a DistributedDataParallel module: what `attach` returns."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from .. import traffic
from ..codecs import Codec
from ..codecs.driver import all_finite
from ..comm.world import TorchWorld
from ..engine import files
from ..engine.ddp_module import parameters_of
from ..engine.session import Session
from ..engine.wire import Wire
from ..log import logger
from ..planner.plan import Plan, Quality
from ..profiler.trace_hooks import TraceHooks
from .hook import BucketHook

if TYPE_CHECKING:
    from ..auto.decisions import Decision
    from ..auto.tuner import AutoTuner


class DDPWire(Wire):
    """A wire whose tensors come from DDP's hook. With "auto" it has a tuner, which decides what it exchanges by."""

    def __init__(self, module: DistributedDataParallel, world: TorchWorld, session: Session, *, auto: bool) -> None:
        super().__init__(session, adopts_saved_plans=auto)
        self.hook = BucketHook(module, world, session)
        self.tuner: AutoTuner | None = None
        self._module = weakref.ref(module)
        self._trace_hooks: TraceHooks | None = None
        self.compiled_as_a_whole = False
        """Then the module takes no hooks for a trace: they would make it compile again."""

    @property
    def hooked(self) -> bool:
        """Whether DDP's gradients come here, and not only to DDP's own all-reduces."""
        return self.hook.registered

    def trace(self, steps: int = 20) -> None:
        super().trace(steps)
        module = self._module()
        if module is not None and not self.compiled_as_a_whole:
            if self._trace_hooks is not None:
                self._trace_hooks.close()
            self._trace_hooks = TraceHooks(module, self.session.recorder)

    @property
    def skipped_last_step(self) -> bool:
        """Whether the last step was void on all ranks, because a gradient was not finite somewhere."""
        module = self._module()
        if self.hooked or not self.session.safety.tests_results or module is None:
            return super().skipped_last_step
        # DDP alone tells nothing of it. Its means are the same on all ranks.
        gradients = [parameter.grad for parameter in parameters_of(module).values()]
        return not all(all_finite(gradient.reshape(-1)) for gradient in gradients if gradient is not None)

    def change(self, codec: Codec | str | Plan, chain: str | None = None, *, keep: bool = True) -> None:
        super().change(codec, chain, keep=keep)
        if self.tuner is not None:
            self.tuner.changed_by_hand()

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        super().load_state_dict(saved)
        if self.tuner is not None:
            self.tuner.resumed()

    def load(self, where: files.Where | Sequence[files.Where], *, key: str | None = None) -> None:
        super().load(where, key=key)
        if self.tuner is not None:
            self.tuner.resumed()

    def log_to(self, target: Any = None, *, every: int = 1, summary: int = 100, residual_every: int = 50) -> None:
        super().log_to(target, every=every, summary=summary, residual_every=residual_every)
        if self.tuner is not None and target is not None:
            self.tuner.decisions.record()

    def close(self) -> None:
        if self.tuner is not None:
            self.tuner.close()
        super().close()

    # -- what "auto" decided -------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """What was measured, which plans were considered, why this one, what it predicts, and what was then measured."""
        return _tuner_of(self).explain()

    @property
    def decisions(self) -> list[Decision]:
        """What "auto" found and did, by step."""
        return _tuner_of(self).decisions

    @property
    def quality(self) -> Quality:
        """What "auto" may choose from."""
        return _tuner_of(self).job.quality

    @property
    def native_seconds(self) -> float:
        """What a step took with DDP alone; 0 as long as "auto" has not measured it."""
        return _tuner_of(self).job.native_seconds


def _tuner_of(wire: DDPWire) -> AutoTuner:
    if wire.tuner is None:
        raise AttributeError(f"{wire.strategy.full} was named; only a wire of attach(ddp, 'auto') decides anything")
    return wire.tuner


def announce(wire: DDPWire) -> None:
    """Say once, on rank 0, what is compressed and how."""
    session, strategy = wire.session, wire.strategy
    if session.world.local_ranks[0] != 0:
        return
    layout = session.layout([session.job.tensors])
    coded = sum(
        s.elements for group in layout.groups for s in group.slots if group.codec != "dense" and s.role == "coded"
    )
    total = sum(tensor.elements for tensor in session.job.tensors)
    share = 100 * coded / total if total else 0.0
    keeping = [g for g, codec in zip(layout.groups, layout.codecs(), strict=True) if codec.keeps_residual]
    kept = sum(slot.elements for group in keeping for slot in group.slots if slot.role == "coded")
    memory = (8 if session.safety.protected else 4) * kept / total if total else 0.0
    codecs = [codec.at(0, session.settings) for codec in layout.codecs()]
    estimate = [c.estimate(g.info(), session.world.size) for g, c in zip(layout.groups, codecs, strict=True)]
    ranks = session.world.size
    travel = sum(traffic.all_gather(e.gathered, ranks) + traffic.all_reduce(e.summed, ranks) for e in estimate)
    how = f"about {_bytes(travel)} per step on a rank's link instead of {_bytes(traffic.dense(total, ranks))}"
    if strategy.chain:
        how = f"by the chain {strategy.chain}"
    if strategy.plan is not None and strategy.plan.predicted_seconds:
        predicted, dense = 1000 * strategy.plan.predicted_seconds, 1000 * strategy.plan.dense_seconds
        how += f"; predicted: {predicted:.1f} ms per step, {dense:.1f} dense"
    logger.info(
        "%s on %d ranks: compresses %d of %d parameters (%.1f %%), the rest travels dense; %s; residuals add %.1f bytes "
        "per parameter; dense until the buckets are final",
        strategy, session.world.size, coded, total, share, how, memory,
    )  # fmt: skip
    if session.world.size == 1:
        logger.warning("world size is 1: there is no other rank to exchange with, so compression can only cost")


def _bytes(size: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
