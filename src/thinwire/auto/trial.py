"""Trial of a plan: some steps by it, dense steps between them, and what they are compared with."""

from __future__ import annotations

import statistics

from ..engine.strategy import Strategy
from ..planner.plan import Plan
from ..planner.replan import milliseconds
from .sanity import to_beat

SETTLE, WINDOW = 8, 10
"""Steps in which thresholds settle, and steps that are compared."""

CONTROLS = frozenset({SETTLE + 3, SETTLE + 6, SETTLE + 9})
"""After these steps comes a control step, unless links say that it is far slower: both meet the same load."""

GLANCE, FAR_SLOWER = 4, 2.0
"""After so many steps, and after as many more, a trial is given up if steps take so many times what they took before."""


class Trial:
    """One trial on one rank.

    before    what ran before, and runs again if this is slower; None: DDP alone, or dense steps
    baseline  seconds of a step then
    plain     a plan with a single codec that may be tried next
    """

    def __init__(self, before: Strategy | None, baseline: float, plain: Plan | None = None) -> None:
        self.before = None if before is None or before.plan is None else before
        self.baseline, self.plain = baseline, plain
        self.steps: list[float] = []
        self.controls: list[float] = []

    @property
    def ended(self) -> bool:
        return len(self.steps) == SETTLE + WINDOW

    @property
    def looks(self) -> bool:
        """Whether all ranks look at what it takes after this step."""
        count = len(self.steps)
        return self.ended or (count <= SETTLE and count % GLANCE == 0)

    @property
    def wants_control(self) -> bool:
        return len(self.steps) in CONTROLS

    @property
    def seconds(self) -> float:
        """What a step takes here."""
        return statistics.median(self.steps[SETTLE:] if self.ended else self.steps[-GLANCE:])

    @property
    def to_beat(self) -> float:
        """What a step must stay below."""
        return to_beat(self.baseline, self.controls, dense=self.before is None)

    def failed(self, measured: float) -> bool:
        """Whether it is slower, if a step takes so long: the mean over ranks."""
        return measured > FAR_SLOWER * self.to_beat or (self.ended and measured >= self.to_beat)

    def words(self, measured: float, predicted: float) -> str:
        words = f"{milliseconds(measured)} per step, predicted {milliseconds(predicted)}, "
        words += f"before {milliseconds(self.baseline)}"
        if self.controls:
            words += f", dense steps in between {milliseconds(statistics.median(self.controls))}"
        return words
