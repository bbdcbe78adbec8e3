"""Auto-tuner: measures a job, plans it, switches to the plan, checks that it is faster, and goes on monitoring.

    watching   DDP alone, without a hook, for some steps; then links and codecs are measured between two of them
    trying     by the plan, for some steps, which are compared with those before
    running    what was chosen is kept; every few steps all ranks look together at step time, links and what is applied

Everything here happens between two steps, in the thread that trains, and all ranks do the same: they see as many steps, and
whatever decides is the mean over all of them. Only the search for another plan runs beside the training, on rank 0.
"""

from __future__ import annotations

import functools
import statistics
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from torch.nn.parallel import DistributedDataParallel

from ..comm.world import TorchWorld
from ..engine import fits
from ..engine.strategy import Strategy
from ..engine.warmup import compile_kernels
from ..engine.watchdog import Watchdog
from ..engine.wire import Wire
from ..errors import ThinwireError
from ..planner.drift import Cusum
from ..planner.plan import Plan, Quality
from ..planner.profile import Profile
from ..planner.replan import (
    Choice,
    ReplanRequest,
    ReplanThread,
    best_plan_fitted,
    ddp_plan,
    is_dense,
    milliseconds,
    predict_ddp,
)
from ..planner.search import by_buckets
from .candidates import ROUNDS, candidates
from .decisions import Decisions
from .meter import Meter
from .monitor import Monitor, Snapshot, probe_bytes
from .plan_cache import Found, PlanFile
from .profiling import Profiling
from .shared import from_rank_0, mean

SETTLE, WINDOW = 8, 10
"""Steps in which thresholds settle, and steps that are compared."""

LEAST_GAIN = 0.04
"""Of a step: what a hook may cost. A plan that promises less is not worth one, because a hook cannot be taken out again: of
small models a dense exchange through Python takes some percent more. Where threads wait for cores it costs as much more."""

HYSTERESIS = 0.05
"""Of a step: what another plan must promise, once one is running or dense steps are faster; and how far predictions are off."""

APART = 1.5
"""What was measured is so many times what was predicted, or the other way round: links may have changed meanwhile."""

CHECKED = 5
"""Steps of DDP alone that are watched once more in that case."""

CROWDED, MOST_CROWDED = 1.2, 2.0
"""Threads for every core from which on it is worth a word, and beyond which a hook is not taken to cost still more: plans
that promise a fifth of a step are worth a trial wherever they run."""

LONGEST_MEASUREMENT = 12.0


class Hook(Protocol):
    """DDP's communication hook, as far as the tuner needs it."""

    registered: bool

    def register(self) -> None: ...


class AutoTuner:
    """Decides by which codecs and chains a wire exchanges, and changes it between two steps."""

    def __init__(
        self,
        wire: Wire,
        module: DistributedDataParallel,
        world: TorchWorld,
        hook: Hook,
        quality: Quality,
        plan_file: str | Path | None,
    ) -> None:
        self.wire, self.quality = wire, quality
        self.decisions = Decisions(wire.session)
        self.native_seconds = 0.0
        self.watchdog = Watchdog({tensor.name: tensor.elements for tensor in wire.session.job.tensors})
        self._module, self._world, self._hook = weakref.ref(module), world, hook
        self._phase: Callable[[], None] = self._watching
        self._profile: Profile | None = None
        self._borders: list[int] = []
        self._before = wire.strategy
        self._plain: Plan | None = None
        self._baseline = 0.0
        self._trial: list[float] = []
        self._paused = self._planning = False
        self._monitor = Monitor(world, self.watchdog)
        self._step_time, self._link_time = Cusum(), _watch_on_links()
        self._search: ReplanThread | None = None
        self._file = PlanFile(plan_file, quality, wire.session.job.tensors, world)
        self._profiling: Profiling | None = None
        self.meter: Meter | None = None

    def begin(self) -> None:
        """Take the plan of an earlier run; watch the job if there is none. A collective."""
        if self._world.size == 1:
            self.decisions.add(
                "world size is 1, there is no other rank to exchange with: DDP stays alone, no hook is registered"
            )
            return
        self._world.prepare([(round_, "flat") for round_ in range(ROUNDS)])
        saved = self._saved_plan()
        module = self._module()
        assert module is not None
        self._profiling = Profiling(module, self._after_step)
        self.meter = Meter(self._profiling, self._world)
        if saved is None:
            self.decisions.add("watching DDP alone, without a hook, for some steps")
        elif is_dense(saved):
            self.decisions.add(
                f"by the plan {self._file.path} of an earlier run DDP stays alone, no hook is registered"
            )
            self._rest(self._running)
        else:
            self._baseline = saved.dense_seconds
            self._rest(self._running)
            self._switch(saved, f"by the plan {self._file.path} of an earlier run")

    def _rest(self, phase: Callable[[], None]) -> None:
        """No profile is wanted any more; what was seen so far says nothing about what comes now."""
        if self._profiling is not None:
            self._profiling.rest()
        self._trial = []
        self._monitor.rest()
        self._step_time, self._link_time = Cusum(), _watch_on_links()
        self._phase = phase

    # -- between two steps ---------------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        module = self._module()
        if self.wire.error is not None or module is None:
            return
        if not self._hook.registered:
            session = self.wire.session
            session.progress.dense_steps += 1
            assert self.meter is not None
            session.recorder.alone(session.steps, self.meter.step())
        if module._join_config.enable:
            # Ranks that have joined take no step, so there is no moment at which all of them could speak.
            if not self._paused:
                self.decisions.add("inside join() nothing is measured or changed, because ranks may end before others")
            self._paused = True
            self._monitor.rest()
            return
        try:
            self._phase()
        except ThinwireError as error:  # on all ranks: whatever fails here was agreed on
            if self.wire.error is not None:
                raise
            self.decisions.add(f"nothing further is tried: {error}", loud=True)
            self._rest(_nothing)

    def _watching(self) -> None:
        profiling, meter = self._profiling, self.meter
        assert profiling is not None
        assert meter is not None
        if not profiling.ready:
            return
        found = meter.compute()
        native, compute, crowd = mean(
            self._world, found.wall, found.forward + found.backward + found.optimizer, found.crowd
        )
        words = f"{milliseconds(compute)} of it computation"
        if native - compute < LEAST_GAIN * native:
            self.native_seconds = self._baseline = native
            self._stay(f"{_alone(native)}, {words}: no method can save {LEAST_GAIN:.0%}")
            return
        budget = min(LONGEST_MEASUREMENT, max(2.0, 20 * native))
        profile = meter.profile(candidates(self.quality, self._world, budget), budget)
        self._borders = profiling.borders(profile)
        self._profile = profile = by_buckets(profile, self._borders)
        expected: float = from_rank_0(self._world, lambda: predict_ddp(profile, self._borders), float)
        if _apart(native, expected):
            expectation = f"by its links it should take {milliseconds(expected)}"
            self.decisions.add(f"{_alone(native)}, {expectation}: watching {CHECKED} more steps")
            self._rest(functools.partial(self._checking, profile, words, crowd))
        else:
            self._weigh(profile, native, words, crowd)

    def _checking(self, profile: Profile, words: str, crowd: float) -> None:
        """DDP alone once more, because its steps and the links, which were measured after them, did not fit."""
        assert self.meter is not None
        self._trial.append(self.meter.step())
        if len(self._trial) == CHECKED:
            (native,) = mean(self._world, statistics.median(self._trial))
            self._weigh(profile, native, words, crowd)

    def _weigh(self, profile: Profile, native: float, words: str, crowd: float) -> None:
        """Whether the best plan is worth a hook. `crowd`: how many threads want each core."""
        self.native_seconds = self._baseline = native
        choice: Choice = from_rank_0(
            self._world, lambda: best_plan_fitted(profile, self.quality, self._borders, native), Choice
        )
        self._profile = choice.profile
        plan, predicted, least = choice.plan, choice.plan.predicted_seconds, LEAST_GAIN * min(crowd, MOST_CROWDED)
        gain = 1.0 - predicted / native
        words = f"{_alone(native)}, {words}; the best plan is predicted at {milliseconds(predicted)}, {gain:.0%} less"
        if is_dense(plan) or gain < least:
            reason = f", with {crowd:.1f} threads for every core" if crowd > CROWDED else ""
            self._stay(f"{words}, where a hook may cost {least:.0%}{reason}", choice.considered)
        else:
            self._switch(plan, words, choice.considered, choice.plain)

    def _stay(self, words: str, considered: Sequence[str] = ()) -> None:
        how = "gradients travel dense" if self._hook.registered else "DDP stays alone, no hook is registered"
        self.decisions.add(f"{words}; {how}", considered)
        if self._profile is not None:
            self._save(ddp_plan(self._profile, self.quality, self.native_seconds, self._borders))
        self._rest(self._running)

    def _switch(self, plan: Plan, words: str, considered: Sequence[str] = (), plain: Plan | None = None) -> None:
        """From the next step on by this plan, on trial; `plain` is tried too if it promises more than this one keeps."""
        self._before, self._plain = self.wire.strategy, plain
        self._go_over(plan)
        self.decisions.add(f"{words}; switching to {self.wire.strategy}", considered)
        self._rest(self._trying)

    def _trying(self) -> None:
        assert self.meter is not None
        assert self.wire.plan is not None
        self._trial.append(self.meter.step())
        snapshot = self._observe()
        if snapshot is not None and snapshot.alarm:
            self._give_up(snapshot.alarm)
            return
        if len(self._trial) < SETTLE + WINDOW:
            return
        (measured,) = mean(self._world, statistics.median(self._trial[SETTLE:]))
        plan, before = self.wire.plan, self._before
        words = (
            f"{milliseconds(measured)} per step, predicted {milliseconds(plan.predicted_seconds)}, "
            f"before {milliseconds(self._baseline)}"
        )
        if self._finds_links_changed(plan, measured, words) or self._tries_plain(plan, measured, words):
            return
        if measured < self._baseline:
            self.decisions.add(f"{words}: kept")
            self._save(plan)
            self._phase = self._running  # what is under way goes on
            return
        self._go_over(before.plan if before.plan is not None else "dense")
        back = f"back to {before}" if before.plan is not None else "gradients travel dense, by plain all-reduces"
        self.decisions.add(f"{words}: not faster; {back}")
        if self._profile is not None and before.plan is None:
            self._save(ddp_plan(self._profile, self.quality, self._baseline, self._borders))
        self._rest(self._running)

    def _finds_links_changed(self, plan: Plan, measured: float, words: str) -> bool:
        """Whether a trial went so far from its prediction because links changed: then another plan is sought."""
        if self._profile is None or not _apart(measured, plan.predicted_seconds):
            return False
        (links,) = mean(self._world, self._links_now(self._profile, measured))
        if not _apart(links, 1.0):
            return False
        if measured < self._baseline:
            self._save(plan)
        self._seek(words, links, measured)
        self._phase = self._running
        return True

    def _tries_plain(self, plan: Plan, measured: float, words: str) -> bool:
        """Whether the plain plan may be as fast by what is predicted: it asks less of the machine, so it is tried too."""
        plain, before, faster = self._plain, self._before, measured < self._baseline
        most = (1.0 + HYSTERESIS) * measured if faster else (1.0 - HYSTERESIS) * self._baseline
        if plain is None or plain.predicted_seconds > most:
            return False
        if faster:
            self._baseline = measured
            self._save(plan)
        said = f"{words}; one codec for everything is predicted at {milliseconds(plain.predicted_seconds)}"
        self._switch(plain, said)
        if not faster:
            self._before = before
        return True

    def _running(self) -> None:
        snapshot = self._observe()
        if snapshot is None:
            return
        if snapshot.alarm:
            self._give_up(snapshot.alarm)
            return
        changed = self._step_time.observe(snapshot.wall) | self._link_time.observe(snapshot.link)
        if snapshot.planned:
            self._adopt()
        elif changed and not self._planning:
            self._plan_again()

    def _give_up(self, reason: str) -> None:
        strategy = self.wire.strategy
        self.wire.session.change("dense", None, keep=False)
        self.watchdog.forget()
        self.decisions.add(
            f"{strategy} is given up, and what it held back is dropped: {reason}; gradients travel dense", loud=True
        )
        self._rest(_nothing)

    # -- on watch ------------------------------------------------------------------------------------------------------

    def _observe(self) -> Snapshot | None:
        meter = self.meter
        assert meter is not None
        session = self.wire.session
        executor = session.executor if not session.direct.last else None
        return self._monitor.step(
            meter.step(),
            executor.rank_states[0] if executor is not None else None,
            self._search is not None and self._search.done,
            lambda: meter.message(probe_bytes(self._profile, self.wire.plan)),
        )

    def _plan_again(self) -> None:
        step, link = self._step_time, self._link_time
        assert self._profiling is not None
        words = f"steps went from {milliseconds(step.level)} to {milliseconds(step.last)}"
        if link.level > 0.0:
            words += f", a message between them from {milliseconds(link.level)} to {milliseconds(link.last)}"
        if self._profile is None:  # this run began with a plan that was saved without one
            if self._hook.registered:
                self._go_over("dense")
            self.decisions.add(f"{words}: the job is measured again")
            self._rest(self._watching)
            self._profiling.begin()
            return
        self._seek(words, self._links_now(self._profile, step.last), step.last)

    def _seek(self, words: str, links: float, seconds: float) -> None:
        """Look for another plan, beside the training, for links that need `links` times as long; a step takes `seconds`."""
        assert self._profile is not None
        assert self._profiling is not None
        self._borders = self._borders or self._profiling.borders(self._profile)
        self.decisions.add(
            f"{words}; links pass a byte in {links:.2f} times the seconds: planning again, beside the training"
        )
        self._baseline, self._planning = seconds, True
        if self._world.rank == 0:
            request = ReplanRequest(self._profile, self.wire.plan, self.quality, links, seconds, self._borders)
            self._search = ReplanThread(request)

    def _links_now(self, profile: Profile, step: float) -> float:
        """How many times the seconds of the profile links need for a byte. Takes about a step."""
        assert self.meter is not None
        now, before = self.meter.link(min(1.0, max(0.2, step))), profile.link("all_gather", "flat")
        (small, _), (large, _) = now.points[0], now.points[-1]
        difference = max(before.seconds(large) - before.seconds(small), 1e-9)
        return max((now.seconds(large) - now.seconds(small)) / difference, 1e-3)

    def _adopt(self) -> None:
        search, self._search, self._planning = self._search, None, False
        choice: Choice = from_rank_0(self._world, lambda: search.result() if search is not None else None, Choice)
        self._profile, plan = choice.profile, choice.plan
        gain = 1.0 - plan.predicted_seconds / choice.present
        words = f"predicted {milliseconds(plan.predicted_seconds)} per step instead of {milliseconds(choice.present)}"
        if gain < HYSTERESIS or (is_dense(plan) and self.wire.strategy.direct):
            self.decisions.add(f"the best plan is {words}: no change", choice.considered)
            if self.wire.plan is not None:
                self._save(self.wire.plan)
            self._rest(self._running)
        elif is_dense(plan):
            self._go_over("dense")
            self.decisions.add(f"{words}: gradients travel dense, by plain all-reduces", choice.considered)
            self._rest(self._running)
        else:
            self._switch(plan, words, choice.considered, choice.plain)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _go_over(self, strategy: Plan | str) -> None:
        """To another way; a hook is registered when it is needed for the first time."""
        new = Strategy.of(strategy)
        compile_kernels(self._world.parent, new)
        self.wire.session.change(strategy, None, keep=True)
        self.watchdog.forget()
        if not new.direct:
            self._hook.register()

    # -- what the wire tells ------------------------------------------------------------------------------------------

    def changed_by_hand(self) -> None:
        """The user chose another codec: nothing is decided any more."""
        self.watchdog.forget()
        if not self.wire.strategy.direct:
            self._hook.register()
        self._rest(_nothing)
        self.decisions.add(f"changed by hand to {self.wire.strategy.full}: nothing further is measured or decided")

    def resumed(self) -> None:
        """A state was loaded, perhaps with its plan."""
        if self._world.size > 1 and not self.wire.strategy.direct:
            self._hook.register()
            self._rest(self._running)
            self.decisions.add(f"goes on with {self.wire.strategy}, as saved")

    def _saved_plan(self) -> Plan | None:
        """The plan of an earlier run, on all ranks, if there is one and it fits."""
        found = from_rank_0(self._world, self._file.load, Found)
        if isinstance(found, str):
            self.decisions.add(found)
        if not isinstance(found, tuple):
            return None
        plan: Plan = found[0]
        self._profile = found[1]
        return plan

    def _save(self, plan: Plan) -> None:
        if self._world.rank != 0:
            return
        try:
            self._file.save(plan, self._profile)
        except (OSError, ThinwireError) as error:  # rank 0 alone gets here: it must go on as the others do
            self.decisions.add(f"the plan could not be kept for the next run: {error}")

    # -- what the user asks ---------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """See `DDPWire.explain`."""
        now = self.wire.strategy.full if self._hook.registered else "DDP alone, no hook"
        head = f"auto, quality {self.quality!r}, {self._world.size} ranks"
        executor = self.wire.executor
        found = fits.explained(executor.rank_states[0]) if executor is not None else []
        return "\n".join([head, *self.decisions.lines(), *found, f"now: {now}"])

    def close(self) -> None:
        if self._profiling is not None:
            self._profiling.close()


def _watch_on_links() -> Cusum:
    """Single messages vary much: only what takes several times as long, or twice as long twice, is a change."""
    return Cusum(allowed=0.5, alarm=0.5)


def _alone(seconds: float) -> str:
    return f"a step takes {milliseconds(seconds)} with DDP alone"


def _apart(one: float, other: float) -> bool:
    return max(one, other) > APART * min(one, other)


def _nothing() -> None:
    """After an alarm, or a change by hand, nothing is tried again."""
