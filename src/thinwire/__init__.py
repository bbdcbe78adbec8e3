"""thinwire: train PyTorch models fast over slow networks."""

from __future__ import annotations

from .version import __version__

__all__ = ["__version__"]
