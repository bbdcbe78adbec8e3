"""CPU contention: what other threads and processes take from the thread that trains, told apart from slow links.

A thread that waits for a message sleeps; one that waits for a core stands in a run queue. The kernel counts the second,
so a step that became longer because cores are taken is told from one that waits for links.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

SCHEDULER = Path("/proc/thread-self/schedstat")
TIME_SLICE = 0.003
"""Seconds that an involuntary switch costs, where the kernel does not count run queues."""

LEAST_SHARE, EXPLAINED = 0.1, 0.5
"""Contention has changed if the wait for a core did, by this share of a step. It is the cause of longer or shorter steps if
it explains this share of the change."""


@dataclass(frozen=True)
class Load:
    """What one step had of the CPU, in seconds per step.

    wall       the step
    waited     of it, the training thread was ready to run and had no core
    switches   how often that thread lost its core
    stretched  what the forward pass took longer than its thread worked
    """

    wall: float
    waited: float = 0.0
    switches: float = 0.0
    stretched: float = 0.0

    @property
    def lost(self) -> float:
        """Seconds of a step in which there was no core."""
        return max(self.waited or self.switches * TIME_SLICE, self.stretched)


def explains(before: Load, now: Load) -> bool:
    """Whether the CPU, and not a link, explains how steps have changed."""
    lost, change = now.lost - before.lost, now.wall - before.wall
    if abs(lost) < LEAST_SHARE * max(before.wall, 1e-9):
        return False
    # A message between steps may have changed where steps have not: then the CPU alone has.
    return abs(change) < LEAST_SHARE * before.wall or lost / change >= EXPLAINED


class LoadMeter:
    """Counters of the calling thread."""

    def __init__(self) -> None:
        self._last = self._counters()

    def __call__(self) -> tuple[float, float]:
        """Seconds in run queues and involuntary switches since the last call."""
        now, before = self._counters(), self._last
        self._last = now
        return max(0.0, now[0] - before[0]), max(0.0, now[1] - before[1])

    @staticmethod
    def _counters() -> tuple[float, float]:
        # Not every system knows of a thread's own usage.
        usage = resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))
        try:
            waited = int(SCHEDULER.read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            waited = 0.0
        return waited, float(usage.ru_nivcsw)
