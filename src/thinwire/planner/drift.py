"""When a running job is no longer what its profile says: found by cumulative sums, put into numbers by the planner's model.

Everything is in logarithms: a link that is three times as slow is as far away as one that is three times as fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from .predict import Grouped, Job, cost_of, predict
from .profile import Line, Profile

ALLOWED, ALARM = 0.1, 0.6
"""What a number may wander by itself, and the sum of what is beyond that at which it has changed."""

REFERENCE = 2
"""Observations that make the level from which a number wanders."""

FARTHEST = 1000.0


@dataclass
class Cusum:
    """One positive number, watched in both directions."""

    level: float = 0.0
    last: float = 0.0
    _first: list[float] = field(default_factory=list)
    _above: float = 0.0
    _below: float = 0.0

    def observe(self, value: float) -> bool:
        """Whether the number has changed for good. Numbers that are not positive say nothing."""
        if not value > 0.0 or not math.isfinite(value):
            return False
        self.last = value
        if len(self._first) < REFERENCE:
            self._first.append(math.log(value))
            self.level = math.exp(sum(self._first) / len(self._first))
            return False
        away = math.log(value / self.level)
        self._above = max(0.0, self._above + away - ALLOWED)
        self._below = max(0.0, self._below - away - ALLOWED)
        return max(self._above, self._below) > ALARM

    def reset(self) -> None:
        """Take a new level from what comes."""
        self._first, self._above, self._below = [], 0.0, 0.0


def scaled(profile: Profile, links: float = 1.0, compute: float = 1.0) -> Profile:
    """The profile of a job whose links pass a byte, and whose processors compute, in so many times the seconds."""

    def slower(line: Line) -> Line:
        return msgspec.structs.replace(line, slope=line.slope * links)

    # A byte costs the processor what it cost before, so a collective that takes longer disturbs less at a time.
    share = min(profile.contention.collective / links, 0.95)
    return msgspec.structs.replace(
        profile,
        contention=msgspec.structs.replace(profile.contention, collective=share),
        forward=profile.forward * compute,
        backward=profile.backward * compute,
        optimizer=profile.optimizer * compute,
        tensors=tuple(msgspec.structs.replace(t, ready=t.ready * compute) for t in profile.tensors),
        links=tuple(msgspec.structs.replace(link, line=slower(link.line)) for link in profile.links),
    )


def links_by_steps(profile: Profile, groups: Sequence[Grouped], before: float, now: float) -> float:
    """How many times slower links are, if a step by these groups took `before` seconds and now takes `now`."""
    target = now / before * predict(profile, groups).seconds
    low, high = 1.0 / FARTHEST, FARTHEST
    for _ in range(40):
        middle = math.sqrt(low * high)
        if predict(scaled(profile, middle), groups).seconds < target:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def links_by_wire(profile: Profile, groups: Sequence[Grouped], before: float, now: float) -> float:
    """The same from the seconds that collectives were under way: what does not depend on bytes stays as it is."""
    job = Job(profile)
    sizes = {tensor.name: tensor.elements for tensor in profile.tensors}
    options = [job.options.index(cost_of(profile, group.codec, group.chain)) for group in groups]
    elements = np.array([float(sum(sizes[name] for name in group.names)) for group in groups])
    pieces = job.pieces(options, elements)
    fixed, variable = float(pieces.latency.sum()), float(pieces.wire.sum())
    if variable <= 0.0:
        return 1.0
    factor = (now / before * (fixed + variable) - fixed) / variable
    return min(max(factor, 1.0 / FARTHEST), FARTHEST)
