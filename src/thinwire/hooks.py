"""Who wants to hear of every DDP module that a script builds."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

VARIABLE = "THINWIRE_RUN"
"""What to do with every DDP module, as JSON: `{"do": "profile", "file": ...}`, `{"do": "attach", ...}`; see `thinwire.run`."""

_wanted: list[Callable[[Any], None]] = []


def watch(kind: type) -> None:
    """From now on tell of every module of this kind (DistributedDataParallel), once it is built."""
    if getattr(kind, "_thinwire_watches", False):
        return
    original = kind.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def build(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        tell(self)

    kind.__init__ = build  # type: ignore[misc]
    kind._thinwire_watches = True  # type: ignore[attr-defined]


def subscribe(heard: Callable[[Any], None]) -> None:
    _wanted.append(heard)


def tell(module: Any) -> None:
    """A module was built."""
    if not _wanted and os.environ.get(VARIABLE):
        from .run import obey

        obey(os.environ[VARIABLE])
    for heard in _wanted:
        heard(module)
