"""What was not sent: the residual store."""

from .residual import ResidualStore

__all__ = ["ResidualStore"]
