"""Auto-tuner: measures a job, plans it, switches to the plan, checks that it is faster, and goes on monitoring.

`first_plan` holds what happens until there is a plan, `plan_in_use` what happens from then on.

Everything here happens between two steps, in the thread that trains, and all ranks do the same: they see as many steps, and
whatever decides is the mean over all of them. Only the search for a plan runs beside the training, on rank 0.
"""

from __future__ import annotations

from ..engine import fits
from ..engine.lifecycle import Phase
from ..engine.watchdog import Watchdog
from ..errors import ThinwireError
from ..planner.plan import Plan
from .candidates import ROUNDS
from .decisions import Decisions
from .first_plan import FirstPlan
from .job import TunedJob, nothing
from .pauses import Pauses
from .plan_cache import Found
from .plan_in_use import PlanInUse
from .shared import from_rank_0


class AutoTuner:
    """Decides by which codecs and chains a wire exchanges, and changes it between two steps."""

    def __init__(self, job: TunedJob) -> None:
        self.job = job
        self.in_use = PlanInUse(self.job, self._look_again)
        self._first = FirstPlan(self.job, self.in_use)
        self._paused = False

    @property
    def decisions(self) -> Decisions:
        return self.job.decisions

    @property
    def watchdog(self) -> Watchdog:
        return self.job.watchdog

    @property
    def pauses(self) -> Pauses:
        return self.job.pauses

    def begin(self) -> None:
        """Take the plan of an earlier run; watch the job if there is none. A collective."""
        job = self.job
        if job.world.size == 1:
            job.decisions.add(
                "world size is 1, there is no other rank to exchange with: DDP stays alone, no hook is registered"
            )
            return
        job.world.prepare([(round_, "flat") for round_ in range(ROUNDS)])
        saved = self._saved_plan()
        job.watch(self._after_step)
        self._first.begin(saved)

    def _look_again(self) -> None:
        self._first.again()

    def _saved_plan(self) -> Plan | None:
        """The plan of an earlier run, on all ranks, if there is one and it fits."""
        found = from_rank_0(self.job.world, self.job.file.load, Found)
        if isinstance(found, str):
            self.job.decisions.add(found)
        if not isinstance(found, tuple):
            return None
        plan: Plan = found[0]
        self.job.profile = found[1]
        return plan

    def _after_step(self) -> None:
        job, module = self.job, self.job.module
        if job.wire.error is not None or module is None:
            return
        session = job.wire.session
        if not job.hook.registered:
            session.progress.dense_steps += 1
            session.recorder.alone(session.steps, job.meter.step())
        if module._join_config.enable:
            # Ranks that have joined take no step, so there is no moment at which all of them could speak.
            if not self._paused:
                job.decisions.add("inside join() nothing is measured or changed, because ranks may end before others")
            self._paused = True
            job.monitor.rest()
            return
        begun = job.meter.clock()
        job.begun = job.begun if job.begun is not None else begun
        try:
            if session.lifecycle.phase is Phase.CONTROL:
                self.in_use.controlled()
            else:
                job.phase()
        except ThinwireError as error:  # on all ranks: whatever fails here was agreed on
            if job.wire.error is not None:
                raise
            job.decisions.add(f"nothing further is tried: {error}", loud=True)
            job.rest(nothing)
        job.pauses.add(job.wire.steps, job.meter.clock() - begun)

    # -- what the wire tells -------------------------------------------------------------------------------------------

    def changed_by_hand(self) -> None:
        """The user chose another codec: nothing is decided any more."""
        job = self.job
        job.watchdog.forget()
        if not job.wire.strategy.direct:
            job.hook.register()
        job.rest(nothing)
        job.decisions.add(f"changed by hand to {job.wire.strategy.full}: nothing further is measured or decided")

    def resumed(self) -> None:
        """A state was loaded, perhaps with its plan."""
        if self.job.world.size > 1 and not self.job.wire.strategy.direct:
            self.in_use.resumed()

    # -- what the user asks --------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """See `DDPWire.explain`."""
        job, executor = self.job, self.job.wire.executor
        now = job.wire.strategy.full if job.hook.registered else "DDP alone, no hook"
        head = f"auto, quality {job.quality!r}, {job.world.size} ranks"
        found = fits.explained(executor.rank_states[0]) if executor is not None else []
        return "\n".join([head, *job.decisions.lines(), str(job.pauses), *found, f"now: {now}"])

    def close(self) -> None:
        self._first.close()
        self.job.close()
