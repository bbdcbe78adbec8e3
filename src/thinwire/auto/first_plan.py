"""The first plan of a job: DDP alone is watched, links and codecs are measured, and the best plan is weighed against it.

compiling  DDP alone, while a child compiles what planning and codecs need, unless the machine has it already
watching   DDP alone, without a hook, for some steps; or the same before a plan of an earlier run is used
measuring  links and codecs, a slice between two steps
weighing   a plan is sought beside some more steps; then it is tried, or DDP stays alone
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

from ..engine.compiler import PLANNING
from ..planner.plan import Plan
from ..planner.profile import Profile
from ..planner.replan import Choice, PlanThread, best_plan_fitted, ddp_plan, is_dense, milliseconds, predict_ddp
from ..planner.search import by_buckets
from ..profiler.slices import Work
from ..profiler.watch import unsteadiness
from .candidates import candidates
from .compiling import LONGEST, Compiling
from .job import CHECKED, LEAST_GAIN, TunedJob, alone, apart, nothing
from .plan_in_use import PlanInUse
from .sanity import Evidence, Verdict, contradiction, fits_plan, judge, transferred
from .shared import from_rank_0, mean

CROWDED, MOST_CROWDED = 1.2, 2.0
"""Threads for every core from which on it is worth a word, and beyond which a hook is not taken to cost still more: plans
that promise a fifth of a step are worth a trial wherever they run."""

MEASUREMENT, LONGEST_MEASUREMENT = 1.0, 1.4
"""Seconds for which links and codecs are measured, in slices between steps, whatever a step takes; and after which it is given
up, because a machine where everything takes longer than it should tells nothing."""


class FirstPlan:
    """How a job comes to its plan, or to none."""

    def __init__(self, job: TunedJob, in_use: PlanInUse) -> None:
        self._job, self._in_use = job, in_use
        self._expected = self._unsteady = 0.0
        self._crowd = 1.0
        self._measurement: Work[Profile] | None = None
        self._compiling = Compiling(job.world, [PLANNING, *candidates(job.quality, job.world)])

    def begin(self, saved: Plan | None) -> None:
        """Watch the job, whether or not there is a plan of an earlier run. A collective."""
        job, phase = self._job, self.watching
        watching = "watching DDP alone, without a hook, for some steps"
        if saved is not None:
            watching = f"{watching}, before the plan {job.file.path} of an earlier run is used"
            phase = functools.partial(self._starting, saved)
        if self._compiling.begin():
            job.decisions.add(watching)
            job.phase = phase
        else:
            job.decisions.add("kernels are compiled beside the training, once per machine; DDP alone meanwhile")
            job.rest(functools.partial(self._waiting_for_kernels, phase))

    def again(self) -> None:
        """Watch the job anew."""
        self._job.rest(self.watching)
        self._job.profiling.begin()

    def _waiting_for_kernels(self, then: Callable[[], None]) -> None:
        state = self._compiling.step()
        if state == "ready":
            self._job.decisions.add("kernels are compiled: watching DDP alone, without a hook, for some steps")
            self._job.rest(then)
            self._job.profiling.begin()
        elif state == "late":
            self._job.decisions.add(
                f"kernels are not compiled after {LONGEST:.0f} s: DDP stays alone in this run. `thinwire compile` "
                "compiles them beforehand",
                loud=True,
            )
            self._job.rest(nothing)

    def watching(self) -> None:
        if not self._job.profiling.ready:
            return
        native, compute = self._ddp_alone()
        words = f"{milliseconds(compute)} of it computation"
        if native - compute < LEAST_GAIN * native:
            self._job.native_seconds = self._job.baseline = native
            self._stay(f"{alone(native)}, {words}: no method can save {LEAST_GAIN:.0%}")
        else:
            self._measure(native, words)

    def _ddp_alone(self) -> tuple[float, float]:
        """Seconds of a step of DDP alone, and of its computation, from the steps watched. A collective."""
        found = self._job.meter.compute()
        native, compute, self._crowd, self._unsteady = mean(
            self._job.world, found.wall, found.forward + found.backward + found.optimizer, found.crowd, found.unsteady
        )
        return native, compute

    def _starting(self, saved: Plan) -> None:
        """The plan of an earlier run is used where the job is what it was then."""
        if not self._job.profiling.ready:
            return
        (native, compute), by = self._ddp_alone(), f"by the plan {self._job.file.path} of an earlier run"
        self._job.native_seconds = self._job.baseline = native
        words = f"{alone(native)}, {milliseconds(compute)} of it computation"
        fits, plan = fits_plan(saved, native, compute), transferred(saved, native, compute)
        evidence = Evidence(native, compute, native, unsteady=self._unsteady)
        if fits and is_dense(saved):
            self._job.decisions.add(f"{words}; {by} {self._job.how}")
            self._job.rest(self._in_use.running)
        elif fits and judge(evidence, plan.predicted_seconds, LEAST_GAIN) is Verdict.ACT:
            self._in_use.switch(plan, f"{words}; {by}")
        else:
            then = milliseconds(saved.dense_seconds)
            self._job.decisions.add(
                f"{words}; the plan {self._job.file.path} was made for steps of {then}: it is dropped"
            )
            self._job.profile = None
            self.watching()

    def _measure(self, native: float, words: str) -> None:
        """Links and codecs, a slice after each of the next steps."""
        self._measurement = self._job.meter.measuring(candidates(self._job.quality, self._job.world), MEASUREMENT)
        self._job.phase = functools.partial(self._measuring, native, words, self._job.pauses.total)
        self._job.phase()

    def _measuring(self, native: float, words: str, paused: float) -> None:
        assert self._measurement is not None
        (spent,) = mean(self._job.world, self._job.pauses.total - paused)
        if spent > LONGEST_MEASUREMENT:
            self._measurement.close()
            self._measurement = None
            self._too_busy(f"{alone(native)}, {words}; measuring links and codecs does not come to an end")
            return
        profile = self._job.meter.slice(self._measurement)
        if profile is None:
            return
        self._measurement = None
        self._job.borders = self._job.profiling.borders(profile)
        self._job.profile = profile = by_buckets(profile, self._job.borders)
        self._expected = from_rank_0(self._job.world, lambda: predict_ddp(profile, self._job.borders), float)
        if apart(native, self._expected):
            expectation = f"by its links it should take {milliseconds(self._expected)}"
            self._job.decisions.add(f"{alone(native)}, {expectation}: watching {CHECKED} more steps")
            self._job.rest(functools.partial(self._checking, words))
        else:
            self._plan_beside(native, words)

    def _checking(self, words: str) -> None:
        """DDP alone once more, because its steps and the links, which were measured after them, did not fit."""
        self._job.seen.append(self._job.meter.step())
        if len(self._job.seen) == CHECKED:
            native, self._unsteady = mean(
                self._job.world, statistics.median(self._job.seen), unsteadiness(self._job.seen)
            )
            self._plan_beside(native, words)

    def _evidence(self, native: float) -> Evidence:
        assert self._job.profile is not None
        return Evidence(native, self._job.profile.compute, self._expected, self._job.profile.spread, self._unsteady)

    def _plan_beside(self, native: float, words: str) -> None:
        """Rank 0 searches in a thread, while all go on."""
        profile, borders, quality = self._job.profile, self._job.borders, self._job.quality
        assert profile is not None
        self._job.native_seconds = self._job.baseline = native
        if reason := contradiction(self._evidence(native)):
            self._too_busy(f"{alone(native)}, by its links it should take {milliseconds(self._expected)}: {reason}")
            return
        if self._job.world.rank == 0:
            self._job.search = PlanThread(lambda: best_plan_fitted(profile, quality, borders, native))
        self._job.rest(functools.partial(self._weighing, native, words))

    def _weighing(self, native: float, words: str) -> None:
        """Whether the best plan is worth a hook, as soon as it is found."""
        search = self._job.search
        (found,) = mean(self._job.world, float(search is not None and search.done))
        if not found:
            return
        self._job.search = None
        choice: Choice = from_rank_0(self._job.world, lambda: search.result() if search is not None else None, Choice)
        self._job.profile = choice.profile
        # Where threads wait for cores a hook costs more.
        plan, predicted, least = (
            choice.plan,
            choice.plan.predicted_seconds,
            LEAST_GAIN * min(self._crowd, MOST_CROWDED),
        )
        gain = 1.0 - predicted / native
        words = f"{alone(native)}, {words}; the best plan is predicted at {milliseconds(predicted)}, {gain:.0%} less"
        match judge(self._evidence(native), predicted, least):
            case Verdict.BUSY:
                self._too_busy(words)
            case Verdict.ACT if not is_dense(plan):
                self._in_use.switch(plan, words, choice.considered, choice.plain)
            case _:
                reason = f", with {self._crowd:.1f} threads for every core" if self._crowd > CROWDED else ""
                self._stay(f"{words}, where a hook may cost {least:.0%}{reason}", choice.considered)

    def _stay(self, words: str, considered: Sequence[str] = ()) -> None:
        self._job.decisions.add(f"{words}; {self._job.how}", considered)
        if self._job.profile is not None:
            self._job.save(ddp_plan(self._job.profile, self._job.quality, self._job.native_seconds, self._job.borders))
        self._job.rest(self._in_use.running)

    def _too_busy(self, words: str) -> None:
        """What was measured is thrown away; there is another look, later each time."""
        self._job.profile, again = None, not self._job.patience.tried
        steps = self._job.patience.wait()
        busy = f"the machine is too busy to tell; {self._job.how}, looking again after {steps} steps"
        self._job.decisions.add(f"{words}; {busy}", loud=again)
        self._job.rest(functools.partial(self._waiting, self._job.wire.steps + steps))

    def _waiting(self, until: int) -> None:
        """No measurement can be trusted for now."""
        if self._job.wire.steps >= until:
            self._job.profiling.begin()
            self._job.phase = self.watching

    def close(self) -> None:
        self._compiling.close()
        if self._measurement is not None:
            self._measurement.close()
