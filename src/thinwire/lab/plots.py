"""Files with curves, for those who have matplotlib."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SUFFIXES = (".svg", ".png", ".pdf")


def hindrance(path: Path) -> str | None:
    """Why nothing can be drawn to this file, to be asked before the work whose result it shows."""
    if path.suffix.lower() not in SUFFIXES:
        return f"{str(path)!r} is not drawn: its name ends in none of {', '.join(SUFFIXES)}"
    if find_spec("matplotlib") is None:
        return f"{str(path)!r} is not drawn: a plot needs matplotlib (pip install 'thinwire[plot]')"
    return None


@contextlib.contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Any]:
    """A matplotlib Figure of so many inches, which is written to the file afterwards. No window, no global state."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    yield drawn
    drawn.savefig(path)
