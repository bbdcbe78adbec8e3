"""What `thinwire demo` is asked for. Loads neither torch nor Numba."""

from __future__ import annotations

import pydoc_data
from dataclasses import dataclass
from pathlib import Path

from .netns import LabError, parse_rate

WORKLOAD = "gpt-ngrams"
RATE, NODES, MINUTES = "100mbit", 2, 2.0
LEARNING_RATE = 8.0
"""Peak; half of the largest that was tried with plain DDP. `docs/demo.md` has what others give."""

OVERHEAD_SECONDS = 15.0
"""What a demo takes besides training: the cluster, its calibration, the start of two jobs, the page."""

LEAST_TEXT = 10_000
"""Bytes. A shorter text is learned by heart within a few steps."""


@dataclass(frozen=True)
class Setup:
    """Both runs of a demo. Either `minutes` or `steps` says how long they are."""

    codec: str = "auto"
    rate: str = RATE
    nodes: int = NODES
    minutes: float | None = None
    steps: int | None = None
    lr: float = LEARNING_RATE
    data: Path | None = None

    def check(self) -> None:
        """Reject what cannot be run before anything is built."""
        if self.codec != "auto":
            from ..codecs import parse

            parse(self.codec)
        parse_rate(self.rate)
        if self.minutes is not None and self.steps is not None:
            raise LabError("give --minutes or --steps, not both: each says how long the runs are")
        if self.data is not None:
            if not self.data.is_file():
                raise LabError(f"there is no file {str(self.data)!r}")
            if (size := self.data.stat().st_size) < LEAST_TEXT:
                raise LabError(f"{str(self.data)!r} has {size} bytes of text: give at least {LEAST_TEXT}")

    @property
    def seconds(self) -> float:
        """For the training of both runs together."""
        return 60.0 * (MINUTES if self.minutes is None else self.minutes) - OVERHEAD_SECONDS

    @property
    def text(self) -> Path:
        return self.data or shipped_text()

    @property
    def text_name(self) -> str:
        return "Python's help texts" if self.data is None else self.data.name

    @property
    def command(self) -> str:
        """The command that repeats this demo, without the places of its results."""
        words = ["thinwire demo"]
        words += [f'--codec "{self.codec}"'] if self.codec != "auto" else []
        words += [f"--rate {self.rate}"] if self.rate != RATE else []
        words += [f"--nodes {self.nodes}"] if self.nodes != NODES else []
        words += [f"--minutes {self.minutes:g}"] if self.minutes is not None else []
        words += [f"--steps {self.steps}"] if self.steps is not None else []
        words += [f"--lr {self.lr:g}"] if self.lr != LEARNING_RATE else []
        words += [f"--data {self.data.name}"] if self.data is not None else []
        return " ".join(words)


def shipped_text() -> Path:
    """Half a megabyte of English text that ships with Python: its help texts."""
    return Path(next(iter(pydoc_data.__path__))) / "topics.py"
