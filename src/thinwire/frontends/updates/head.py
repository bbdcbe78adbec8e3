"""Two floats that travel with every exchange: a statistic, and what a rank is about.

A rank that enters a collective outside of steps (`at("settled")`, a folded checkpoint) says so in the same place of the same
sum where the others report a step. So a mistake in the program, some ranks evaluating while others train, is an error
on all of them at once, not a wait for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ...errors import ExchangeError

MEETS = 4096.0
"""Above the number of ranks, and 4095 times it is still exact in float32."""
MEETING = (0.0, MEETS)
"""What a rank says outside of steps."""
LARGEST = 3.4e38


@dataclass(frozen=True)
class Head:
    """What all ranks said together."""

    statistic: float
    """Its mean over ranks; NaN if a rank has handed over something that is not valid any more."""
    bad: int
    """Ranks with a gradient that is not finite."""
    meeting: int
    """Ranks that are in a collective outside of steps."""

    @property
    def stale(self) -> bool:
        return math.isnan(self.statistic)


def words(*, statistic: float, bad: bool) -> tuple[float, float]:
    """What a rank says in a step."""
    return (min(statistic, LARGEST) if statistic == statistic else statistic), float(bad)


def read(head: Tensor, world: int, *, in_step: bool) -> Head:
    """Raise, on every rank, if some are in a step and others are not."""
    statistic, flag = head.tolist()
    meeting, bad = divmod(round(flag * world), int(MEETS))
    if in_step and meeting:
        raise ExchangeError(
            f"{meeting} of {world} ranks entered opt.at(...) or asked for a folded state while this one called step(): "
            "both are for all ranks together"
        )
    if not in_step and meeting != world:
        raise ExchangeError(
            f"only {meeting} of {world} ranks entered opt.at(...) or asked for a folded state, the others called step(): "
            "it contains a collective, so every rank must come, not only rank 0"
        )
    return Head(statistic, bad, meeting)
