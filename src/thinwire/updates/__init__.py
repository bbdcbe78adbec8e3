"""Update space: local steps whose updates are exchanged, with plain or detached error feedback."""

from .optimizer import LocalUpdates

__all__ = ["LocalUpdates"]
