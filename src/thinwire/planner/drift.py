"""Detects that a running job deviates from its profile.

Deviations are logarithmic: a link three times as slow counts as much as a link three times as fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from .profile import Link, Profile

REFERENCE = 2
"""Number of observations that define the reference level."""


@dataclass
class Cusum:
    """Two-sided CUSUM change detection on the logarithm of a positive number.

    allowed  deviation that counts as noise
    alarm    accumulated excess deviation that counts as a lasting change
    """

    allowed: float = 0.15
    alarm: float = 0.6
    level: float = 0.0
    last: float = 0.0
    _first: list[float] = field(default_factory=list)
    _above: float = 0.0
    _below: float = 0.0

    def observe(self, value: float) -> bool:
        """Whether the number has changed for good. Values that are not positive and finite are ignored."""
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
    """The profile with the seconds per byte of its links, and of computation, multiplied by these factors."""

    def slower(link: Link) -> Link:
        points = tuple(
            (size, link.points[0][1] + (seconds - link.points[0][1]) * links) for size, seconds in link.points
        )
        line = msgspec.structs.replace(link.line, slope=link.line.slope * links)
        return msgspec.structs.replace(link, line=line, points=points)

    # CPU time per byte is unchanged, so a collective that takes longer slows computation down less while it runs.
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
