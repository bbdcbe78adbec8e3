"""Patience of the tuner: when it looks again after it could not tell, and after how many disappointments it stops."""

from __future__ import annotations

FIRST, LONGEST = 400, 12800
"""Steps until the job is measured again on a machine that was too busy; twice as many each time."""

DISAPPOINTMENTS = 3
"""Trials in a row that were slower than what ran before: then this run is left as it is."""


class Patience:
    """Of one wire. It depends on nothing but what happened, so it is the same on all ranks."""

    def __init__(self) -> None:
        self._wait = FIRST
        self._disappointments = 0

    @property
    def tried(self) -> bool:
        """Whether it had to wait before."""
        return self._wait > FIRST

    def wait(self) -> int:
        """Steps until the next look."""
        steps = self._wait
        self._wait = min(LONGEST, 2 * self._wait)
        return steps

    def disappointed(self) -> bool:
        """A trial was slower. Whether that was the last one."""
        self._disappointments += 1
        return self._disappointments >= DISAPPOINTMENTS

    def satisfied(self) -> None:
        """A trial was faster."""
        self._disappointments = 0
