"""When a running job is no longer what its profile says.

Everything is in logarithms: a link that is three times as slow is as far away as one that is three times as fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from .profile import Link, Profile

REFERENCE = 2
"""Observations that make the level from which a number wanders."""


@dataclass
class Cusum:
    """One positive number, watched in both directions.

    allowed  what it may wander by itself
    alarm    the sum of what is beyond that at which it has changed for good
    """

    allowed: float = 0.15
    alarm: float = 0.6
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
        self._above = max(0.0, self._above + away - self.allowed)
        self._below = max(0.0, self._below - away - self.allowed)
        return max(self._above, self._below) > self.alarm


def scaled(profile: Profile, links: float = 1.0, compute: float = 1.0) -> Profile:
    """The profile of a job whose links pass a byte, and whose processors compute, in so many times the seconds."""

    def slower(link: Link) -> Link:
        points = tuple(
            (size, link.points[0][1] + (seconds - link.points[0][1]) * links) for size, seconds in link.points
        )
        line = msgspec.structs.replace(link.line, slope=link.line.slope * links)
        return msgspec.structs.replace(link, line=line, points=points)

    # A byte costs the processor what it cost before, so a collective that takes longer disturbs less at a time.
    share = min(profile.contention.collective / links, 0.95)
    return msgspec.structs.replace(
        profile,
        contention=msgspec.structs.replace(profile.contention, collective=share),
        forward=profile.forward * compute,
        backward=profile.backward * compute,
        optimizer=profile.optimizer * compute,
        tensors=tuple(msgspec.structs.replace(t, ready=t.ready * compute) for t in profile.tensors),
        links=tuple(slower(link) for link in profile.links),
    )
