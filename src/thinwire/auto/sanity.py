"""Whether a prediction may be acted on: pure functions of what was measured.

A step cannot take less than its computation, and what takes more than DDP alone is of no use. Measurements that say
otherwise were disturbed, usually by other work on the same cores, and nothing can be concluded from them.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ..planner.plan import Plan

TWICE = 2.0
"""Measurements that disagree by more than this factor are thrown away."""

TOLERANCE = 1e-3
"""Of a step: rounding of numbers that were scaled to each other."""


class Verdict(enum.Enum):
    """What to do about a prediction."""

    ACT = "act"
    STAY = "stay"
    BUSY = "busy"
    """The measurements contradict each other: they are thrown away."""


@dataclass(frozen=True)
class Evidence:
    """What is known of a job's steps. Seconds.

    native    measured with DDP alone
    compute   of that, computation
    expected  what DDP alone should take by the measured links
    spread    by how much more of the communication than the least the links took, relative to the least
    unsteady  how much the measured steps differ among themselves, relative to their median
    """

    native: float
    compute: float
    expected: float
    spread: float = 0.0
    unsteady: float = 0.0

    @property
    def least_expected(self) -> float:
        """What DDP alone should take if links always were as fast as they were at best."""
        return self.compute + max(0.0, self.expected - self.compute) / (1.0 + self.spread)


def contradiction(evidence: Evidence) -> str:
    """How the measurements contradict each other, or nothing."""
    numbers = (evidence.native, evidence.compute, evidence.expected, evidence.spread, evidence.unsteady)
    if not all(math.isfinite(number) and number >= 0.0 for number in numbers) or not evidence.native > 0.0:
        return "a measurement is not a number of seconds"
    if evidence.native > TWICE * evidence.expected:
        return "steps take more than twice what links and computation explain"
    if evidence.least_expected > TWICE * evidence.native:
        return "links and computation would take more than twice as long as the steps did"
    return ""


def possible(evidence: Evidence, predicted: float) -> bool:
    """Whether a step can take so long: not less than computation, not more than DDP alone."""
    return evidence.compute * (1.0 - TOLERANCE) <= predicted <= evidence.native * (1.0 + TOLERANCE)


def judge(evidence: Evidence, predicted: float, least: float) -> Verdict:
    """What to do about a plan that is predicted to take so long, where it must save `least` of a step.

    The gain must also stand out from the unsteadiness of the steps it was measured against.
    """
    if contradiction(evidence) or not math.isfinite(predicted) or predicted < evidence.compute * (1.0 - TOLERANCE):
        return Verdict.BUSY
    gain = 1.0 - predicted / evidence.native
    enough = gain >= max(least, evidence.unsteady / 2.0)
    return Verdict.ACT if enough and possible(evidence, predicted) else Verdict.STAY


def to_beat(before: float, controls: Sequence[float], dense: bool) -> float:
    """What a trial is compared with.

    before    seconds of a step by what ran before, measured then
    controls  seconds of dense steps between those of the trial: they met the same load
    dense     whether dense steps, or DDP alone, were what ran before
    """
    if not controls:
        return before
    now = statistics.median(controls)
    return now if dense else min(before, now)


def transferred(plan: Plan, native: float, compute: float) -> Plan:
    """A plan of an earlier run with the seconds that it promises for steps that take so long now.

    Of the communication it saves the share that it saved then.
    """
    before = plan.dense_seconds - plan.bound_seconds
    share = (plan.predicted_seconds - plan.bound_seconds) / before if before > 0.0 else 1.0
    predicted = compute + max(0.0, share) * max(0.0, native - compute)
    return msgspec.structs.replace(plan, predicted_seconds=predicted, dense_seconds=native, bound_seconds=compute)


def fits_plan(plan: Plan, native: float, compute: float) -> bool:
    """Whether steps take now about what they took when a plan was made."""

    def alike(one: float, other: float) -> bool:
        return max(one, other) <= TWICE * min(one, other)

    return alike(native, plan.dense_seconds) and (plan.bound_seconds <= 0.0 or alike(compute, plan.bound_seconds))
