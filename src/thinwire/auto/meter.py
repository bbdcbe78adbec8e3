"""What `auto` measures of a job: the numbers that its decisions are made from, and the only ones that depend on a clock."""

from __future__ import annotations

from collections.abc import Sequence

from ..comm.world import TorchWorld
from ..planner.profile import Link, Profile
from ..profiler.contention import LoadMeter
from ..profiler.links import measure, probe
from ..profiler.watch import Compute
from .profiling import Profiling


class Meter:
    """Measures with the clocks and links of this machine. All ranks call its collectives alike."""

    def __init__(self, profiling: Profiling, world: TorchWorld) -> None:
        self._profiling, self._world = profiling, world
        self._load = LoadMeter()

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

    def profile(self, candidates: Sequence[str], budget: float) -> Profile:
        """Links and codecs, measured for about `budget` seconds. A collective; the same on all ranks."""
        return self._profiling.measure(candidates=candidates, budget=budget)

    def link(self, budget: float) -> Link:
        """An all-gather between all ranks, measured for about `budget` seconds. A collective; the same on all ranks."""
        (samples,) = measure(self._world, [("all_gather", "flat")], budget=budget, largest=1 << 20)
        return samples.link()

    def message(self, size: int) -> float:
        """Seconds of one all-gather to which every rank hands `size` bytes. A collective."""
        return probe(self._world, size)
