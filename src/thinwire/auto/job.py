"""What all phases of the tuner share: one job, what is known of it, and how it is changed."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch.nn.parallel import DistributedDataParallel

from ..comm.world import TorchWorld
from ..engine.strategy import Strategy
from ..engine.warmup import compile_kernels
from ..engine.watchdog import Watchdog
from ..engine.wire import Wire
from ..errors import ThinwireError
from ..planner.plan import Plan, Quality
from ..planner.profile import Profile
from ..planner.replan import PlanThread, expected_step, milliseconds
from .changes import Changes
from .decisions import Decisions
from .meter import Meter
from .monitor import PERIOD, Monitor, Snapshot, probe_bytes
from .patience import Patience
from .pauses import Pauses
from .plan_cache import PlanFile
from .profiling import Profiling
from .sanity import TWICE
from .shared import from_rank_0, mean

LEAST_GAIN = 0.04
"""Of a step: what a hook may cost. A plan that promises less is not worth one, because a hook cannot be taken out again: of
small models a dense exchange through Python takes some percent more. Where threads wait for cores it costs as much more."""

HYSTERESIS = 0.05
"""Of a step: what another plan must promise, once one is running or dense steps are faster; and how far predictions are off."""

APART = 1.5
"""What was measured is so many times what was predicted, or the other way round: links may have changed meanwhile."""

CHECKED = 5
"""Steps of DDP alone that are watched once more in that case; and steps after a trial that was slower, before more is done."""


class Hook(Protocol):
    """DDP's communication hook, as far as the tuner needs it."""

    registered: bool

    def register(self) -> None: ...


class TunedJob:
    """One rank's part of a job that is tuned. `phase` is called after every step, on all ranks alike."""

    def __init__(
        self,
        wire: Wire,
        module: DistributedDataParallel,
        world: TorchWorld,
        hook: Hook,
        quality: Quality,
        plan_file: str | Path | None,
    ) -> None:
        self.wire, self.quality, self.world, self.hook = wire, quality, world, hook
        self._module = weakref.ref(module)
        self.decisions = Decisions(wire.session)
        self.watchdog = Watchdog({tensor.name: tensor.elements for tensor in wire.session.job.tensors})
        self.file = PlanFile(plan_file, quality, wire.session.job.tensors, world)
        self.phase: Callable[[], None] = nothing
        self.profile: Profile | None = None
        self.borders: list[int] = []
        self.native_seconds = self.baseline = 0.0
        self.patience, self.pauses = Patience(), Pauses()
        self.begun: float | None = None
        self.seen: list[float] = []
        self.recent: deque[float] = deque(maxlen=PERIOD)
        self.monitor, self.changes = Monitor(world, self.watchdog), Changes()
        self.search: PlanThread | None = None
        self._profiling: Profiling | None = None
        self._meter: Meter | None = None

    @property
    def module(self) -> DistributedDataParallel | None:
        return self._module()

    def watch(self, on_step: Callable[[], None]) -> None:
        """Look at every step from now on."""
        module = self.module
        assert module is not None
        self._profiling = Profiling(module, on_step)
        self._meter = Meter(self._profiling, self.world)

    @property
    def watched(self) -> bool:
        return self._meter is not None

    @property
    def profiling(self) -> Profiling:
        assert self._profiling is not None
        return self._profiling

    @property
    def meter(self) -> Meter:
        assert self._meter is not None
        return self._meter

    @meter.setter
    def meter(self, meter: Meter) -> None:
        self._meter = meter

    def rest(self, phase: Callable[[], None]) -> None:
        """No profile is wanted any more; what was seen so far says nothing about what comes now."""
        if self.watched:
            self.profiling.rest()
        self.seen = []
        self.recent.clear()
        self.monitor.rest()
        self.changes = Changes()
        self.phase = phase

    @property
    def how(self) -> str:
        return "gradients travel dense" if self.hook.registered else "DDP stays alone, no hook is registered"

    def observe(self) -> Snapshot | None:
        meter = self.meter
        assert meter is not None
        session = self.wire.session
        self.recent.append(meter.step())
        executor = session.executor if not session.direct.last else None
        return self.monitor.step(
            (meter.step(), meter.stretched()),
            executor.rank_states[0] if executor is not None else None,
            self.search is not None and self.search.done,
            lambda: meter.message(probe_bytes(self.profile, self.wire.plan)),
            meter.load,
        )

    def go_over(self, strategy: Plan | str) -> None:
        """To another way; a hook is registered when it is needed for the first time."""
        new = Strategy.of(strategy)
        compile_kernels(self.world.parent, new)
        self.wire.session.change(strategy, None, keep=True)
        self.watchdog.forget()
        if not new.direct:
            self.hook.register()

    def save(self, plan: Plan) -> None:
        if self.world.rank != 0:
            return
        try:
            self.file.save(plan, self.profile)
        except (OSError, ThinwireError) as error:  # rank 0 alone gets here: it must go on as the others do
            self.decisions.add(f"the plan could not be kept for the next run: {error}")

    def links_now(self, step: float) -> float | None:
        """How many times the seconds of the profile links need for a byte; None if that cannot be true, or cannot be afforded.

        step  what a step takes now: what links say is checked against it
        """
        profile, plan = self.profile, self.wire.plan
        assert profile is not None
        passed = self.meter.clock() - self.begun if self.begun is not None else 0.0
        if Pauses.enough(*mean(self.world, self.pauses.total, passed)):
            self.decisions.add("training has stood still for long enough: links are not measured again for now")
            return None
        now, before = self.meter.link(min(0.3, max(0.1, step))), profile.link("all_gather", "flat")
        (small, _), (large, _) = now.points[0], now.points[-1]
        difference = max(before.seconds(large) - before.seconds(small), 1e-9)
        (links,) = mean(self.world, max((now.seconds(large) - now.seconds(small)) / difference, 1e-3))
        expected: float = from_rank_0(self.world, lambda: expected_step(profile, plan, links, self.borders), float)
        if expected <= TWICE * step:
            return links
        told = f"links seem to pass a byte in {links:.2f} times the seconds, by which a step would take"
        self.decisions.add(
            f"{told} {milliseconds(expected)} and not {milliseconds(step)}: the machine is too busy to tell"
        )
        return None

    def close(self) -> None:
        if self.watched:
            self.profiling.close()


def alone(seconds: float) -> str:
    return f"a step takes {milliseconds(seconds)} with DDP alone"


def apart(one: float, other: float) -> bool:
    return max(one, other) > APART * min(one, other)


def nothing() -> None:
    """After an alarm, or a change by hand, nothing is tried again."""
