"""Benchmarks of collectives between these ranks, and of the CPU time that they take from backward.

Everything here is a collective: all ranks call it alike, and whatever decides how often something is measured is agreed on.
"""

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Collective, Operation, Place, Scope
from ..comm.world import TorchWorld
from ..planner import profile
from ..planner.profile import Link
from .fit import fit
from .load_generator import Disturbance, LoadGenerator
from .slices import THOROUGH, Effort, Stopwatch, Work, finish

SMALLEST_BYTES, LARGEST_BYTES = 64, 16 << 20
FEWEST = 2
UNEVEN_BYTES, UNEVEN_SECONDS = 64 << 10, 0.003
"""Ranks of a job do not begin a collective together, and gloo's larger messages depend on it: who begins first fills the
connection, and what the other has to say, that it is ready to receive, waits behind its own data. Both cases occur."""

OPERATIONS: dict[profile.Collective, Operation] = {
    "all_reduce": "average",
    "all_gather": "gather",
    "all_to_all": "all to all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "collect",
}
"""How the collectives of a profile are issued. A reduce-scatter of gloo is an all-to-all and a sum."""

NAMES: dict[Operation, profile.Collective] = {
    **{operation: name for name, operation in OPERATIONS.items()},
    "sum": "all_reduce",
    "max": "all_reduce",
}


@dataclass(frozen=True)
class Samples:
    """What one rank measured of one collective: seconds by size."""

    collective: profile.Collective
    scope: Scope
    ranks: int
    bytes: list[int]
    seconds: list[float]
    least: list[float] = field(default_factory=list)
    """The shortest of each size."""

    def link(self) -> Link:
        # What takes longer than something larger was disturbed.
        rising = np.minimum.accumulate(np.array(self.seconds)[::-1])[::-1]
        points = tuple((float(size), float(seconds)) for size, seconds in zip(self.bytes, rising, strict=True))
        line = fit(self.bytes, self.seconds)
        return Link(self.collective, self.scope, self.ranks, line, points, spread=self.spread)

    @property
    def spread(self) -> float:
        """By how much more than the least a message usually takes, relative to the least: the median over sizes."""
        pairs = zip(self.seconds, self.least, strict=False)
        return statistics.median([max(0.0, usual / least - 1.0) for usual, least in pairs if least > 0.0] or [0.0])


def measure(
    world: TorchWorld,
    kinds: Sequence[tuple[profile.Collective, Scope]],
    *,
    budget: float,
    largest: int = LARGEST_BYTES,
) -> list[Samples]:
    """Each kind at up to 12 sizes, within about `budget` seconds in all; the same numbers on all ranks."""
    return finish(measuring(world, kinds, Stopwatch(), budget=budget, largest=largest))


def measuring(
    world: TorchWorld,
    kinds: Sequence[tuple[profile.Collective, Scope]],
    spent: Stopwatch,
    *,
    budget: float,
    largest: int,
    effort: Effort = THOROUGH,
) -> Work[list[Samples]]:
    """The same with pauses."""
    found = []
    for place, kind in enumerate(kinds):
        began = spent()
        each = budget / max(1, len(kinds) - place)
        found.append((yield from _measure_one(world, kind, spent, each, largest, effort)))
        budget -= agreed(world, spent() - began)
    return found


def _measure_one(
    world: TorchWorld,
    kind: tuple[profile.Collective, Scope],
    spent: Stopwatch,
    budget: float,
    largest: int,
    effort: Effort,
) -> Work[Samples]:
    collective, scope = kind
    place = Place(world.rank, world.size, world.ranks_per_node)
    ranks = place.count(scope)
    samples = Samples(collective, scope, ranks, [], [])
    ratio = (largest / SMALLEST_BYTES) ** (1 / (effort.sizes - 1))
    _time(world, collective, scope, SMALLEST_BYTES, ranks)  # connections are made
    begun, repetitions = spent(), effort.messages
    for step in range(effort.sizes):
        size = _round_up(int(SMALLEST_BYTES * ratio**step), 16 * ranks)
        uneven = size >= UNEVEN_BYTES
        late = [each // 2 % ranks if uneven and each % 2 == 0 else None for each in range(repetitions)]
        times = [_time(world, collective, scope, size, ranks, place) for place in late]
        seconds = agreed(world, statistics.mean(times) if uneven else statistics.median(times))
        passed = agreed(world, spent() - begun)
        samples.bytes.append(size)
        samples.seconds.append(seconds)
        samples.least.append(agreed(world, min(times)))
        # What is left must do for all larger sizes, and each takes `ratio` times as long once the rate rules.
        plenty = passed < budget * (step + 1) / effort.sizes and seconds < budget / 40
        repetitions = effort.messages if plenty else FEWEST
        if passed + repetitions * ratio * seconds > budget:
            repetitions = 1  # the larger ones say most about the rate: once is better than not at all
        if step >= 2 and (passed + ratio * seconds > budget or ratio * seconds > 2 * effort.longest):
            break
        yield from spent.pause()
    return samples


def probe(world: TorchWorld, size: int) -> float:
    """Seconds of one all-gather to which every rank hands `size` bytes, between two steps."""
    return _time(world, "all_gather", "flat", size, world.size)


def _time(
    world: TorchWorld, collective: profile.Collective, scope: Scope, size: int, ranks: int, late: int | None = None
) -> float:
    """From the last issue of one collective to its end here; in each group the rank at place `late` begins after the others."""
    part, done = _part(collective, scope, size, ranks, world), threading.Event()
    mine = Place(world.rank, world.size, world.ranks_per_node).index(scope)
    dist.barrier(group=world.parent)
    if late is not None and mine == late:
        time.sleep(UNEVEN_SECONDS)
    begun = time.perf_counter()
    if late is not None and mine != late:
        begun += UNEVEN_SECONDS  # until then there was nothing to do but wait
    pending = world.issue(0, [part], done.set)
    done.wait()
    seconds = time.perf_counter() - begun
    pending.check()
    return max(seconds, 0.0)


def _part(collective: profile.Collective, scope: Scope, size: int, ranks: int, world: TorchWorld) -> Collective:
    """A collective to which a rank hands `size` bytes."""
    operation = OPERATIONS[collective]
    if operation in ("average", "reduce"):
        return Collective(operation, torch.zeros(size // 4), scope=scope)
    tensor, output = torch.zeros(size, dtype=torch.uint8), None
    first = Place(world.rank, world.size, world.ranks_per_node).index(scope) == 0
    if operation == "gather" or (operation == "collect" and first):
        output = torch.empty(size * ranks, dtype=torch.uint8)
    elif operation == "all to all":
        output = torch.empty(size, dtype=torch.uint8)
    return Collective(operation, tensor, output, scope)


@dataclass(frozen=True)
class Beside:
    """The effect of collectives and computation on each other.

    share    of the time of a collective that is taken from the computation
    latency  seconds that a small collective takes longer
    clock    seconds that the computing thread's own clock shows for a second of work: the kernel handles packets in
             whichever thread it meets, on that thread's account
    """

    share: float
    latency: float
    clock: float = 1.0


def besides(
    world: TorchWorld, samples: Samples, spent: Stopwatch, *, budget: float, effort: Effort = THOROUGH
) -> Work[Beside]:
    """All-gathers during matrix products, on the same core or on another: one small, one that takes a while.

    samples: what all-gathers take alone.
    """
    repetitions = effort.rounds
    load, enough = LoadGenerator(), min(budget / 4 / repetitions, 0.05)
    size = next((size for size, seconds in zip(samples.bytes, samples.seconds, strict=True) if seconds >= enough), 0)
    size = size or samples.bytes[-1]
    large, small = [], []
    for _ in range(repetitions):
        large.append(_beside(world, load, size))
        small.append(_beside(world, load, 4096))
        yield from spent.pause()
    alone = [_time(world, "all_gather", "flat", 4096, world.size) for _ in range(repetitions)]
    # The end is seen between two products: half of one is not the collective's.
    delay = statistics.median(each.seconds for each in small) - load.seconds / 2 - statistics.median(alone)
    return Beside(
        agreed(world, statistics.median(each.taken / each.seconds for each in large)),
        agreed(world, max(0.0, delay)),
        agreed(world, statistics.median(each.clock for each in large)),
    )


def _beside(world: TorchWorld, load: LoadGenerator, size: int) -> Disturbance:
    part, under_way = _part("all_gather", "flat", size, world.size, world), []
    load.calibrate()  # other tenants of the machine come and go
    dist.barrier(group=world.parent)
    return load.beside(lambda done: under_way.append(world.issue(0, [part], done)))


def agreed(world: TorchWorld, value: float) -> float:
    """The mean over all ranks: a number on which they can decide alike."""
    tensor: Tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=world.parent)
    return float(tensor)


def _round_up(value: int, step: int) -> int:
    return max(step, -(-value // step) * step)
