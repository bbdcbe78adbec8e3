"""Callbacks invoked when a DDP module is constructed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_callbacks: list[Callable[[Any], None]] = []


def watch(kind: type) -> bool:
    """From now on invoke the callbacks for every module of this kind (DistributedDataParallel), once it is built.

    Returns False if they are invoked already.
    """
    if getattr(kind, "_thinwire_watches", False):
        return False
    original = kind.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def build(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        tell(self)

    kind.__init__ = build  # type: ignore[misc]
    kind._thinwire_watches = True  # type: ignore[attr-defined]
    return True


def subscribe(heard: Callable[[Any], None]) -> None:
    _callbacks.append(heard)


def tell(module: Any) -> None:
    """A module was built: invoke the callbacks."""
    for heard in _callbacks:
        heard(module)
