"""Plot files, drawn with matplotlib if it is installed."""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SUFFIXES = (".svg", ".png", ".pdf")


def hindrance(path: Path) -> str | None:
    """The reason why a plot cannot be drawn to this file, checked before the benchmark runs."""
    if path.suffix.lower() not in SUFFIXES:
        return f"{str(path)!r} cannot be drawn: its name must end in one of {', '.join(SUFFIXES)}"
    if find_spec("matplotlib") is None:
        return f"{str(path)!r} cannot be drawn: plots need matplotlib (pip install 'thinwire[plot]')"
    return None


@contextlib.contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Any]:
    """A matplotlib Figure of this size in inches, saved to the file afterwards. No window, no global state."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    yield drawn
    drawn.savefig(path)
