"""Control steps: single dense steps that show, as long as a job runs, whether its method is still faster than DDP.

Seconds that are measured once say little of a machine that others use too. A dense step between two of the method meets the
same load as they do. This is arithmetic on numbers that all ranks share; the steps themselves are made by the wire.
"""

from __future__ import annotations

import statistics

SHARE = 0.005
"""Of the time that a job takes, for control steps."""

FAR = 3.0
"""Where dense steps take so many times as long by what links say, no control step is needed."""

COMPARED, SLOWER = 3, 1.05
"""Comparisons whose median counts, and the ratio to a dense step from which on a method is slower."""


class Control:
    """The running comparison of one method with dense steps, which take about `dense` seconds."""

    def __init__(self, dense: float = 0.0) -> None:
        self.dense = dense
        self._accrued = 0.0
        self._ratios: list[float] = []

    def passed(self, seconds: float) -> None:
        """So much time has passed by the method."""
        self._accrued += SHARE * seconds

    def due(self, seconds: float, slower: float = 1.0) -> bool:
        """Whether a control step has been earned, and is needed.

        seconds  of a step by the method
        slower   how many times as long a message takes as when `dense` was measured
        """
        cost = max(seconds, self.dense * min(1.0, slower))
        return self.dense > 0.0 and self._accrued >= cost and self.needed(seconds, slower)

    def needed(self, seconds: float, slower: float = 1.0) -> bool:
        """Whether what links say of dense steps leaves it open which is faster."""
        return self.dense * min(1.0, slower) <= FAR * seconds

    def compare(self, dense: float, seconds: float) -> bool:
        """A control step took `dense` seconds, the steps before it `seconds`. Whether the method has been slower for good."""
        self._accrued = max(0.0, self._accrued - dense)
        self.dense = dense
        self._ratios = [*self._ratios, seconds / dense][-COMPARED:]
        return len(self._ratios) == COMPARED and statistics.median(self._ratios) > SLOWER
