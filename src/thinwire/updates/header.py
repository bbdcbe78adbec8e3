"""Two floats that travel with every exchange: a statistic, and whether this rank is in a step.

A rank that enters a collective outside of steps (`at("settled")`, a folded checkpoint) reports it in the same float of the
same sum in which the others report a step. So a mistake in the program, some ranks evaluating while others train, is an
error on all of them at once instead of a hang.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from ..errors import ExchangeError

NAME = "head"
"""The header's name among the tensors of an exchange."""
OUTSIDE = 4096.0
"""Above the number of ranks, and 4095 times it is still exact in float32."""
OUTSIDE_OF_STEPS = (0.0, OUTSIDE)
"""What a rank reports outside of steps."""
LARGEST = 3.4e38


@dataclass(frozen=True)
class Header:
    """What all ranks reported together.

    statistic  its mean over ranks; NaN if a rank has sent something that is no longer valid
    overflows  ranks with a gradient that is not finite
    """

    statistic: float
    overflows: int

    @property
    def stale(self) -> bool:
        return math.isnan(self.statistic)


def encode(statistic: float, *, overflow: bool) -> tuple[float, float]:
    """What a rank reports in a step."""
    return (min(statistic, LARGEST) if statistic == statistic else statistic), float(overflow)


def decode(mean: Tensor, world: int, *, in_step: bool) -> Header:
    """The mean of all reports. Raises, on every rank, if some are in a step and others are not."""
    statistic, flag = mean.tolist()
    outside, overflows = divmod(round(flag * world), int(OUTSIDE))
    if in_step and outside:
        raise ExchangeError(
            f"{outside} of {world} ranks entered opt.at(...) or asked for a folded state while this one called step(): "
            "all ranks must enter together"
        )
    if not in_step and outside != world:
        raise ExchangeError(
            f"only {outside} of {world} ranks entered opt.at(...) or asked for a folded state, the others called step(): "
            "it contains a collective, so every rank must enter, not only rank 0"
        )
    return Header(statistic, overflows)
