"""Plans of a job compared with its alternatives, and replanning in a thread when links have changed."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from ..errors import PlanError
from .drift import scaled
from .plan import Plan, Quality
from .predict import predict
from .profile import Profile
from .search import LOSSES, as_ddp, choose

FURTHEST = 4.0
"""Largest ratio, either way, of the seconds per byte during computation to those measured on idle cores."""


@dataclass(frozen=True)
class Choice:
    """A plan and its alternatives.

    compared    each alternative: its name, predicted seconds, and what else there is to say of it
    plain       the fastest plan with a single codec in DDP's own buckets; None if that is the plan itself, or dense
    present     predicted seconds of the plan in use
    """

    profile: Profile
    plan: Plan
    compared: tuple[tuple[str, float, str], ...]
    plain: Plan | None = None
    present: float = 0.0

    @property
    def considered(self) -> list[str]:
        """A line of text per alternative."""
        return [f"{name}: {milliseconds(seconds)}, {words}" for name, seconds, words in self.compared]

    def rescaled(self, factor: float, compute: float) -> Choice:
        """With all step times multiplied by `factor`, but none shorter than `compute`, whatever was measured."""

        def rescale(seconds: float) -> float:
            return max(compute, seconds * factor)

        def longer(plan: Plan) -> Plan:
            return msgspec.structs.replace(
                plan, predicted_seconds=rescale(plan.predicted_seconds), dense_seconds=rescale(plan.dense_seconds)
            )

        plain = None if self.plain is None else longer(self.plain)
        compared = tuple((name, rescale(seconds), words) for name, seconds, words in self.compared)
        return replace(self, plan=longer(self.plan), plain=plain, compared=compared)


def best_plan(profile: Profile, quality: Quality, borders: Sequence[int] = ()) -> Choice:
    """The best plan, compared with every single codec in DDP's own buckets."""
    plan = choose(profile, quality=quality, borders=borders)
    compared = [(describe(plan), plan.predicted_seconds, f"loss {plan.loss:.2f}")]
    plain: Plan | None = None
    for cost in profile.codecs:
        name = f"{cost.codec} via {cost.chain}" if cost.chain else cost.codec
        groups = as_ddp(profile, cost.codec, cost.chain, borders)
        seconds = predict(profile, groups).seconds
        allowed = cost.loss <= LOSSES[quality]
        outside = "" if allowed else f", not in quality {quality!r}"
        compared.append((f"{name} for everything", seconds, f"loss {cost.loss:.2f}{outside}"))
        if allowed and (plain is None or seconds < plain.predicted_seconds):
            plain = msgspec.structs.replace(plan, groups=groups, predicted_seconds=seconds, loss=cost.loss)
    if plain is not None and (is_dense(plain) or describe(plain) == describe(plan)):
        plain = None
    return Choice(profile, plan, tuple(compared), plain)


def fit_to_ddp(profile: Profile, seconds: float, borders: Sequence[int] = ()) -> Profile:
    """With the `fit` for which the predicted step time of plain DDP equals the measured `seconds`.

    Links are measured on idle cores. During computation a byte takes longer, and delays the computation more.
    """
    groups = as_ddp(profile, borders=borders)
    low, high = 1.0 / FURTHEST, FURTHEST
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        if predict(apply_fit(msgspec.structs.replace(profile, fit=middle)), groups).seconds < seconds:
            low = middle
        else:
            high = middle
    return msgspec.structs.replace(profile, fit=math.sqrt(low * high))


def apply_fit(profile: Profile) -> Profile:
    """The costs during computation: a byte takes `fit` times the seconds on the link and on the CPU."""
    return msgspec.structs.replace(scaled(profile, profile.fit), contention=profile.contention, fit=1.0)


def predict_ddp(profile: Profile, borders: Sequence[int] = ()) -> float:
    """Predicted step time of plain DDP."""
    return predict(profile, as_ddp(profile, borders=borders)).seconds


def best_plan_fitted(profile: Profile, quality: Quality, borders: Sequence[int], seconds: float) -> Choice:
    """The best plan of a job whose steps take `seconds` with plain DDP."""
    profile = fit_to_ddp(profile, seconds, borders)
    found = best_plan(apply_fit(profile), quality, borders)
    return replace(found.rescaled(seconds / found.plan.dense_seconds, profile.compute), profile=profile)


def ddp_plan(profile: Profile, quality: Quality, seconds: float, borders: Sequence[int] = ()) -> Plan:
    """The plan of a job that does not benefit: dense, in DDP's own buckets. `seconds` is the measured step time."""
    dense = tuple(cost for cost in profile.codecs if cost.codec == "dense" and not cost.chain)
    plan = choose(msgspec.structs.replace(profile, codecs=dense))
    return msgspec.structs.replace(
        plan,
        quality=quality,
        groups=as_ddp(profile, borders=borders),
        predicted_seconds=seconds,
        dense_seconds=seconds,
    )


def is_dense(plan: Plan) -> bool:
    return all(group.codec == "dense" and not group.chain for group in plan.groups)


def describe(plan: Plan) -> str:
    """One line about a plan: its groups by codec."""
    counts = Counter(f"{group.codec} via {group.chain}" if group.chain else group.codec for group in plan.groups)
    return f"{len(plan.groups)} groups, " + ", ".join(f"{count} {codec}" for codec, count in counts.items())


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def with_links(profile: Profile, links: float) -> Profile:
    """The profile with links that need `links` times the seconds for a byte."""
    # The CPU time per byte does not depend on the link.
    times = max(1.0 + (profile.fit - 1.0) / links, 1.0 / FURTHEST)
    return msgspec.structs.replace(scaled(profile, links), fit=times)


def expected_step(profile: Profile, plan: Plan | None, links: float, borders: Sequence[int] = ()) -> float:
    """Predicted step time of a plan, or of plain DDP, with links that need `links` times the seconds for a byte."""
    now = apply_fit(with_links(profile, links))
    return predict(now, plan.groups if plan is not None else as_ddp(now, borders=borders)).seconds


@dataclass(frozen=True)
class ReplanRequest:
    """A job whose links have changed.

    profile  the measurements before the change
    present  the plan in use; None for dense
    links    factor by which links have become slower per byte
    seconds  the step time now
    borders  see `search.choose`
    """

    profile: Profile
    present: Plan | None
    quality: Quality
    links: float
    seconds: float
    borders: Sequence[int] = ()


def replan(request: ReplanRequest) -> Choice:
    """The best plan with the links as they are now."""
    borders = request.borders
    profile = with_links(request.profile, request.links)
    now = apply_fit(profile)
    found = best_plan(now, request.quality, borders)
    # The prediction error of the plan in use applies to the new plan too.
    groups = request.present.groups if request.present is not None else as_ddp(now, borders=borders)
    error = request.seconds / predict(now, groups).seconds
    return replace(found.rescaled(error, now.compute), profile=profile, present=request.seconds)


class PlanThread:
    """Makes a plan in a thread, beside the training."""

    def __init__(self, make: Callable[[], Choice]) -> None:
        self._answer: Choice | PlanError | None = None
        threading.Thread(target=self._work, args=(make,), name="thinwire-planner", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._answer is not None

    def result(self) -> Choice:
        """The new plan, once `done`."""
        assert self._answer is not None
        if isinstance(self._answer, PlanError):
            raise self._answer
        return self._answer

    def _work(self, make: Callable[[], Choice]) -> None:
        try:
            self._answer = make()
        except Exception as error:  # all ranks wait for the outcome
            self._answer = PlanError(f"planning failed: {type(error).__name__}: {error}")
