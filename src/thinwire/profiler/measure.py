"""Profile of a job from all measurements. A collective; every rank gets the same one."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..comm import object_collectives
from ..comm.collectives import Place, Scope
from ..comm.world import TorchWorld
from ..planner import profile
from ..planner.profile import VERSION, Cluster, Contention, Profile, fingerprint
from . import costs, links
from .load_generator import LoadGenerator
from .slices import THOROUGH, Effort, Stopwatch, Work, finish
from .watch import Compute

CANDIDATES = (
    "dense",
    "cast",
    "int8",
    "micro(density=0.05)",
    "micro(density=0.01)",
    "micro(density=0.001)",
    "adacomp",
    "laplace(density=0.01)",
    "randomblock",
    "lowrank",
)
"""What a plan may choose from."""

HIERARCHICAL = (
    "dense via iRS eAR iAG",
    "cast via iRS comp eARc dec iAG",
    "micro(density=0.01) via iRS comp eARc dec iAG",
)
"""The same where several ranks share a node and there are several nodes."""


@dataclass
class Own:
    """What one rank contributes to a profile."""

    compute: Compute
    codecs: list[costs.Samples]
    energy: dict[str, float]
    codec_contention: float


def measure(
    model: str,
    tensors: Sequence[profile.Tensor],
    compute: Compute,
    gradients: Sequence[Mapping[str, torch.Tensor]],
    world: TorchWorld,
    *,
    candidates: Sequence[str] | None = None,
    budget: float = 15.0,
    rate: str = "",
    buckets: Sequence[int] = (),
    group_overhead: float = 0.0,
) -> Profile:
    """Measure links and codecs for about `budget` seconds, and write down what all ranks found.

    tensors are in any order, their `ready` is taken from `compute`; gradients are this rank's own, of several steps; buckets,
    in bytes, are what was exchanged during the watched steps.
    """
    return finish(
        measuring(
            model,
            tensors,
            compute,
            gradients,
            world,
            candidates=candidates,
            budget=budget,
            rate=rate,
            buckets=buckets,
            group_overhead=group_overhead,
        )
    )


def measuring(
    model: str,
    tensors: Sequence[profile.Tensor],
    compute: Compute,
    gradients: Sequence[Mapping[str, torch.Tensor]],
    world: TorchWorld,
    *,
    candidates: Sequence[str] | None = None,
    budget: float = 15.0,
    rate: str = "",
    buckets: Sequence[int] = (),
    group_overhead: float = 0.0,
    effort: Effort = THOROUGH,
    prepare: Callable[[str], None] = lambda text: None,
) -> Work[Profile]:
    """The same with pauses, in which training may go on. `prepare` is called for each codec before it is measured."""
    spent = Stopwatch()
    order = {name: place for place, name in enumerate(compute.ready)}
    tensors = sorted((tensor for tensor in tensors if tensor.name in order), key=lambda tensor: order[tensor.name])
    total = 4 * sum(tensor.elements for tensor in tensors)
    place = Place(world.rank, world.size, world.ranks_per_node)
    layered = world.ranks_per_node is not None and 1 < world.ranks_per_node < world.size
    if candidates is None:
        candidates = CANDIDATES + (HIERARCHICAL if layered else ())
    # The all-gather comes first: its times decide how long others are measured.
    kinds: list[tuple[profile.Collective, Scope]] = [("all_gather", "flat"), ("all_reduce", "flat")]
    kinds += sorted({kind for text in candidates for kind in costs.collectives(text, place)} - set(kinds))
    world.prepare({(0, scope) for _, scope in kinds})
    alone = world.size == 1
    lines: list[links.Samples] = []
    besides = links.Beside(0.0, 0.0)
    if not alone:
        largest = max(total, 1 << 16)
        yield from spent.pause()
        lines = yield from links.measuring(
            world, kinds, spent, budget=effort.links * budget, largest=largest, effort=effort
        )
        besides = yield from links.besides(world, lines[0], spent, budget=budget / 10, effort=effort)
    found = [samples.link() for samples in lines]
    left = budget - links.agreed(world, spent())
    measured = yield from costs.measuring(
        candidates,
        tensors,
        gradients,
        world,
        found,
        spent,
        budget=max(left, budget / 4),
        effort=effort,
        prepare=prepare,
    )
    energy = {
        tensor.name: _finite(
            sum(float(step[tensor.name].float().square().sum()) for step in gradients) / len(gradients)
        )
        for tensor in tensors
    }
    yield from spent.pause()
    if not alone:
        sizes = {tensor.name: 4 * tensor.elements for tensor in tensors}
        seconds = next(link for link in found if (link.collective, link.scope) == ("all_reduce", "flat")).seconds
        compute = compute.undisturbed(sizes, buckets, seconds, besides)
    mine = Own(compute, measured, energy, _codec_contention(effort.rounds))
    everyone = object_collectives.gather(mine, world.parent, Own)
    return _put_together(model, tensors, everyone, place, found, besides, rate, group_overhead)


def _put_together(
    model: str,
    tensors: Sequence[profile.Tensor],
    everyone: Sequence[Own],
    place: Place,
    found: Sequence[profile.Link],
    besides: links.Beside,
    rate: str,
    group_overhead: float,
) -> Profile:
    remarks = []
    orders = [list(own.compute.ready) for own in everyone]
    if any(order != orders[0] for order in orders):
        first = next(rank for rank, order in enumerate(orders) if order != orders[0])
        remarks.append(
            f"gradients of rank {first} come in another order than those of rank 0, whose order stands here"
        )
    # A group is exchanged when the slowest rank has it.
    ready, latest, late = {}, 0.0, _lateness([own.compute.steps for own in everyone])
    for tensor in sorted(tensors, key=lambda tensor: orders[0].index(tensor.name)):
        latest = max(latest, *(late * own.compute.ready.get(tensor.name, 0.0) for own in everyone))
        ready[tensor.name] = latest
    described = tuple(
        profile.Tensor(
            tensor.name,
            tensor.elements,
            tensor.kind,
            tensor.dtype,
            ready[tensor.name],
            tensor.shape,
            sum(own.energy[tensor.name] for own in everyone) / len(everyone),
        )
        for tensor in sorted(tensors, key=lambda tensor: orders[0].index(tensor.name))
    )
    each = place.ranks_per_node or 1
    cluster = Cluster(place.size // each, each, rate=rate)
    codecs = [costs.cost([own.codecs[index] for own in everyone]) for index in range(len(everyone[0].codecs))]
    slowest = {name: max(getattr(own.compute, name) for own in everyone) for name in ("forward", "optimizer", "wall")}
    return Profile(
        VERSION,
        fingerprint(described, cluster),
        model,
        cluster,
        forward=late * slowest["forward"],
        backward=latest,
        optimizer=slowest["optimizer"],
        tensors=described,
        links=tuple(found),
        codecs=tuple(codecs),
        contention=Contention(
            codec=sum(own.codec_contention for own in everyone) / len(everyone),
            collective=besides.share,
            latency=besides.latency,
        ),
        group_overhead=group_overhead,
        native_seconds=slowest["wall"],
        remarks=tuple(remarks),
    )


def _finite(energy: float) -> float:
    """JSON has no NaN; 0 is what a profile says of an energy that was not measured."""
    return energy if math.isfinite(energy) else 0.0


def _lateness(steps: Sequence[Sequence[float]]) -> float:
    """How many times as long the slowest rank of a step takes as the slowest rank usually does: not always the same is late."""
    if not all(steps):
        return 1.0
    usual = max(statistics.median(own) for own in steps)
    slowest: list[float] = [max(step) for step in zip(*steps, strict=True)]
    return max(1.0, statistics.median(slowest) / usual)


def _codec_contention(rounds: int) -> float:
    """What a second of work in another thread takes from a computation: 1 on the same core, 0 on a free one."""
    load, residual, gradient = LoadGenerator(), torch.zeros(1 << 20), torch.zeros(1 << 20)

    def work(done: Any = None) -> None:
        for _ in range(10):
            residual.add_(gradient)
        if done is not None:
            done()

    work()
    begun = time.perf_counter()
    for _ in range(rounds):
        work()
    alone = (time.perf_counter() - begun) / rounds
    taken = [
        load.beside(lambda done: threading.Thread(target=work, args=(done,)).start()).taken for _ in range(rounds)
    ]
    return min(1.0, sorted(taken)[rounds // 2] / alone)
