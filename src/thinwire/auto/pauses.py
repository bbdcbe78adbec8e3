"""Pauses: for how long training stands still between two steps because auto measures or changes something."""

from __future__ import annotations

from dataclasses import dataclass

NOTICED = 0.02
"""Seconds between two steps that count as a pause."""

ALLOWED, SHARE = 1.6, 0.005
"""Seconds of pauses, and the share of the time that has passed in addition, after which links are not measured again."""


@dataclass
class Pauses:
    """Of this rank, in seconds; `last_step` is the step after which the last one was."""

    total: float = 0.0
    longest: float = 0.0
    last_step: int = 0

    def add(self, step: int, seconds: float) -> None:
        if seconds >= NOTICED:
            self.total, self.longest, self.last_step = self.total + seconds, max(self.longest, seconds), step

    @staticmethod
    def enough(total: float, passed: float) -> bool:
        """Whether training has stood still for long enough, of so many seconds that have passed."""
        return total > ALLOWED + SHARE * passed

    def __str__(self) -> str:
        return f"training stood still for {self.total:.1f} s in all, at most {self.longest:.1f} s at a time"
