"""`attach(ddp)`: measures a job, plans it, switches to the plan, checks that it is faster, and goes on watching.

    watching   DDP alone, without a hook, for some steps; then links and codecs are measured between two of them
    trying     by the plan, for some steps, which are compared with those before
    running    what was chosen is kept; every few steps all ranks look together at step time, links and what is applied

Everything here happens between two steps, in the thread that trains, and all ranks do the same: they see as many steps, and
whatever decides is the mean over all of them. Only the search for another plan runs beside the training, on rank 0.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..codecs import Codec
from ..engine.agree import compile_kernels
from ..engine.method import Method
from ..engine.state import Meta
from ..engine.watchdog import Watchdog
from ..errors import PlanError, ThinwireError
from ..kernels.finite import all_finite
from ..log import logger
from ..planner.again import Choice, Search, alone, best_beside, is_dense, left_to_ddp, milliseconds
from ..planner.choose import by_buckets
from ..planner.drift import Cusum
from ..planner.plan import Plan, Quality
from ..planner.profile import Cluster, Profile
from ..profiler.links import measure as measure_links
from ..schemes.world import TorchWorld
from . import kept
from .ddp import DDPWire, parameters_of
from .lookout import Lookout, Seen, probe_bytes
from .profile import Profiling

_HIGH = ("dense", "cast", "int8", "micro(density=0.05)", "micro(density=0.01)", "adacomp", "laplace(density=0.01)")
CANDIDATES: dict[Quality, tuple[str, ...]] = {
    "lossless": ("dense",),
    "high": _HIGH,
    "fast": (*_HIGH, "micro(density=0.001)", "randomblock", "lowrank"),
}
FEW = ("dense", "cast", "micro(density=0.01)", "adacomp")
"""For jobs with short steps: every further codec takes as long to load and measure as many of them."""
BETWEEN_NODES = ("dense via iRS eAR iAG", "micro(density=0.01) via iRS comp eARc dec iAG")
ROUNDS = 2
"""The most that one of them needs."""

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

LONGEST_MEASUREMENT, SHORT_MEASUREMENT = 12.0, 4.0


@dataclass
class Decision:
    """What was found and done at one step, for `explain`."""

    step: int
    text: str
    considered: list[str] = field(default_factory=list)


class AutoWire(DDPWire):
    """What `attach(ddp)` returns."""

    def begin(self, quality: Quality, plan_file: str | Path | None) -> None:
        """Take the plan of an earlier run; watch the job if there is none. A collective."""
        assert isinstance(self.world, TorchWorld)
        self.quality: Quality = quality
        self.decisions: list[Decision] = []
        self.native_seconds = 0.0
        self._parent = self.world.parent
        self._phase: Callable[[], None] = self._watching
        self._profile: Profile | None = None
        self._borders: list[int] = []
        self._before = self.method
        self._plain: Plan | None = None
        self._baseline = 0.0
        self._trial: list[float] = []
        self._paused = self._planning = False
        self._dog = Watchdog({tensor.name: tensor.elements for tensor in self.tensors})
        self._lookout = Lookout(self.world, self._dog)
        self._step_time, self._link_time = Cusum(), _watch_on_links()
        self._search: Search | None = None
        self._file = self._place_of_plan(plan_file)
        self._profiling: Profiling | None = None
        if self.world.size == 1:
            self._decide("world size is 1, there is nobody to exchange with: DDP stays alone, no hook is registered")
            return
        self.world.prepare([(round_, "flat") for round_ in range(ROUNDS)])
        saved = self._saved_plan()
        module = self._module()
        assert module is not None
        self._profiling = Profiling(module, self._after_step)
        if saved is None:
            self._decide("watching DDP alone, without a hook, for some steps")
        elif is_dense(saved):
            self._decide(f"by the plan {self._file} of an earlier run DDP stays alone, no hook is registered")
            self._rest(self._running)
        else:
            self._baseline = saved.dense_seconds
            self._rest(self._running)
            self._switch(saved, f"by the plan {self._file} of an earlier run")

    def _rest(self, phase: Callable[[], None]) -> None:
        """No profile is wanted any more; what was seen so far says nothing about what comes now."""
        if self._profiling is not None:
            self._profiling.rest()
        self._trial = []
        self._lookout.rest()
        self._step_time, self._link_time = Cusum(), _watch_on_links()
        self._phase = phase

    # -- between two steps ---------------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        module = self._module()
        if self.error is not None or module is None:
            return
        if not self.hooked:
            self.dense_steps += 1
            assert self._profiling is not None
            self._recorder.alone(self.steps, self._profiling.watch.steps[-1].wall)
        if module._join_config.enable:
            # Ranks that have joined take no step, so there is no moment at which all of them could speak.
            if not self._paused:
                self._decide("inside join() nothing is measured or changed, because ranks may end before others")
            self._paused = True
            self._lookout.rest()
            return
        try:
            self._phase()
        except ThinwireError as error:  # on all ranks: whatever fails here was agreed on
            if self.error is not None:
                raise
            self._decide(f"nothing further is tried: {error}", loud=True)
            self._rest(_nothing)

    def _watching(self) -> None:
        profiling = self._profiling
        assert profiling is not None
        if not profiling.ready:
            return
        found = profiling.watch.compute()
        native, compute, crowd = self._mean(found.wall, found.forward + found.backward + found.optimizer, found.crowd)
        words = f"{milliseconds(compute)} of it computation"
        if native - compute < LEAST_GAIN * native:
            self.native_seconds = self._baseline = native
            self._stay(f"{_alone(native)}, {words}: no method can save {LEAST_GAIN:.0%}")
            return
        budget = min(LONGEST_MEASUREMENT, max(2.0, 20 * native))
        profile = profiling.measure(candidates=self._candidates(budget), budget=budget)
        self._borders = profiling.borders(profile)
        self._profile = profile = by_buckets(profile, self._borders)
        expected: float = self._from_rank_0(lambda: alone(profile, self._borders))
        if _apart(native, expected):
            expectation = f"by its links it should take {milliseconds(expected)}"
            self._decide(f"{_alone(native)}, {expectation}: watching {CHECKED} more steps")
            self._rest(functools.partial(self._checking, profile, words, crowd))
        else:
            self._weigh(profile, native, words, crowd)

    def _checking(self, profile: Profile, words: str, crowd: float) -> None:
        """DDP alone once more, because its steps and the links, which were measured after them, did not fit."""
        assert self._profiling is not None
        self._trial.append(self._profiling.watch.steps[-1].wall)
        if len(self._trial) == CHECKED:
            (native,) = self._mean(statistics.median(self._trial))
            self._weigh(profile, native, words, crowd)

    def _weigh(self, profile: Profile, native: float, words: str, crowd: float) -> None:
        """Whether the best plan is worth a hook. `crowd`: how many threads want each core."""
        self.native_seconds = self._baseline = native
        choice: Choice = self._from_rank_0(lambda: best_beside(profile, self.quality, self._borders, native))
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
        how = "gradients travel dense" if self.hooked else "DDP stays alone, no hook is registered"
        self._decide(f"{words}; {how}", considered)
        if self._profile is not None:
            self._save(left_to_ddp(self._profile, self.quality, self.native_seconds, self._borders))
        self._rest(self._running)

    def _switch(self, plan: Plan, words: str, considered: Sequence[str] = (), plain: Plan | None = None) -> None:
        """From the next step on by this plan, on trial; `plain` is tried too if it promises more than this one keeps."""
        self._before, self._plain = self.method, plain
        self._go_over(plan)
        self._decide(f"{words}; switching to {self.method}", considered)
        self._rest(self._trying)

    def _trying(self) -> None:
        assert self._profiling is not None
        assert self.plan is not None
        self._trial.append(self._profiling.watch.steps[-1].wall)
        seen = self._look_around()
        if seen is not None and seen.alarm:
            self._give_up(seen.alarm)
            return
        if len(self._trial) < SETTLE + WINDOW:
            return
        (measured,) = self._mean(statistics.median(self._trial[SETTLE:]))
        plan, before = self.plan, self._before
        words = (
            f"{milliseconds(measured)} a step, predicted {milliseconds(plan.predicted_seconds)}, "
            f"before {milliseconds(self._baseline)}"
        )
        if self._finds_links_changed(plan, measured, words) or self._tries_plain(plan, measured, words):
            return
        if measured < self._baseline:
            self._decide(f"{words}: kept")
            self._save(plan)
            self._phase = self._running  # what is under way goes on
            return
        self._go_over(before.plan if before.plan is not None else "dense")
        back = f"back to {before}" if before.plan is not None else "gradients travel dense, by plain all-reduces"
        self._decide(f"{words}: not faster; {back}")
        if self._profile is not None and before.plan is None:
            self._save(left_to_ddp(self._profile, self.quality, self._baseline, self._borders))
        self._rest(self._running)

    def _finds_links_changed(self, plan: Plan, measured: float, words: str) -> bool:
        """Whether a trial went so far from its prediction because links changed: then another plan is sought."""
        if self._profile is None or not _apart(measured, plan.predicted_seconds):
            return False
        (links,) = self._mean(self._links_now(self._profile, measured))
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
        seen = self._look_around()
        if seen is None:
            return
        if seen.alarm:
            self._give_up(seen.alarm)
            return
        changed = self._step_time.observe(seen.wall) | self._link_time.observe(seen.link)
        if seen.planned:
            self._adopt()
        elif changed and not self._planning:
            self._plan_again()

    def _give_up(self, reason: str) -> None:
        method = self.method
        super().change("dense", keep=False)
        self._dog.forget()
        self._decide(
            f"{method} is given up, and what it held back is dropped: {reason}; gradients travel dense", loud=True
        )
        self._rest(_nothing)

    # -- on watch ------------------------------------------------------------------------------------------------------

    def _look_around(self) -> Seen | None:
        assert self._profiling is not None
        active = self.runner is not None and not self._went_direct
        return self._lookout.step(
            self._profiling.watch.steps[-1].wall,
            self.runner.members[0] if active and self.runner is not None else None,
            self._search is not None and self._search.done,
            lambda: probe_bytes(self._profile, self.plan),
        )

    def _plan_again(self) -> None:
        step, link = self._step_time, self._link_time
        assert self._profiling is not None
        words = f"steps went from {milliseconds(step.level)} to {milliseconds(step.last)}"
        if link.level > 0.0:
            words += f", a message between them from {milliseconds(link.level)} to {milliseconds(link.last)}"
        if self._profile is None:  # this run began with a plan that was saved without one
            if self.hooked:
                self._go_over("dense")
            self._decide(f"{words}: the job is measured again")
            self._rest(self._watching)
            self._profiling.begin()
            return
        self._seek(words, self._links_now(self._profile, step.last), step.last)

    def _seek(self, words: str, links: float, seconds: float) -> None:
        """Look for another plan, beside the training, for links that need `links` times as long; a step takes `seconds`."""
        assert self._profile is not None
        assert self._profiling is not None
        self._borders = self._borders or self._profiling.borders(self._profile)
        self._decide(
            f"{words}; links pass a byte in {links:.2f} times the seconds: planning again, beside the training"
        )
        self._baseline, self._planning = seconds, True
        if self.world.members[0] == 0:
            self._search = Search(self._profile, self.plan, self.quality, links, seconds, self._borders)

    def _links_now(self, profile: Profile, step: float) -> float:
        """How many times the seconds of the profile links need for a byte. Takes about a step."""
        assert isinstance(self.world, TorchWorld)
        budget = min(1.0, max(0.2, step))
        (samples,) = measure_links(self.world, [("all_gather", "flat")], budget=budget, largest=1 << 20)
        now, before = samples.link(), profile.link("all_gather", "flat")
        small, large = samples.bytes[0], samples.bytes[-1]
        difference = max(before.seconds(large) - before.seconds(small), 1e-9)
        return max((now.seconds(large) - now.seconds(small)) / difference, 1e-3)

    def _adopt(self) -> None:
        search, self._search, self._planning = self._search, None, False
        choice: Choice = self._from_rank_0(lambda: search.result() if search is not None else None)
        self._profile, plan = choice.profile, choice.plan
        gain = 1.0 - plan.predicted_seconds / choice.present
        words = f"predicted {milliseconds(plan.predicted_seconds)} a step instead of {milliseconds(choice.present)}"
        if gain < HYSTERESIS or (is_dense(plan) and self.method.direct):
            self._decide(f"the best plan is {words}: no change", choice.considered)
            if self.plan is not None:
                self._save(self.plan)
            self._rest(self._running)
        elif is_dense(plan):
            self._go_over("dense")
            self._decide(f"{words}: gradients travel dense, by plain all-reduces", choice.considered)
            self._rest(self._running)
        else:
            self._switch(plan, words, choice.considered, choice.plain)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _go_over(self, method: Plan | str) -> None:
        """To another way; a hook is registered when it is needed for the first time."""
        new = Method.of(method)
        compile_kernels(self._parent, new)
        super().change(method)
        self._dog.forget()
        if not new.direct:
            self.hook()

    def _mean(self, *numbers: float) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=self._parent)
        return [float(number) for number in tensor]

    def _from_rank_0(self, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, on all ranks; an error there is one everywhere."""
        box: list[Any] = [None]
        if self.world.members[0] == 0:
            try:
                box[0] = make()
            except Exception as error:  # the others wait to hear of it
                box[0] = error if isinstance(error, ThinwireError) else PlanError(f"{type(error).__name__}: {error}")
        dist.broadcast_object_list(box, group=self._parent, group_src=0)
        if isinstance(box[0], ThinwireError):
            raise box[0]
        return box[0]

    def _candidates(self, budget: float) -> tuple[str, ...]:
        each, found = self.world.ranks_per_node, CANDIDATES[self.quality]
        if budget < SHORT_MEASUREMENT:
            found = tuple(text for text in FEW if text in found)
        layered = each is not None and 1 < each < self.world.size and self.quality != "lossless"
        return (*found, *BETWEEN_NODES) if layered else found

    def _came(self, names: tuple[str, ...], buffer: Tensor) -> None:
        if self.runner is not None:
            self._dog.came(names, buffer, self.runner.members[0].scale)

    def _went(self, names: tuple[str, ...], buffer: Tensor) -> None:
        if self.runner is not None:
            self._dog.went(names, buffer, self.runner.members[0].scale)

    def change(self, codec: Codec | str | Plan, chain: str | None = None, *, keep: bool = True) -> None:
        """As of any wire; nothing is decided any more after it."""
        super().change(codec, chain, keep=keep)
        self._dog.forget()
        if not self.method.direct:
            self.hook()
        self._rest(_nothing)
        self._decide(f"changed by hand to {self.method.full}: nothing further is measured or decided")

    # -- what a wire without a hook must do otherwise ------------------------------------------------------------------

    @property
    def skipped_last_step(self) -> bool:
        module = self._module()
        if self.hooked or not self._guarded or module is None:
            return super().skipped_last_step
        # DDP alone tells nobody. Its means are the same on all ranks.
        gradients = [parameter.grad for parameter in parameters_of(module).values()]
        return not all(all_finite(gradient.reshape(-1)) for gradient in gradients if gradient is not None)

    def _method_after(self, saved: Method) -> Method:
        # Rounds of plans were made ready in `begin`, chains between nodes were not.
        return saved if not saved.chains else self.method

    def _resume(self, meta: Meta) -> None:
        super()._resume(meta)
        if self.world.size > 1 and not self.method.direct:
            self.hook()
            self._rest(self._running)
            self._decide(f"goes on with {self.method}, as saved")

    # -- plans of earlier runs -----------------------------------------------------------------------------------------

    def _place_of_plan(self, given: str | Path | None) -> Path | None:
        if given is not None:
            return Path(given) if str(given) else None
        each = self.world.ranks_per_node or 1
        return kept.place(self.tensors, Cluster(self.world.size // each, each), self.quality)

    def _saved_plan(self) -> Plan | None:
        """The plan in rank 0's file, on all ranks, if there is one and it fits."""

        def check(plan: Plan) -> None:
            Method.of(plan).check(self.tensors, self.world.size, self.world.ranks_per_node)

        file = self._file
        found = self._from_rank_0(lambda: None if file is None else kept.load(file, self.quality, check))
        if isinstance(found, str):
            self._decide(found)
        if not isinstance(found, tuple):
            return None
        plan: Plan = found[0]
        self._profile = found[1]
        return plan

    def _save(self, plan: Plan) -> None:
        if self._file is None or self.world.members[0] != 0:
            return
        try:
            kept.save(self._file, plan, self._profile)
        except (OSError, ThinwireError) as error:  # rank 0 alone gets here: it must go on as the others do
            self._decide(f"the plan could not be kept for the next run: {error}")

    # -- words ---------------------------------------------------------------------------------------------------------

    def _decide(self, text: str, considered: Sequence[str] = (), loud: bool = False) -> None:
        self.decisions.append(Decision(self.steps, text, list(considered)))
        self._recorder.event(self.steps, "fallback" if loud else "auto", text)
        if self.world.members[0] == 0:
            (logger.warning if loud else logger.info)("auto, step %d: %s", self.steps, text)

    def log_to(self, target: Any = None, **options: int) -> None:
        super().log_to(target, **options)
        if target is not None:
            for decision in self.decisions:
                self._recorder.event(decision.step, "auto", decision.text)

    log_to.__doc__ = DDPWire.log_to.__doc__

    def explain(self) -> str:
        """What was measured, which plans were considered, why this one, what it predicts, and what was then measured."""
        lines = [f"auto, quality {self.quality!r}, {self.world.size} ranks"]
        for decision in self.decisions:
            lines.append(f"step {decision.step}: {decision.text}")
            lines += [f"    {text}" for text in decision.considered]
        lines.append(f"now: {self.method.full if self.hooked else 'DDP alone, no hook'}")
        return "\n".join(lines)

    def close(self) -> None:
        if self._profiling is not None:
            self._profiling.close()
        super().close()


def _watch_on_links() -> Cusum:
    """Single messages vary much: only what takes several times as long, or twice as long twice, is a change."""
    return Cusum(allowed=0.5, alarm=0.5)


def _alone(seconds: float) -> str:
    return f"a step takes {milliseconds(seconds)} with DDP alone"


def _apart(one: float, other: float) -> bool:
    return max(one, other) > APART * min(one, other)


def _nothing() -> None:
    """After an alarm, or a change by hand, nothing is tried again."""
