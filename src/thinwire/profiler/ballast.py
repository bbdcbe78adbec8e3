"""A load like that of backward, to find out what other work takes away from it."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import torch

_SIDE = 192


class Ballast:
    """Matrix products in the calling thread, which hold no lock of the interpreter. `seconds` is one of them, undisturbed."""

    def __init__(self) -> None:
        self._a, self._b = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
        self._out = torch.empty(_SIDE, _SIDE)
        self.seconds = 0.0
        self.calibrate()

    def calibrate(self, rounds: int = 7, each: int = 20) -> None:
        samples = []
        for _ in range(rounds):
            begun = time.perf_counter()
            for _ in range(each):
                self._work()
            samples.append((time.perf_counter() - begun) / each)
        self.seconds = statistics.median(samples)

    def _work(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    def beside(self, start: Callable[[Callable[[], None]], None], limit: float = 0.25) -> tuple[float, float]:
        """Work until what `start` begins has called what it is given; how long that took, and what was taken from the work.

        After `limit` seconds the work ends, so that on a crowded machine the other thing comes to its end.
        """
        done, count = threading.Event(), 0
        begun = time.perf_counter()
        start(done.set)
        while not done.is_set() and time.perf_counter() - begun < limit:
            self._work()
            count += 1
        passed = time.perf_counter() - begun
        done.wait()
        return passed, max(0.0, passed - count * self.seconds)
