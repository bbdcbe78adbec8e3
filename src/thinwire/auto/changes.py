"""Lasting changes of a running job: of its steps, of messages between them, and whether the CPU explains them."""

from __future__ import annotations

from ..planner.drift import REFERENCE, Cusum
from ..planner.replan import milliseconds
from ..profiler.contention import Load, explains
from .monitor import Snapshot


class Changes:
    """What the snapshots of one method say. It starts from scratch with another one."""

    def __init__(self) -> None:
        # Single messages vary much: only what takes several times as long, or twice as long twice, is a change.
        self._steps, self._links = Cusum(), Cusum(allowed=0.5, alarm=0.5)
        self._first: list[Load] = []
        self._now = Load(0.0)

    def observe(self, snapshot: Snapshot) -> bool:
        """Whether steps or messages take another time for good."""
        self._now = snapshot.load
        if len(self._first) < REFERENCE:
            self._first.append(snapshot.load)
        return self._steps.observe(snapshot.load.wall) | self._links.observe(snapshot.link)

    @property
    def seconds(self) -> float:
        """What a step takes now."""
        return self._steps.last

    @property
    def cpu_explains(self) -> bool:
        """Whether what changed is what the CPU gave, not the links."""
        return explains(_mean(self._first), self._now)

    def words(self) -> str:
        step, link = self._steps, self._links
        words = f"steps went from {milliseconds(step.level)} to {milliseconds(step.last)}"
        if link.level > 0.0:
            words += f", a message between them from {milliseconds(link.level)} to {milliseconds(link.last)}"
        return words


def _mean(loads: list[Load]) -> Load:
    count = len(loads)
    return Load(
        sum(load.wall for load in loads) / count,
        sum(load.waited for load in loads) / count,
        sum(load.switches for load in loads) / count,
        sum(load.stretched for load in loads) / count,
    )
