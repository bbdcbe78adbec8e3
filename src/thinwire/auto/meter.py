"""What `auto` measures of a job: the numbers that its decisions are made from, and the only ones that depend on a clock."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..comm.world import TorchWorld
from ..planner.profile import Link, Profile
from ..profiler.contention import LoadMeter
from ..profiler.links import measure, probe
from ..profiler.slices import BRIEF, Work
from ..profiler.watch import Compute
from .profiling import Profiling
from .shared import mean

SLICE = 0.25
"""Seconds for which training stands still at a time, while links and codecs are measured."""


class Meter:
    """Measures with the clocks and links of this machine. All ranks call its collectives alike."""

    def __init__(self, profiling: Profiling, world: TorchWorld) -> None:
        self._profiling, self._world = profiling, world
        self._load = LoadMeter()

    def clock(self) -> float:
        """Seconds since some moment, for pauses."""
        return time.perf_counter()

    def step(self) -> float:
        """Seconds of the last step, from the start of forward to the end of the optimizer's step."""
        return self._profiling.watch.steps[-1].wall

    def stretched(self) -> float:
        """What the forward pass of the last step took longer than its thread worked."""
        step = self._profiling.watch.steps[-1]
        return step.forward * (1.0 - 1.0 / max(1.0, step.crowd))

    def load(self) -> tuple[float, float]:
        """Seconds for which this thread had no core, and involuntary switches, since the last call."""
        return self._load()

    def compute(self) -> Compute:
        """What the steps watched so far computed."""
        return self._profiling.watch.compute()

    def measuring(self, candidates: Sequence[str], budget: float) -> Work[Profile]:
        """Links and codecs, measured for about `budget` seconds, with pauses. The same on all ranks."""
        return self._profiling.measuring(candidates, budget, BRIEF)

    def slice(self, work: Work[Profile]) -> Profile | None:
        """Go on with a measurement for `SLICE` seconds, the mean over ranks. Its result, at the end. A collective."""
        begun, passed = time.perf_counter(), 0.0
        while passed < SLICE:
            try:
                next(work)
            except StopIteration as end:
                found: Profile = end.value
                return found
            (passed,) = mean(self._world, time.perf_counter() - begun)
        return None

    def link(self, budget: float) -> Link:
        """An all-gather between all ranks, measured for about `budget` seconds. A collective; the same on all ranks."""
        (samples,) = measure(self._world, [("all_gather", "flat")], budget=budget, largest=1 << 20)
        return samples.link()

    def message(self, size: int) -> float:
        """Seconds of one all-gather to which every rank hands `size` bytes. A collective."""
        return probe(self._world, size)
