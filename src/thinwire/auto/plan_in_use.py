"""A plan that runs: first on trial, then watched for good; and what comes after it.

trying     by the plan, for some steps, which are compared with dense ones in between
thinking   after a trial that was slower, by what ran before it
running    what was chosen is kept; every few steps all ranks look together at step time, links and what is applied, and
           now and then one dense step shows whether it is still faster
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

from ..planner.plan import Plan
from ..planner.replan import Choice, PlanThread, ReplanRequest, ddp_plan, is_dense, milliseconds, replan
from .control import Control
from .job import CHECKED, HYSTERESIS, TunedJob, apart, nothing
from .monitor import PERIOD, Snapshot, probe_bytes
from .patience import DISAPPOINTMENTS
from .sanity import Evidence, possible
from .shared import from_rank_0, mean
from .trial import Trial

CONTROL_AHEAD = 2
"""In so many steps comes a control step that has been earned."""


class PlanInUse:
    """What runs, and whether it stays. `look_again` measures the job as if it had just begun."""

    def __init__(self, job: TunedJob, look_again: Callable[[], None]) -> None:
        self._job, self._look_again = job, look_again
        self.trial, self.control = Trial(None, 0.0), Control()
        self._planning = self._final = False

    def switch(self, plan: Plan, words: str, considered: Sequence[str] = (), plain: Plan | None = None) -> None:
        """From the next step on by this plan, on trial; `plain` is tried too if it promises more than this one keeps."""
        self.trial = Trial(self._job.wire.strategy, self._job.baseline, plain)
        self.control = Control(self.control.dense or self._job.native_seconds)
        self._job.go_over(plan)
        self._job.decisions.add(f"{words}; switching to {self._job.wire.strategy}", considered)
        self._job.rest(self._trying)

    def _trying(self) -> None:
        assert self._job.wire.plan is not None
        trial, plan = self.trial, self._job.wire.plan
        trial.steps.append(self._job.meter.step())
        snapshot = self._job.observe()
        if snapshot is not None and snapshot.alarm:
            self._give_up(snapshot.alarm)
            return
        if trial.wants_control:
            (now,) = mean(self._job.world, statistics.median(self._job.recent))
            if self.control.needed(now):
                self._make_control_step(1)
        if not trial.looks:
            return
        (measured,) = mean(self._job.world, trial.seconds)
        words = trial.words(measured, plan.predicted_seconds)
        if trial.failed(measured):
            self._go_back(words, measured)
        elif trial.ended:
            self._job.patience.satisfied()
            self._job.baseline = trial.to_beat
            if self._tries_plain(plan, measured, words):
                return
            self._job.save(plan)
            if apart(measured, plan.predicted_seconds) and self._plans_for_links(words, measured):
                self._job.phase = self.running
                return
            self._job.decisions.add(f"{words}: kept")
            self._job.phase = self.running  # what is under way goes on

    def controlled(self) -> None:
        """The last step was a control step."""
        if not self._job.recent:
            return
        dense, now = mean(self._job.world, self._job.meter.step(), statistics.median(self._job.recent))
        slower = self.control.compare(dense, now)
        self.trial.controls.append(dense)
        if self._job.phase != self.running or not slower:
            return
        strategy = self._job.wire.strategy
        self._job.go_over("dense")
        words = f"{strategy} takes {milliseconds(now)} per step, single dense steps {milliseconds(dense)}"
        self._job.decisions.add(f"{words}: slower than DDP; gradients travel dense, by plain all-reduces", loud=True)
        self._job.baseline = dense
        self._job.search, self._planning = None, False
        self._final |= self._job.patience.disappointed()
        self._job.rest(self.running)

    def _compare_with_dense(self, snapshot: Snapshot) -> None:
        """A control step, as soon as one is earned."""
        if self._job.wire.strategy.direct:
            return
        seconds, slower = snapshot.load.wall, 1.0
        if snapshot.link > 0.0 and self._job.profile is not None:
            size = probe_bytes(self._job.profile, self._job.wire.plan)
            slower = snapshot.link / self._job.profile.link("all_gather", "flat").seconds(size)
        self.control.passed(PERIOD * seconds)
        if self.control.due(seconds, slower) and self._job.wire.session.progress.control == 0:
            self._make_control_step(CONTROL_AHEAD)

    def _make_control_step(self, ahead: int) -> None:
        if (
            self._job.wire.session.executor is not None
        ):  # as long as DDP's buckets are not final, steps are dense anyway
            self._job.wire.session.control(ahead)

    def _go_back(self, words: str, measured: float) -> None:
        """A trial was slower: first back to what was before, then think about it."""
        before, self._job.baseline = self.trial.before, self.trial.to_beat
        self._job.go_over(before.plan if before is not None and before.plan is not None else "dense")
        back = f"back to {before}" if before is not None else "gradients travel dense, by plain all-reduces"
        words = f"{words}: not faster; {back}"
        if self._job.profile is not None and before is None:
            self._job.save(ddp_plan(self._job.profile, self._job.quality, self._job.baseline, self._job.borders))
        if self._job.patience.disappointed():
            self._job.decisions.add(
                f"{words}; after {DISAPPOINTMENTS} of them in a row nothing else is tried", loud=True
            )
            self._final = True
            self._job.rest(self.running)
            return
        self._job.decisions.add(words)
        self._job.rest(functools.partial(self._thinking, measured, self.trial.plain))

    def _thinking(self, tried: float, plain: Plan | None) -> None:
        """Some steps after a trial that was slower: why, and whether something else is worth one."""
        self._job.seen.append(self._job.meter.step())
        if len(self._job.seen) < CHECKED:
            return
        (now,) = mean(self._job.world, statistics.median(self._job.seen))
        words = f"{milliseconds(now)} per step since, {milliseconds(tried)} in the trial"
        self._job.baseline = now
        self._job.rest(self.running)
        if self._plans_for_links(words, now):
            return
        if plain is not None and plain.predicted_seconds <= (1.0 - HYSTERESIS) * now:
            said = f"{words}; one codec for everything is predicted at {milliseconds(plain.predicted_seconds)}"
            self.switch(plain, said)

    def _plans_for_links(self, words: str, seconds: float) -> bool:
        """Whether links are not what they were when the plan was made: then another one is sought."""
        if self._job.profile is None or self._planning:
            return False
        links = self._job.links_now(seconds)
        if links is None or not apart(links, 1.0):
            return False
        self._seek(words, links, seconds)
        return True

    def _tries_plain(self, plan: Plan, measured: float, words: str) -> bool:
        """Whether the plain plan may be as fast by what is predicted: it asks less of the machine, so it is tried too."""
        plain = self.trial.plain
        if plain is None or plain.predicted_seconds > (1.0 + HYSTERESIS) * measured:
            return False
        self._job.baseline = measured
        self._job.save(plan)
        said = f"{words}; one codec for everything is predicted at {milliseconds(plain.predicted_seconds)}"
        self.switch(plain, said)
        return True

    def running(self) -> None:
        snapshot = self._job.observe()
        if snapshot is None:
            return
        if snapshot.alarm:
            self._give_up(snapshot.alarm)
            return
        changed = self._job.changes.observe(snapshot)
        self._compare_with_dense(snapshot)
        if snapshot.planned:
            self._adopt()
        elif changed and not self._planning and not self._final:
            self._plan_again()

    def _give_up(self, reason: str) -> None:
        strategy = self._job.wire.strategy
        self._job.wire.session.change("dense", None, keep=False)
        self._job.watchdog.forget()
        self._job.decisions.add(
            f"{strategy} is given up, and what it held back is dropped: {reason}; gradients travel dense", loud=True
        )
        self._job.rest(nothing)

    def _plan_again(self) -> None:
        words, seconds = self._job.changes.words(), self._job.changes.seconds
        if self._job.changes.cpu_explains:
            self._job.decisions.add(f"{words}: CPU contention, not links; nothing is planned again")
            self._job.rest(self.running)
        elif self._job.profile is None:  # this run began with a plan that was saved without one
            if self._job.hook.registered:
                self._job.go_over("dense")
            self._job.decisions.add(f"{words}: the job is measured again")
            self._look_again()
        elif (links := self._job.links_now(seconds)) is None:
            self._job.rest(self.running)
        else:
            self._seek(words, links, seconds)

    def _seek(self, words: str, links: float, seconds: float) -> None:
        """Look for another plan, beside the training, for links that need `links` times as long; a step takes `seconds`."""
        job, profile = self._job, self._job.profile
        assert profile is not None
        job.borders = job.borders or job.profiling.borders(profile)
        job.decisions.add(
            f"{words}; links pass a byte in {links:.2f} times the seconds: planning again, beside the training"
        )
        job.baseline, self._planning = seconds, True
        if job.world.rank == 0:
            request = ReplanRequest(profile, job.wire.plan, job.quality, links, seconds, job.borders)
            job.search = PlanThread(lambda: replan(request))

    def _adopt(self) -> None:
        search, self._job.search, self._planning = self._job.search, None, False
        choice: Choice = from_rank_0(self._job.world, lambda: search.result() if search is not None else None, Choice)
        self._job.profile, plan = choice.profile, choice.plan
        gain = 1.0 - plan.predicted_seconds / choice.present
        alone = plan.dense_seconds if not self._job.wire.strategy.direct else choice.present
        evidence = Evidence(alone, choice.profile.compute, alone)
        words = f"predicted {milliseconds(plan.predicted_seconds)} per step instead of {milliseconds(choice.present)}"
        believed = possible(evidence, plan.predicted_seconds)
        if gain < HYSTERESIS or not believed or (is_dense(plan) and self._job.wire.strategy.direct):
            doubt = "" if believed else ", which is not possible"
            self._job.decisions.add(f"the best plan is {words}{doubt}: no change", choice.considered)
            if self._job.wire.plan is not None:
                self._job.save(self._job.wire.plan)
            self._job.rest(self.running)
        elif is_dense(plan):
            self._job.go_over("dense")
            self._job.decisions.add(f"{words}: gradients travel dense, by plain all-reduces", choice.considered)
            self._job.rest(self.running)
        else:
            self.switch(plan, words, choice.considered, choice.plain)

    def resumed(self) -> None:
        """A state was loaded, perhaps with its plan."""
        job = self._job
        job.hook.register()
        job.rest(self.running)
        self.control = Control(job.wire.plan.dense_seconds if job.wire.plan is not None else 0.0)
        job.decisions.add(f"goes on with {job.wire.strategy}, as saved")
