"""What was not sent: the residual store, and how it is looked at while gradients are taken."""

from .detached import Balance, Detached, Plain
from .residual import ResidualStore

__all__ = ["Balance", "Detached", "Plain", "ResidualStore"]
