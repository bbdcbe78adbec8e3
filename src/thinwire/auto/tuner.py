"""Auto-tuner: measures a job, plans it, switches to the plan, checks that it is faster, and goes on monitoring.

    compiling  DDP alone, while a child compiles what planning and codecs need, unless the machine has it already
    watching   DDP alone, without a hook, for some steps; then links and codecs are measured, a slice between two of them,
               and a plan is sought beside some more
    trying     by the plan, for some steps, which are compared with dense ones in between
    thinking   after a trial that was slower, by what ran before it
    running    what was chosen is kept; every few steps all ranks look together at step time, links and what is applied, and
               now and then one dense step shows whether it is still faster

Everything here happens between two steps, in the thread that trains, and all ranks do the same: they see as many steps, and
whatever decides is the mean over all of them. Only the search for another plan runs beside the training, on rank 0.
"""

from __future__ import annotations

import functools
import statistics
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from torch.nn.parallel import DistributedDataParallel

from ..comm.world import TorchWorld
from ..engine.compiler import PLANNING
from ..engine.lifecycle import Phase
from ..engine.strategy import Strategy
from ..engine.warmup import compile_kernels
from ..engine.watchdog import Watchdog
from ..engine.wire import Wire
from ..errors import ThinwireError
from ..planner.plan import Plan, Quality
from ..planner.profile import Profile
from ..planner.replan import (
    Choice,
    PlanThread,
    ReplanRequest,
    best_plan_fitted,
    ddp_plan,
    expected_step,
    is_dense,
    milliseconds,
    predict_ddp,
    replan,
)
from ..planner.search import by_buckets
from ..profiler.slices import Work
from ..profiler.watch import unsteadiness
from .candidates import ROUNDS, candidates
from .changes import Changes
from .compiling import LONGEST, Compiling
from .control import Control
from .decisions import Decisions
from .meter import Meter
from .monitor import PERIOD, Monitor, Snapshot, probe_bytes
from .patience import DISAPPOINTMENTS, Patience
from .pauses import Pauses
from .plan_cache import Found, PlanFile
from .profiling import Profiling
from .sanity import TWICE, Evidence, Verdict, contradiction, fits_plan, judge, possible, transferred
from .shared import from_rank_0, mean
from .trial import Trial

LEAST_GAIN = 0.04
"""Of a step: what a hook may cost. A plan that promises less is not worth one, because a hook cannot be taken out again: of
small models a dense exchange through Python takes some percent more. Where threads wait for cores it costs as much more."""

HYSTERESIS = 0.05
"""Of a step: what another plan must promise, once one is running or dense steps are faster; and how far predictions are off."""

APART = 1.5
"""What was measured is so many times what was predicted, or the other way round: links may have changed meanwhile."""

CHECKED = 5
"""Steps of DDP alone that are watched once more in that case; and steps after a trial that was slower, before more is done."""

CONTROL_AHEAD = 2
"""In so many steps comes a control step that has been earned."""

CROWDED, MOST_CROWDED = 1.2, 2.0
"""Threads for every core from which on it is worth a word, and beyond which a hook is not taken to cost still more: plans
that promise a fifth of a step are worth a trial wherever they run."""

MEASUREMENT, LONGEST_MEASUREMENT = 1.0, 1.4
"""Seconds for which links and codecs are measured, in slices between steps, whatever a step takes; and after which it is given
up, because a machine where everything takes longer than it should tells nothing."""


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
        self._trial = Trial(None, 0.0)
        self._baseline = self._expected = self._unsteady = 0.0
        self._crowd, self._final = 1.0, False
        self._seen: list[float] = []
        self._paused = self._planning = False
        self._monitor, self._changes = Monitor(world, self.watchdog), Changes()
        self._patience, self.pauses = Patience(), Pauses()
        self._begun: float | None = None
        self._control = Control()
        self._recent: deque[float] = deque(maxlen=PERIOD)
        self._search: PlanThread | None = None
        self._measurement: Work[Profile] | None = None
        self._file = PlanFile(plan_file, quality, wire.session.job.tensors, world)
        self._profiling: Profiling | None = None
        self._compiling = Compiling(world, [PLANNING, *candidates(quality, world)])
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
        watching = "watching DDP alone, without a hook, for some steps"
        if saved is not None:
            watching = f"{watching}, before the plan {self._file.path} of an earlier run is used"
            self._phase = functools.partial(self._starting, saved)
        if self._compiling.begin():
            self.decisions.add(watching)
        else:
            self.decisions.add("kernels are compiled beside the training, once per machine; DDP alone meanwhile")
            self._rest(functools.partial(self._waiting_for_kernels, self._phase))

    def _rest(self, phase: Callable[[], None]) -> None:
        """No profile is wanted any more; what was seen so far says nothing about what comes now."""
        if self._profiling is not None:
            self._profiling.rest()
        self._seen = []
        self._recent.clear()
        self._monitor.rest()
        self._changes = Changes()
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
        assert self.meter is not None
        begun = self.meter.clock()
        self._begun = self._begun if self._begun is not None else begun
        try:
            if self.wire.session.lifecycle.phase is Phase.CONTROL:
                self._controlled()
            else:
                self._phase()
        except ThinwireError as error:  # on all ranks: whatever fails here was agreed on
            if self.wire.error is not None:
                raise
            self.decisions.add(f"nothing further is tried: {error}", loud=True)
            self._rest(_nothing)
        self.pauses.add(self.wire.steps, self.meter.clock() - begun)

    def _waiting_for_kernels(self, then: Callable[[], None]) -> None:
        state = self._compiling.step()
        if state == "ready":
            assert self._profiling is not None
            self.decisions.add("kernels are compiled: watching DDP alone, without a hook, for some steps")
            self._rest(then)
            self._profiling.begin()
        elif state == "late":
            self.decisions.add(
                f"kernels are not compiled after {LONGEST:.0f} s: DDP stays alone in this run. `thinwire compile` "
                "compiles them beforehand",
                loud=True,
            )
            self._rest(_nothing)

    def _watching(self) -> None:
        assert self._profiling is not None
        if not self._profiling.ready:
            return
        native, compute = self._ddp_alone()
        words = f"{milliseconds(compute)} of it computation"
        if native - compute < LEAST_GAIN * native:
            self.native_seconds = self._baseline = native
            self._stay(f"{_alone(native)}, {words}: no method can save {LEAST_GAIN:.0%}")
        else:
            self._measure(native, words)

    def _ddp_alone(self) -> tuple[float, float]:
        """Seconds of a step of DDP alone, and of its computation, from the steps watched. A collective."""
        assert self.meter is not None
        found = self.meter.compute()
        native, compute, self._crowd, self._unsteady = mean(
            self._world, found.wall, found.forward + found.backward + found.optimizer, found.crowd, found.unsteady
        )
        return native, compute

    def _starting(self, saved: Plan) -> None:
        """The plan of an earlier run is used where the job is what it was then."""
        assert self._profiling is not None
        if not self._profiling.ready:
            return
        (native, compute), by = self._ddp_alone(), f"by the plan {self._file.path} of an earlier run"
        self.native_seconds = self._baseline = native
        words = f"{_alone(native)}, {milliseconds(compute)} of it computation"
        fits, plan = fits_plan(saved, native, compute), transferred(saved, native, compute)
        evidence = Evidence(native, compute, native, unsteady=self._unsteady)
        if fits and is_dense(saved):
            self.decisions.add(f"{words}; {by} {self._how}")
            self._rest(self._running)
        elif fits and judge(evidence, plan.predicted_seconds, LEAST_GAIN) is Verdict.ACT:
            self._switch(plan, f"{words}; {by}")
        else:
            then = milliseconds(saved.dense_seconds)
            self.decisions.add(f"{words}; the plan {self._file.path} was made for steps of {then}: it is dropped")
            self._profile = None
            self._watching()

    def _measure(self, native: float, words: str) -> None:
        """Links and codecs, a slice after each of the next steps."""
        assert self.meter is not None
        self._measurement = self.meter.measuring(candidates(self.quality, self._world), MEASUREMENT)
        self._phase = functools.partial(self._measuring, native, words, self.pauses.total)
        self._phase()

    def _measuring(self, native: float, words: str, paused: float) -> None:
        assert self.meter is not None
        assert self._measurement is not None
        assert self._profiling is not None
        (spent,) = mean(self._world, self.pauses.total - paused)
        if spent > LONGEST_MEASUREMENT:
            self._measurement.close()
            self._measurement = None
            self._too_busy(f"{_alone(native)}, {words}; measuring links and codecs does not come to an end")
            return
        profile = self.meter.slice(self._measurement)
        if profile is None:
            return
        self._measurement = None
        self._borders = self._profiling.borders(profile)
        self._profile = profile = by_buckets(profile, self._borders)
        self._expected = from_rank_0(self._world, lambda: predict_ddp(profile, self._borders), float)
        if _apart(native, self._expected):
            expectation = f"by its links it should take {milliseconds(self._expected)}"
            self.decisions.add(f"{_alone(native)}, {expectation}: watching {CHECKED} more steps")
            self._rest(functools.partial(self._checking, words))
        else:
            self._plan_beside(native, words)

    def _checking(self, words: str) -> None:
        """DDP alone once more, because its steps and the links, which were measured after them, did not fit."""
        assert self.meter is not None
        self._seen.append(self.meter.step())
        if len(self._seen) == CHECKED:
            native, self._unsteady = mean(self._world, statistics.median(self._seen), unsteadiness(self._seen))
            self._plan_beside(native, words)

    def _evidence(self, native: float) -> Evidence:
        assert self._profile is not None
        return Evidence(native, self._profile.compute, self._expected, self._profile.spread, self._unsteady)

    def _plan_beside(self, native: float, words: str) -> None:
        """Rank 0 searches in a thread, while all go on."""
        profile, borders, quality = self._profile, self._borders, self.quality
        assert profile is not None
        self.native_seconds = self._baseline = native
        if reason := contradiction(self._evidence(native)):
            self._too_busy(f"{_alone(native)}, by its links it should take {milliseconds(self._expected)}: {reason}")
            return
        if self._world.rank == 0:
            self._search = PlanThread(lambda: best_plan_fitted(profile, quality, borders, native))
        self._rest(functools.partial(self._weighing, native, words))

    def _weighing(self, native: float, words: str) -> None:
        """Whether the best plan is worth a hook, as soon as it is found."""
        search = self._search
        (found,) = mean(self._world, float(search is not None and search.done))
        if not found:
            return
        self._search = None
        choice: Choice = from_rank_0(self._world, lambda: search.result() if search is not None else None, Choice)
        self._profile = choice.profile
        # Where threads wait for cores a hook costs more.
        plan, predicted, least = (
            choice.plan,
            choice.plan.predicted_seconds,
            LEAST_GAIN * min(self._crowd, MOST_CROWDED),
        )
        gain = 1.0 - predicted / native
        words = f"{_alone(native)}, {words}; the best plan is predicted at {milliseconds(predicted)}, {gain:.0%} less"
        match judge(self._evidence(native), predicted, least):
            case Verdict.BUSY:
                self._too_busy(words)
            case Verdict.ACT if not is_dense(plan):
                self._switch(plan, words, choice.considered, choice.plain)
            case _:
                reason = f", with {self._crowd:.1f} threads for every core" if self._crowd > CROWDED else ""
                self._stay(f"{words}, where a hook may cost {least:.0%}{reason}", choice.considered)

    def _stay(self, words: str, considered: Sequence[str] = ()) -> None:
        self.decisions.add(f"{words}; {self._how}", considered)
        if self._profile is not None:
            self._save(ddp_plan(self._profile, self.quality, self.native_seconds, self._borders))
        self._rest(self._running)

    def _too_busy(self, words: str) -> None:
        """What was measured is thrown away; there is another look, later each time."""
        self._profile, again = None, not self._patience.tried
        steps = self._patience.wait()
        busy = f"the machine is too busy to tell; {self._how}, looking again after {steps} steps"
        self.decisions.add(f"{words}; {busy}", loud=again)
        self._rest(functools.partial(self._waiting, self.wire.steps + steps))

    def _waiting(self, until: int) -> None:
        """No measurement can be trusted for now."""
        assert self._profiling is not None
        if self.wire.steps >= until:
            self._profiling.begin()
            self._phase = self._watching

    @property
    def _how(self) -> str:
        return "gradients travel dense" if self._hook.registered else "DDP stays alone, no hook is registered"

    def _switch(self, plan: Plan, words: str, considered: Sequence[str] = (), plain: Plan | None = None) -> None:
        """From the next step on by this plan, on trial; `plain` is tried too if it promises more than this one keeps."""
        self._trial = Trial(self.wire.strategy, self._baseline, plain)
        self._control = Control(self._control.dense or self.native_seconds)
        self._go_over(plan)
        self.decisions.add(f"{words}; switching to {self.wire.strategy}", considered)
        self._rest(self._trying)

    def _trying(self) -> None:
        assert self.meter is not None
        assert self.wire.plan is not None
        trial, plan = self._trial, self.wire.plan
        trial.steps.append(self.meter.step())
        snapshot = self._observe()
        if snapshot is not None and snapshot.alarm:
            self._give_up(snapshot.alarm)
            return
        if trial.wants_control:
            (now,) = mean(self._world, statistics.median(self._recent))
            if self._control.needed(now):
                self._make_control_step(1)
        if not trial.looks:
            return
        (measured,) = mean(self._world, trial.seconds)
        words = trial.words(measured, plan.predicted_seconds)
        if trial.failed(measured):
            self._go_back(words, measured)
        elif trial.ended:
            self._patience.satisfied()
            self._baseline = trial.to_beat
            if self._tries_plain(plan, measured, words):
                return
            self._save(plan)
            if _apart(measured, plan.predicted_seconds) and self._plans_for_links(words, measured):
                self._phase = self._running
                return
            self.decisions.add(f"{words}: kept")
            self._phase = self._running  # what is under way goes on

    def _controlled(self) -> None:
        """The last step was a control step."""
        assert self.meter is not None
        if not self._recent:
            return
        dense, now = mean(self._world, self.meter.step(), statistics.median(self._recent))
        slower = self._control.compare(dense, now)
        self._trial.controls.append(dense)
        if self._phase != self._running or not slower:
            return
        strategy = self.wire.strategy
        self._go_over("dense")
        words = f"{strategy} takes {milliseconds(now)} per step, single dense steps {milliseconds(dense)}"
        self.decisions.add(f"{words}: slower than DDP; gradients travel dense, by plain all-reduces", loud=True)
        self._baseline = dense
        self._search, self._planning = None, False
        self._final |= self._patience.disappointed()
        self._rest(self._running)

    def _compare_with_dense(self, snapshot: Snapshot) -> None:
        """A control step, as soon as one is earned."""
        if self.wire.strategy.direct:
            return
        seconds, slower = snapshot.load.wall, 1.0
        if snapshot.link > 0.0 and self._profile is not None:
            size = probe_bytes(self._profile, self.wire.plan)
            slower = snapshot.link / self._profile.link("all_gather", "flat").seconds(size)
        self._control.passed(PERIOD * seconds)
        if self._control.due(seconds, slower) and self.wire.session.progress.control == 0:
            self._make_control_step(CONTROL_AHEAD)

    def _make_control_step(self, ahead: int) -> None:
        if self.wire.session.executor is not None:  # as long as DDP's buckets are not final, steps are dense anyway
            self.wire.session.control(ahead)

    def _go_back(self, words: str, measured: float) -> None:
        """A trial was slower: first back to what was before, then think about it."""
        before, self._baseline = self._trial.before, self._trial.to_beat
        self._go_over(before.plan if before is not None and before.plan is not None else "dense")
        back = f"back to {before}" if before is not None else "gradients travel dense, by plain all-reduces"
        words = f"{words}: not faster; {back}"
        if self._profile is not None and before is None:
            self._save(ddp_plan(self._profile, self.quality, self._baseline, self._borders))
        if self._patience.disappointed():
            self.decisions.add(f"{words}; after {DISAPPOINTMENTS} of them in a row nothing else is tried", loud=True)
            self._final = True
            self._rest(self._running)
            return
        self.decisions.add(words)
        self._rest(functools.partial(self._thinking, measured, self._trial.plain))

    def _thinking(self, tried: float, plain: Plan | None) -> None:
        """Some steps after a trial that was slower: why, and whether something else is worth one."""
        assert self.meter is not None
        self._seen.append(self.meter.step())
        if len(self._seen) < CHECKED:
            return
        (now,) = mean(self._world, statistics.median(self._seen))
        words = f"{milliseconds(now)} per step since, {milliseconds(tried)} in the trial"
        self._baseline = now
        self._rest(self._running)
        if self._plans_for_links(words, now):
            return
        if plain is not None and plain.predicted_seconds <= (1.0 - HYSTERESIS) * now:
            said = f"{words}; one codec for everything is predicted at {milliseconds(plain.predicted_seconds)}"
            self._switch(plain, said)

    def _plans_for_links(self, words: str, seconds: float) -> bool:
        """Whether links are not what they were when the plan was made: then another one is sought."""
        if self._profile is None or self._planning:
            return False
        links = self._links_now(seconds)
        if links is None or not _apart(links, 1.0):
            return False
        self._seek(words, links, seconds)
        return True

    def _tries_plain(self, plan: Plan, measured: float, words: str) -> bool:
        """Whether the plain plan may be as fast by what is predicted: it asks less of the machine, so it is tried too."""
        plain = self._trial.plain
        if plain is None or plain.predicted_seconds > (1.0 + HYSTERESIS) * measured:
            return False
        self._baseline = measured
        self._save(plan)
        said = f"{words}; one codec for everything is predicted at {milliseconds(plain.predicted_seconds)}"
        self._switch(plain, said)
        return True

    def _running(self) -> None:
        snapshot = self._observe()
        if snapshot is None:
            return
        if snapshot.alarm:
            self._give_up(snapshot.alarm)
            return
        changed = self._changes.observe(snapshot)
        self._compare_with_dense(snapshot)
        if snapshot.planned:
            self._adopt()
        elif changed and not self._planning and not self._final:
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
        self._recent.append(meter.step())
        executor = session.executor if not session.direct.last else None
        return self._monitor.step(
            (meter.step(), meter.stretched()),
            executor.rank_states[0] if executor is not None else None,
            self._search is not None and self._search.done,
            lambda: meter.message(probe_bytes(self._profile, self.wire.plan)),
            meter.load,
        )

    def _plan_again(self) -> None:
        assert self._profiling is not None
        words, seconds = self._changes.words(), self._changes.seconds
        if self._changes.cpu_explains:
            self.decisions.add(f"{words}: CPU contention, not links; nothing is planned again")
            self._rest(self._running)
        elif self._profile is None:  # this run began with a plan that was saved without one
            if self._hook.registered:
                self._go_over("dense")
            self.decisions.add(f"{words}: the job is measured again")
            self._rest(self._watching)
            self._profiling.begin()
        elif (links := self._links_now(seconds)) is None:
            self._rest(self._running)
        else:
            self._seek(words, links, seconds)

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
            self._search = PlanThread(lambda: replan(request))

    def _links_now(self, step: float) -> float | None:
        """How many times the seconds of the profile links need for a byte; None if that cannot be true, or cannot be afforded.

        step  what a step takes now: what links say is checked against it
        """
        profile, plan = self._profile, self.wire.plan
        assert profile is not None
        assert self.meter is not None
        passed = self.meter.clock() - self._begun if self._begun is not None else 0.0
        if Pauses.enough(*mean(self._world, self.pauses.total, passed)):
            self.decisions.add("training has stood still for long enough: links are not measured again for now")
            return None
        now, before = self.meter.link(min(0.3, max(0.1, step))), profile.link("all_gather", "flat")
        (small, _), (large, _) = now.points[0], now.points[-1]
        difference = max(before.seconds(large) - before.seconds(small), 1e-9)
        (links,) = mean(self._world, max((now.seconds(large) - now.seconds(small)) / difference, 1e-3))
        expected: float = from_rank_0(self._world, lambda: expected_step(profile, plan, links, self._borders), float)
        if expected <= TWICE * step:
            return links
        told = f"links seem to pass a byte in {links:.2f} times the seconds, by which a step would take"
        self.decisions.add(
            f"{told} {milliseconds(expected)} and not {milliseconds(step)}: the machine is too busy to tell"
        )
        return None

    def _adopt(self) -> None:
        search, self._search, self._planning = self._search, None, False
        choice: Choice = from_rank_0(self._world, lambda: search.result() if search is not None else None, Choice)
        self._profile, plan = choice.profile, choice.plan
        gain = 1.0 - plan.predicted_seconds / choice.present
        alone = plan.dense_seconds if not self.wire.strategy.direct else choice.present
        evidence = Evidence(alone, choice.profile.compute, alone)
        words = f"predicted {milliseconds(plan.predicted_seconds)} per step instead of {milliseconds(choice.present)}"
        believed = possible(evidence, plan.predicted_seconds)
        if gain < HYSTERESIS or not believed or (is_dense(plan) and self.wire.strategy.direct):
            doubt = "" if believed else ", which is not possible"
            self.decisions.add(f"the best plan is {words}{doubt}: no change", choice.considered)
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
            plan = self.wire.plan
            self._control = Control(plan.dense_seconds if plan is not None else 0.0)
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
        return "\n".join([head, *self.decisions.lines(), str(self.pauses), f"now: {now}"])

    def close(self) -> None:
        self._compiling.close()
        if self._measurement is not None:
            self._measurement.close()
        if self._profiling is not None:
            self._profiling.close()


def _alone(seconds: float) -> str:
    return f"a step takes {milliseconds(seconds)} with DDP alone"


def _apart(one: float, other: float) -> bool:
    return max(one, other) > APART * min(one, other)


def _nothing() -> None:
    """After an alarm, or a change by hand, nothing is tried again."""
