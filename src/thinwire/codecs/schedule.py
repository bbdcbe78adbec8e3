"""Numbers of a codec that change while training: `TopK(density=Warmup(0.01, steps=500))`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Warmup:
    """From `start` to `to` within `steps` steps, by the same factor in each; `to` from then on.

    A model that has learnt nothing yet moves fast, and what is sent late then points in an old direction: begin with a
    larger density. It follows from the number of the step alone, so all ranks agree, and a resumed job goes on with it.
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
        return float(self.to) if done == 1.0 else float(self.start * (self.to / self.start) ** done)


def check_density(density: float | Warmup) -> None:
    """Refuse what is no share of the elements."""
    if isinstance(density, Warmup):
        return
    if not (isinstance(density, int | float) and 0.0 < density <= 1.0):
        raise ValueError(f"density must be above 0 and at most 1, not {density!r}")
