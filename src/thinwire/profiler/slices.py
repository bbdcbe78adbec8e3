"""Slices of a measurement: it pauses at points of its choice, so that training can go on meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Work: TypeAlias = Generator[None, None, T]
"""Yields wherever it may pause, and returns what it found."""


@dataclass(frozen=True)
class Effort:
    """How carefully something is measured.

    warm_up, repetitions  exchanges of a codec on one group that do not count, and that do
    shares                sizes of these groups, as shares of all elements
    sizes, messages       messages of how many sizes are timed, and how often each
    longest               seconds that one exchange, or one message, may be expected to take
    rounds                repetitions of what is timed beside a computation
    links                 share of the time for links
    least                 candidates that are measured however long it takes; None: all of them
    """

    warm_up: int = 3
    repetitions: int = 6
    shares: tuple[float, ...] = (1 / 32, 1 / 8, 1 / 2)
    sizes: int = 12
    messages: int = 5
    longest: float = float("inf")
    rounds: int = 5
    links: float = 1 / 3
    least: int | None = None


THOROUGH = Effort()
BRIEF = Effort(
    repetitions=4, shares=(1 / 64, 1 / 8), sizes=8, messages=3, longest=0.06, rounds=3, links=1 / 4, least=2
)
"""Between the steps of a job that waits for it."""


class Stopwatch:
    """Seconds of work, without the pauses in between."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._paused, self._begun = clock, 0.0, clock()

    def __call__(self) -> float:
        return self._clock() - self._begun - self._paused

    def pause(self) -> Iterator[None]:
        """A point at which training may go on: `yield from` it."""
        stopped = self._clock()
        yield
        self._paused += self._clock() - stopped


def finish(work: Work[T]) -> T:
    """Do all of it at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
