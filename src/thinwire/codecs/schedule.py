"""Schedules for codec parameters: `TopK(density=Warmup(0.01, steps=500))`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Warmup:
    """Exponential decay from `start` to `to` over `steps` steps; `to` from then on.

    Early in training gradients change fast, and what is sent late points in an outdated direction: start with a larger
    density. It depends on the step number alone, so all ranks agree, and a resumed job continues it.
    """

    to: float
    steps: int
    start: float = 0.25

    def __post_init__(self) -> None:
        for name, value in (("to", self.to), ("start", self.start)):
            if not (isinstance(value, int | float) and 0.0 < value <= 1.0):
                raise ValueError(f"{name} must be above 0 and at most 1, not {value!r}")
        if not (isinstance(self.steps, int) and self.steps >= 1):
            raise ValueError(f"steps must be a whole number from 1 on, not {self.steps!r}")

    def at(self, step: int) -> float:
        done = min(step, self.steps) / self.steps
        return float(self.to) if done == 1.0 else min(1.0, float(self.start * (self.to / self.start) ** done))


def check_density(density: float | Warmup) -> None:
    """Raise ValueError for a density outside of (0, 1]."""
    if isinstance(density, Warmup):
        return
    if not (isinstance(density, int | float) and 0.0 < density <= 1.0):
        raise ValueError(f"density must be above 0 and at most 1, not {density!r}")
