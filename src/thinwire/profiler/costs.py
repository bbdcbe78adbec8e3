"""Costs of codecs on the gradients of a job: seconds of work between collectives, bytes, and what stays in residuals.

A codec is run as the engine runs it, over real collectives, on groups of the job's own tensors. All ranks do it together.
"""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..chains import tree
from ..chains.chain import choose, exchanger, places
from ..codecs import Codec, GroupInfo, ParameterInfo, Sum
from ..codecs.driver import all_finite
from ..comm.collectives import Collective, Place, Scope
from ..comm.world import TorchWorld
from ..planner import profile
from ..planner.profile import CodecCost, Line, Link, Round
from .fit import fit
from .links import NAMES, agreed
from .slices import THOROUGH, Effort, Stopwatch, Work

SMALL = 1024
"""Tensors with fewer elements travel dense, whatever the codec."""

_CACHE_BYTES = 32 << 20


@dataclass
class Sample:
    """One exchange of one group on one rank."""

    elements: int
    work: list[float]
    wire: list[tuple[profile.Collective, Scope, int, float]]
    """Each collective: the bytes that this rank handed over, and the seconds it took."""


@dataclass
class Samples:
    """All exchanges of one codec on one rank; `held` is what it held back in them of what was `waiting`, as squared norms."""

    codec: str
    chain: str
    samples: list[Sample] = field(default_factory=list)
    held: float = 0.0
    waiting: float = 0.0


class Trial:
    """One group with one codec and chain on this rank, exchanged as the engine does it, with separate residuals."""

    def __init__(self, codec: Codec, chain: str, info: GroupInfo, place: Place) -> None:
        self.codec, self.info = codec, info
        self.way = exchanger(codec.at(0), tree.parse(chain) if chain else None, info, place)
        self.residuals = [torch.zeros(part.stop - part.start) for part in self.way.residual_parts]

    def exchange(self, gradient: Tensor, step: int) -> Generator[Collective, None, None]:
        yield from self.way.run(gradient, self.residuals, step)
        if self.way.tests_result:
            all_finite(gradient)

    def waiting(self, source: Tensor) -> float:
        """The squared norm of all that could be sent in a step with this gradient."""
        if len(self.residuals) == 1 and self.residuals[0].numel() == source.numel():
            return float((self.residuals[0] + source).square().sum())
        return float(source.square().sum()) + sum(float(residual.square().sum()) for residual in self.residuals)

    def held(self, source: Tensor) -> float:
        """The squared norm of what was held back of it, or lost."""
        if self.codec.keeps_residual:
            return sum(float(residual.square().sum()) for residual in self.residuals)
        return 0.0 if self.codec.direct else _rounding(self.codec, self.info, source)

    def finish(self) -> None:
        """The step counts."""
        self.way.observe()
        if self.way.states:
            self.codec.commit(self.way.states)


def measuring(
    texts: Sequence[str],
    tensors: Sequence[profile.Tensor],
    gradients: Sequence[Mapping[str, Tensor]],
    world: TorchWorld,
    links: Sequence[Link],
    spent: Stopwatch,
    *,
    budget: float,
    effort: Effort = THOROUGH,
    prepare: Callable[[str], None] = lambda text: None,
) -> Work[list[Samples]]:
    """Each codec on up to three sizes of groups, within about `budget` seconds in all. `gradients` are of several steps.

    `prepare` is called for each codec first. Where not all must be measured, what has no time left is missing.
    """
    place = Place(world.rank, world.size, world.ranks_per_node)
    chosen = [choose(text) for text in texts]
    for codec, chain in chosen:
        world.prepare(places(tree.parse(chain) if chain else None, codec, place))
    # The smallest and the largest say most about a line.
    groups = pick(tensors, effort.shares)
    groups = groups[:1] + groups[:0:-1]
    found: list[Samples] = []
    for position, (text, (codec, chain)) in enumerate(zip(texts, chosen, strict=True)):
        if effort.least is not None and len(found) >= effort.least and budget <= 0.0:
            break
        begun = spent()
        yield from spent.pause()
        prepare(text)
        yield from spent.pause()
        name, _, via = text.partition(" via ")
        samples = Samples(name, via)
        remaining = len(texts) - position if effort.least is None else 1
        for group in groups:
            left = budget / remaining - agreed(world, spent() - begun)
            each = expected_seconds(codec, group, world.size, links)
            expected = each * (effort.warm_up + effort.repetitions)
            sizes = len({sample.elements for sample in samples.samples})
            last = group is groups[-1] and sizes == 1 and effort.least is None
            if sizes and not last and (expected > left or each > effort.longest):
                continue
            yield from _measure_group(samples, codec, chain, group, gradients, world, place, spent, effort)
        found.append(samples)
        budget -= agreed(world, spent() - begun)
    return found


_ROUTINES: dict[str, profile.Collective] = {
    "AR": "all_reduce",
    "RS": "all_to_all",  # and a sum: see chains/reducescatter.py
    "AG": "all_gather",
    "A2A": "all_to_all",
    "R": "reduce",
    "B": "broadcast",
    "G": "gather",
}


def collectives(text: str, place: Place) -> set[tuple[profile.Collective, Scope]]:
    """Those that a codec and its chain may use between these ranks."""
    chain = choose(text)[1]
    own: list[profile.Collective] = ["all_gather", "all_reduce"]
    if not chain:
        return {(collective, "flat") for collective in own}
    leaf, found = tree.parse(chain), set[tuple[profile.Collective, Scope]]()
    for op in leaf.ops:
        if op.scope is not None and place.count(op.scope) > 1:
            spoken = own if leaf.summed and op.compressed else [_ROUTINES[op.routine]]
            found.update((collective, op.scope) for collective in spoken)
    return found


def _measure_group(
    samples: Samples,
    codec: Codec,
    chain: str,
    info: GroupInfo,
    gradients: Sequence[Mapping[str, Tensor]],
    world: TorchWorld,
    place: Place,
    spent: Stopwatch,
    effort: Effort,
) -> Work[None]:
    trial = Trial(codec, chain, info, place)
    sources = [flatten(info, gradient) for gradient in gradients]
    gradient = torch.empty(info.elements)
    cache = torch.ones(_CACHE_BYTES // 4)
    for step in range(effort.warm_up + effort.repetitions):
        source = sources[step % len(sources)]
        waiting = trial.waiting(source)
        gradient.copy_(source)
        cache.sum()  # in a step everything else lies between two uses of a residual
        sample = Sample(info.elements, [], [])
        _drive(trial.exchange(gradient, step), world, sample)
        trial.finish()
        if step >= effort.warm_up:
            samples.samples.append(sample)
            samples.waiting += waiting
            samples.held += trial.held(source)
        yield from spent.pause()


def _rounding(codec: Codec, info: GroupInfo, source: Tensor) -> float:
    """What a codec that keeps nothing loses by itself: the squared distance of what one rank alone makes of a gradient."""
    result = source.clone()
    steps = codec.exchange(result, torch.empty(0), codec.start(info, 0, 1))
    answer = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration:
            return float((result - source).square().sum())
        assert isinstance(request, Sum)
        answer = request.values


def _drive(steps: Generator[Collective, None, None], world: TorchWorld, sample: Sample) -> None:
    """Carry out an exchange, one collective after the other, and note how long each part takes."""
    round_, begun = 0, time.perf_counter()
    for part in steps:
        sample.work.append(time.perf_counter() - begun)
        if part.operation == "idle":  # only the first rank of each node speaks; what it said counts
            sample.wire.append(("broadcast", part.scope, 0, 0.0))
            begun, round_ = time.perf_counter(), round_ + 1
            continue
        done = threading.Event()
        issued = time.perf_counter()
        pending = world.issue(round_, [part], done.set)
        done.wait()
        begun = time.perf_counter()
        sample.wire.append((NAMES[part.operation], part.scope, part.bytes, begun - issued))
        pending.check()  # a sum of two ranks is added here
        round_ += 1
    sample.work.append(time.perf_counter() - begun)


def flatten(info: GroupInfo, gradient: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([gradient[parameter.name].reshape(-1).float() for parameter in info.parameters])


def pick(tensors: Sequence[profile.Tensor], shares: Sequence[float] = THOROUGH.shares) -> list[GroupInfo]:
    """Groups of tensors that follow each other in backward, of about these shares of all elements."""
    large = [tensor for tensor in tensors if tensor.elements >= SMALL] or list(tensors)
    total = sum(tensor.elements for tensor in large)
    found: dict[tuple[str, ...], GroupInfo] = {}
    for share in shares:
        best: list[profile.Tensor] = []
        distance = math.inf
        for first in range(len(large)):
            size, last = 0, first
            while last < len(large) and (size == 0 or size + large[last].elements <= 1.5 * share * total):
                size += large[last].elements
                last += 1
            away = abs(math.log(size / (share * total)))
            if away < distance:
                best, distance = large[first:last], away
        names = tuple(tensor.name for tensor in best)
        found[names] = _info(best)
    return sorted(found.values(), key=lambda info: info.elements)


def _info(tensors: Sequence[profile.Tensor]) -> GroupInfo:
    ends = [0, *itertools.accumulate(tensor.elements for tensor in tensors)]
    parameters = (ParameterInfo(t.name, at, t.elements, t.shape, t.kind) for t, at in zip(tensors, ends, strict=False))
    return GroupInfo("rehearsal", ends[-1], tuple(parameters))


def expected_seconds(codec: Codec, group: GroupInfo, world: int, links: Sequence[Link]) -> float:
    """A rough time of one exchange, before it is measured: bytes over the links, and a memory pass or two."""
    estimate = codec.at(0).estimate(group, world)
    known = {link.collective: link for link in links if link.scope == "flat"}
    seconds = 3e-9 * group.elements * max(1.0, estimate.passes)
    for collective, size in (("all_gather", estimate.gathered), ("all_reduce", estimate.summed)):
        if size and collective in known:
            seconds += known[collective].seconds(size)
    return seconds


def cost(everyone: Sequence[Samples]) -> CodecCost:
    """The costs of one codec from what all ranks measured of it."""
    first = everyone[0]
    samples = [sample for samples in everyone for sample in samples.samples]
    rounds = len(samples[0].wire) if len(everyone) > 1 else 0

    def line(values: Sequence[tuple[int, float]]) -> Line:
        """Medians by size, then a line through them."""
        sizes = sorted({elements for elements, _ in values})
        middle = [statistics.median(value for elements, value in values if elements == size) for size in sizes]
        return fit(sizes, middle) if len(sizes) > 1 else Line(slope=middle[0] / sizes[0])

    def work(place: int) -> Line:
        return line([(sample.elements, sample.work[place]) for sample in samples])

    steps = []
    for place in range(rounds):
        collective, scope, _, _ = samples[0].wire[place]
        spoken = [sample for sample in samples if sample.wire[place][2]] or samples
        size = line([(sample.elements, float(sample.wire[place][2])) for sample in spoken])
        steps.append(Round(collective, size, scope, work(place + 1) if place + 1 < rounds else Line()))
    worked = [(sample.elements, sum(sample.work)) for sample in samples]
    held, waiting = sum(each.held for each in everyone), sum(each.waiting for each in everyone)
    return CodecCost(
        codec=first.codec,
        chain=first.chain,
        encode=work(0),
        decode=work(-1),
        rounds=tuple(steps),
        loss=math.sqrt(held / waiting) if waiting else 0.0,
        spread=_spread(worked),
    )


def _spread(seconds: Sequence[tuple[int, float]]) -> float:
    """By how much more than the least the work usually takes, relative to the least: of the size that varies most."""
    found = [0.0]
    for size in {elements for elements, _ in seconds}:
        some = [value for elements, value in seconds if elements == size]
        if min(some) > 0.0:
            found.append(statistics.median(some) / min(some) - 1.0)
    return max(found)
