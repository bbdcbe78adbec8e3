"""Load generator: computes as backward does, to measure how much other work slows it down."""

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_SIDE = 192


@dataclass(frozen=True)
class Disturbance:
    """How long something took while the load ran, and how it affected the load.

    taken  seconds that the work lost
    clock  what the working thread's own clock showed for a second of undisturbed work
    """

    seconds: float
    taken: float
    clock: float


class LoadGenerator:
    """Matrix products in the calling thread, which hold no lock of the interpreter. `seconds` is one of them, undisturbed."""

    def __init__(self) -> None:
        self._a, self._b = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
        self._out = torch.empty(_SIDE, _SIDE)
        self.seconds = self._thread_seconds = 0.0
        self.calibrate()

    def calibrate(self, rounds: int = 5, each: int = 4) -> None:
        samples, own = [], []
        for _ in range(rounds):
            begun, thread = time.perf_counter(), time.thread_time()
            for _ in range(each):
                self._work()
            samples.append((time.perf_counter() - begun) / each)
            own.append((time.thread_time() - thread) / each)
        self.seconds, self._thread_seconds = statistics.median(samples), statistics.median(own)

    def _work(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    def beside(self, start: Callable[[Callable[[], None]], None], limit: float = 0.25) -> Disturbance:
        """Work until what `start` begins has called what it is given.

        After `limit` seconds the work ends, so that on a crowded machine the other thing comes to its end.
        """
        done, count = threading.Event(), 0
        begun, thread = time.perf_counter(), time.thread_time()
        start(done.set)
        while not done.is_set() and time.perf_counter() - begun < limit:
            self._work()
            count += 1
        passed, own = time.perf_counter() - begun, time.thread_time() - thread
        done.wait()
        clock = own / (count * self._thread_seconds) if count else 1.0
        return Disturbance(passed, max(0.0, passed - count * self.seconds), max(1.0, clock))
