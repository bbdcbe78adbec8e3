"""Error feedback: the residual store, and plain and detached feedback for local updates."""

from .detached import Balance, Detached, Plain
from .residual import ResidualStore

__all__ = ["Balance", "Detached", "Plain", "ResidualStore"]
