"""Error feedback, plain or detached: at which point a rank takes its gradients, given what it has not sent.

All ranks share the model x; each has an error e, in units of parameters. Gradients are taken at x - strength * e. Strength 0 is
plain error feedback (EF), 1 is SAEF, also known as PSync; in between is detached error feedback (DEF, ICML 2022).
"""

import math
from dataclasses import dataclass
from typing import Literal

DECAY = 0.98
SMALLEST = 0.1
FIRST = 0.3
PATIENCE = 50


@dataclass(frozen=True)
class Detached:
    """Gradients at x - strength * e. `"auto"` reads the strength off what is exchanged, at the price of one float per step."""

    strength: float | Literal["auto"] = FIRST

    def __post_init__(self) -> None:
        if self.strength == "auto":
            return
        if isinstance(self.strength, str) or not 0.0 <= self.strength <= 1.0:
            raise ValueError(f"the strength must be a number from 0 to 1, or 'auto', not {self.strength!r}")

    @property
    def automatic(self) -> bool:
        return self.strength == "auto"


class Plain(Detached):
    """Plain error feedback: gradients at the shared model itself."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def __repr__(self) -> str:
        return "Plain()"


@dataclass
class Balance:
    """The strength in use, and how it follows from what ranks send.

    The mean squared distance from where ranks take gradients to x - mean(e) is least at |mean e|^2 / mean |e|^2. Both
    are estimated on what is sent: `common` is |mean of what ranks sent|^2, `total` the mean of |what a rank sent|^2,
    averaged over about fifty exchanges. All ranks see the same numbers.
    """

    feedback: Detached
    common: float = 0.0
    total: float = 0.0
    exchanges: int = 0
    strength: float = FIRST

    def __post_init__(self) -> None:
        self.adopt()

    def observe(self, common: float, total: float) -> None:
        if not math.isfinite(common + total):
            return
        self.common = DECAY * self.common + (1.0 - DECAY) * common
        self.total = DECAY * self.total + (1.0 - DECAY) * total
        self.exchanges += 1

    @property
    def measured(self) -> float | None:
        """The best strength as far as it is known."""
        return self.common / self.total if self.total > 0.0 else None

    def adopt(self) -> float:
        """Use what is known by now: from here on parameters are x - strength * e with this strength."""
        fixed, measured = self.feedback.strength, self.measured
        if not isinstance(fixed, str):
            self.strength = float(fixed)
        elif measured is not None and self.exchanges >= PATIENCE:
            self.strength = min(1.0, max(SMALLEST, measured))
        return self.strength
