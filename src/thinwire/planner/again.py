"""The best plan of a job, beside what else there is; and the same again, in a thread, for a job whose links have changed."""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from ..errors import PlanError
from .choose import LOSSES, as_ddp, choose
from .drift import scaled
from .plan import Plan, Quality
from .predict import predict
from .profile import Profile

FURTHEST = 4.0
"""How many times what was measured of links alone a byte may take beside a computation, or the other way round."""


@dataclass(frozen=True)
class Choice:
    """A plan, and for people what was considered.

    plain    the fastest of those with one codec for everything, in DDP's own buckets; None if that is the plan, or dense
    present  what the way in use is predicted to take
    """

    profile: Profile
    plan: Plan
    considered: tuple[str, ...]
    plain: Plan | None = None
    present: float = 0.0

    def at(self, factor: float) -> Choice:
        """The same, where a step takes `factor` times what was predicted."""

        def longer(plan: Plan) -> Plan:
            return msgspec.structs.replace(
                plan, predicted_seconds=plan.predicted_seconds * factor, dense_seconds=plan.dense_seconds * factor
            )

        plain = None if self.plain is None else longer(self.plain)
        return replace(self, plan=longer(self.plan), plain=plain)


def best(profile: Profile, quality: Quality, borders: Sequence[int] = ()) -> Choice:
    """The best plan, and every codec for all tensors in DDP's own buckets."""
    plan = choose(profile, quality=quality, borders=borders)
    words = [f"{describe(plan)}: {milliseconds(plan.predicted_seconds)}, loss {plan.loss:.2f}"]
    plain: Plan | None = None
    for cost in profile.codecs:
        name = f"{cost.codec} via {cost.chain}" if cost.chain else cost.codec
        groups = as_ddp(profile, cost.codec, cost.chain, borders)
        seconds = predict(profile, groups).seconds
        allowed = cost.loss <= LOSSES[quality]
        outside = "" if allowed else f", not in quality {quality!r}"
        words.append(f"{name} for everything: {milliseconds(seconds)}, loss {cost.loss:.2f}{outside}")
        if allowed and (plain is None or seconds < plain.predicted_seconds):
            plain = msgspec.structs.replace(plan, groups=groups, predicted_seconds=seconds, loss=cost.loss)
    if plain is not None and (is_dense(plain) or describe(plain) == describe(plan)):
        plain = None
    return Choice(profile, plan, tuple(words), plain)


def fit(profile: Profile, seconds: float, borders: Sequence[int] = ()) -> Profile:
    """The same with a `fit` by which DDP alone takes as long as it was measured to.

    Links were measured on cores that computed nothing. Beside a computation a byte takes longer, and takes more from it.
    """
    groups = as_ddp(profile, borders=borders)
    low, high = 1.0 / FURTHEST, FURTHEST
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        if predict(fitted(msgspec.structs.replace(profile, fit=middle)), groups).seconds < seconds:
            low = middle
        else:
            high = middle
    return msgspec.structs.replace(profile, fit=math.sqrt(low * high))


def fitted(profile: Profile) -> Profile:
    """The costs as they are beside a computation: a byte takes `fit` times the seconds, of link and processor alike."""
    return msgspec.structs.replace(scaled(profile, profile.fit), contention=profile.contention, fit=1.0)


def alone(profile: Profile, borders: Sequence[int] = ()) -> float:
    """What a step of DDP alone is predicted to take."""
    return predict(profile, as_ddp(profile, borders=borders)).seconds


def best_beside(profile: Profile, quality: Quality, borders: Sequence[int], seconds: float) -> Choice:
    """The best plan of a job whose steps take `seconds` with DDP alone."""
    profile = fit(profile, seconds, borders)
    found = best(fitted(profile), quality, borders)
    return replace(found.at(seconds / found.plan.dense_seconds), profile=profile)


def left_to_ddp(profile: Profile, quality: Quality, seconds: float, borders: Sequence[int] = ()) -> Plan:
    """The plan of a job that is best left to DDP: its own buckets, dense. `seconds` is what a step was measured to take."""
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
    """A plan in a few words: its groups by codec."""
    counts = Counter(f"{group.codec} via {group.chain}" if group.chain else group.codec for group in plan.groups)
    return f"{len(plan.groups)} groups, " + ", ".join(f"{count} {codec}" for codec, count in counts.items())


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


class Search:
    """A plan for a job that follows `present`, or travels dense, and whose steps now take `seconds`.

    `links`: how many times the seconds of before its links need for a byte. Begins at once, in a thread of its own.
    """

    def __init__(
        self,
        profile: Profile,
        present: Plan | None,
        quality: Quality,
        links: float,
        seconds: float,
        borders: Sequence[int] = (),
    ) -> None:
        self._answer: Choice | PlanError | None = None
        work = functools.partial(again, profile, present, quality, links, seconds, borders)
        threading.Thread(target=self._work, args=(work,), name="thinwire-planner", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._answer is not None

    def result(self) -> Choice:
        """Once it is done."""
        assert self._answer is not None
        if isinstance(self._answer, PlanError):
            raise self._answer
        return self._answer

    def _work(self, work: Callable[[], Choice]) -> None:
        try:
            self._answer = work()
        except Exception as error:  # all ranks wait to hear of it
            self._answer = PlanError(f"planning again failed: {type(error).__name__}: {error}")


def again(
    profile: Profile,
    present: Plan | None,
    quality: Quality,
    links: float,
    seconds: float,
    borders: Sequence[int] = (),
) -> Choice:
    # What a byte costs a computation does not depend on the link.
    times = max(1.0 + (profile.fit - 1.0) / links, 1.0 / FURTHEST)
    profile = msgspec.structs.replace(scaled(profile, links), fit=times)
    now = fitted(profile)
    found = best(now, quality, borders)
    # Where the model is off, it is off for both.
    off = seconds / predict(now, present.groups if present is not None else as_ddp(now, borders=borders)).seconds
    return replace(found.at(off), profile=profile, present=seconds)
