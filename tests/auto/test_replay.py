"""Decisions replayed on what was measured on a busy machine: whatever was measured, the job ends at most 5 % above DDP alone.

`noisy.json` was written by `record.py`, beside processes that compute without end. No clock is read here. What steps really
take follows from profiles of the same jobs without that load, times the noise of the steps that were recorded with it; and,
because a busy CPU costs a codec more than a prediction knows, times several factors.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from thinwire.auto.control import SLOWER, Control
from thinwire.auto.first_plan import MOST_CROWDED
from thinwire.auto.job import LEAST_GAIN
from thinwire.auto.monitor import PERIOD
from thinwire.auto.sanity import Evidence, Verdict, contradiction, judge, possible
from thinwire.auto.trial import Trial
from thinwire.planner.plan import Plan
from thinwire.planner.predict import predict
from thinwire.planner.profile import Profile
from thinwire.planner.replan import apply_fit, best_plan_fitted, fit_to_ddp, is_dense, predict_ddp
from thinwire.planner.search import as_ddp, by_buckets

DATA = json.loads((Path(__file__).parent / "noisy.json").read_text())
COSTS = (1.0, 1.15, 1.5, 2.5)
"""How many times as long as predicted a step with a codec takes."""
LONG = 60_000
"""Steps."""


def _profile(case: dict[str, Any]) -> Profile:
    known = {tensor["name"]: tensor for tensor in DATA["tensors"]}
    ready, last = [], 0.0
    for name, (at, energy) in case["ready"].items():
        last = max(last, at)  # rounding
        ready.append({**known[name], "ready": last, "energy": energy})
    content = {**case["profile"], "tensors": ready}
    content["backward"] = max(last, content["backward"])
    for link in content["links"]:
        rising = list(itertools.accumulate((seconds for _, seconds in link["points"]), max))
        link["points"] = [(size, seconds) for (size, _), seconds in zip(link["points"], rising, strict=True)]
    profile = msgspec.convert(content, Profile, strict=False)
    return by_buckets(profile, case["borders"])


class Machine:
    """What steps of a recorded job really take."""

    def __init__(self, case: dict[str, Any]) -> None:
        calm = DATA["calm"][case["link"]]
        self._profile = apply_fit(fit_to_ddp(_profile(calm), calm["native"], calm["borders"]))
        self._usual = predict(self._profile, as_ddp(self._profile, borders=calm["borders"])).seconds
        middle = statistics.median(case["walls"])
        self._noise = itertools.cycle(wall / middle for wall in case["walls"])
        self.load = max(1.0, case["native"] / calm["native"])

    @property
    def dense(self) -> float:
        return self._usual * self.load

    def by(self, plan: Plan, cost: float) -> float:
        return predict(self._profile, plan.groups).seconds * self.load * cost

    def noisy(self, seconds: float) -> float:
        return seconds * next(self._noise)


def _choice(case: dict[str, Any]) -> Plan | None:
    """The plan that is tried, if one is."""
    native, profile = case["native"], _profile(case)
    if native - case["compute"] < LEAST_GAIN * native:
        return None
    expected = predict_ddp(profile, case["borders"])
    evidence = Evidence(native, profile.compute, expected, profile.spread, case["unsteady"])
    if contradiction(evidence):
        return None
    plan = best_plan_fitted(profile, "high", case["borders"], native).plan
    verdict = judge(evidence, plan.predicted_seconds, LEAST_GAIN * min(case["crowd"], MOST_CROWDED))
    if verdict is not Verdict.ACT or is_dense(plan):
        return None
    assert possible(evidence, plan.predicted_seconds)
    return plan


def _trial(machine: Machine, seconds: float, before: float, control: Control) -> bool:
    """Whether a trial is kept, in which steps take so long."""
    trial = Trial(None, before)
    while not trial.ended:
        trial.steps.append(machine.noisy(seconds))
        now = statistics.median(trial.steps[-PERIOD:])
        if trial.wants_control and control.needed(now):
            trial.controls.append(machine.noisy(machine.dense))
            control.compare(trial.controls[-1], now)
        if trial.looks and trial.failed(trial.seconds):
            return False
    return True


def _run(machine: Machine, seconds: float, control: Control) -> Iterator[bool]:
    """For each comparison whether the method is left, in which steps take so long."""
    recent: deque[float] = deque(maxlen=PERIOD)
    for step in range(LONG):
        recent.append(machine.noisy(seconds))
        if step % PERIOD == PERIOD - 1:
            now = statistics.median(recent)
            control.passed(PERIOD * now)
            if control.due(now):
                yield control.compare(machine.noisy(machine.dense), now)


def _outcome(case: dict[str, Any], plan: Plan, cost: float) -> float:
    """What a step takes in the end, relative to DDP alone."""
    machine = Machine(case)
    seconds, control = machine.by(plan, cost), Control(case["native"])
    if not _trial(machine, seconds, case["native"], control) or any(_run(machine, seconds, control)):
        return 1.0
    return seconds / machine.dense


@pytest.mark.parametrize("place", range(len(DATA["noisy"])))
def test_no_recorded_noise_makes_a_job_slower_than_ddp_alone(place: int) -> None:
    case = DATA["noisy"][place]
    plan = _choice(case)
    if plan is not None:
        assert max(_outcome(case, plan, cost) for cost in COSTS) <= SLOWER


def test_there_is_enough_noise_and_something_to_gain() -> None:
    cases = DATA["noisy"]
    assert len(cases) >= 30
    assert {case["loops"] for case in cases} == {2, 4, 8}
    plans = [(case, plan) for case in cases if (plan := _choice(case)) is not None]
    kept = [_outcome(case, plan, 1.0) for case, plan in plans]
    assert min(kept) < 0.9, "on slow links a plan is worth it in spite of the noise"
    assert len(plans) < len(cases), "not everything is believed"
