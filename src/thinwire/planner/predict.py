"""Predicts the step time of the CPU engine from the costs in a profile.

Codec work runs in one exchange thread concurrently with backward and shares its core; collectives run in gloo's threads;
groups are sent in a fixed order. This is an event simulation of `engine/scheduler.py`:

    exchange thread   one piece of work at a time, not preempted; first work that issues a further round, then the next
                      complete group, then work that only decodes
    wire              collectives in order of issue; the latency of one overlaps with the next
    backward          while codec work runs, both proceed at 1 / (1 + contention.codec) of their speed; during a
                      collective, both at 1 - contention.collective
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import PlanError
from ..kernels.cpu._jit import Doubles, Offsets, kernel
from .plan import Operation
from .profile import CodecCost, Profile


class Grouped(Protocol):
    """The interface of a group; `PlanGroup` has it."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def codec(self) -> str: ...
    @property
    def chain(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Prediction:
    """seconds: the whole step. exchange: from the start of backward to the end of the last group. operations: by group."""

    seconds: float
    exchange: float
    backward: float
    operations: tuple[tuple[Operation, ...], ...]


def predict(profile: Profile, groups: Sequence[Grouped]) -> Prediction:
    """Predict a step in which tensors are exchanged in these groups, in this order."""
    tensors = {tensor.name: tensor for tensor in profile.tensors}
    chosen: list[CodecCost] = []
    ready, elements = np.zeros(len(groups)), np.zeros(len(groups))
    for index, group in enumerate(groups):
        for name in group.names:
            if name not in tensors:
                raise PlanError(f"group {index}: the profile of {profile.model!r} has no tensor {name!r}")
        chosen.append(cost_of(profile, group.codec, group.chain))
        ready[index] = max(tensors[name].ready for name in group.names)
        elements[index] = sum(tensors[name].elements for name in group.names)
    job = Job(profile)
    pieces = job.pieces([job.options.index(cost) for cost in chosen], elements)
    starts, ends, finished = job.run(ready, pieces)
    operations = []
    for index, cost in enumerate(chosen):
        names = ["encode"]
        for round_ in cost.rounds if profile.cluster.world > 1 else ():
            names += [f"{round_.collective} {round_.scope}", "work"]
        names[-1] = "decode"
        spans = zip(names, starts[index].tolist(), ends[index].tolist(), strict=False)
        operations.append(
            tuple(Operation(name, ("codec", "wire")[at % 2], *span) for at, (name, *span) in enumerate(spans))
        )
    exchange = max(float(finished), max((each[-1].end for each in operations), default=0.0))
    return Prediction(profile.forward + exchange + profile.optimizer, exchange, float(finished), tuple(operations))


def cost_of(profile: Profile, codec: str, chain: str = "") -> CodecCost:
    for cost in profile.codecs:
        if (cost.codec, cost.chain) == (codec, chain):
            return cost
    known = ", ".join(f"{cost.codec} via {cost.chain}" if cost.chain else cost.codec for cost in profile.codecs)
    wanted = f"{codec} via {chain}" if chain else codec
    raise PlanError(f"the profile of {profile.model!r} has no costs of {wanted!r}; it has: {known}")


@dataclass(slots=True)
class Pieces:
    """Per group: number of rounds, seconds of each piece of work, wire seconds and latency of each collective."""

    rounds: Offsets
    work: Doubles
    wire: Doubles
    latency: Doubles


class Job:
    """A profile prepared for many predictions."""

    def __init__(self, profile: Profile, options: Sequence[CodecCost] | None = None) -> None:
        self.profile = profile
        self.options = list(profile.codecs if options is None else options)
        alone = profile.cluster.world == 1
        self.rounds = np.array([0 if alone else len(cost.rounds) for cost in self.options], np.int64)
        self._most = int(self.rounds.max(initial=0))

    def pieces(self, options: Sequence[int], elements: Doubles) -> Pieces:
        """The costs of groups; group i has elements[i] and uses options[i]."""
        work = np.zeros((len(options), self._most + 1))
        wire, latency = np.zeros((2, len(options), self._most))
        for index, (option, count) in enumerate(zip(options, elements, strict=True)):
            cost, rounds = self.options[option], int(self.rounds[option])
            work[index, 0] = cost.encode(count) + self.profile.group_overhead
            for at, round_ in enumerate(cost.rounds[:rounds]):
                link = self.profile.link(round_.collective, round_.scope)
                wire[index, at], latency[index, at] = link.parts(round_.bytes(count))
                work[index, at + 1] = round_.work(count) if at + 1 < rounds else cost.decode(count)
            if not rounds:
                work[index, 0] += cost.decode(count)
        return Pieces(self.rounds[list(options)], work, wire, latency)

    def run(self, ready: Doubles, pieces: Pieces) -> tuple[Doubles, Doubles, float]:
        """Start and end of each piece (work, wire, work, ... per group), and the end of backward."""
        shape = (len(ready), 2 * self._most + 1)
        starts, ends = np.zeros(shape), np.zeros(shape)
        contention = self.profile.contention
        finished = timeline(
            ready,
            pieces.rounds,
            pieces.work,
            pieces.wire,
            pieces.latency,
            contention.codec,
            min(contention.collective, 0.95),
            self.profile.backward,
            starts,
            ends,
        )
        return starts, ends, finished

    def seconds(self, ready: Doubles, pieces: Pieces) -> float:
        """The whole step."""
        _, ends, finished = self.run(ready, pieces)
        return self.profile.forward + max(float(finished), float(ends.max(initial=0.0))) + self.profile.optimizer


@kernel
def timeline(  # type: ignore[no-untyped-def]
    ready, rounds, work, wire, latency, codec_contention, collective_contention, backward, starts, ends
):
    """Fill starts and ends [groups, 2 * rounds + 1] with the times of all pieces; returns when backward ends.

    ready [groups] in seconds of undisturbed backward; work [groups, rounds + 1]; wire, latency [groups, rounds].
    """
    count = ready.shape[0]
    stage = np.full(count, -1, np.int64)  # the collective that a group waits for; -1: not begun
    back = np.full(count, np.inf)  # when that collective is done
    begun, done, current, piece = 0, 0, -1, 0
    now, progress, left, free, landed, finished = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    while done < count or progress < backward:
        if current < 0:
            last = -1
            for level in range(wire.shape[1]):
                for group in range(begun):
                    if stage[group] == level and back[group] < np.inf:
                        if back[group] <= now:
                            if level + 1 < rounds[group]:
                                current, piece = group, level + 1
                            elif last < 0:
                                last = group
                        break  # within a round groups go on in their order
                if current >= 0:
                    break
            if current < 0 and begun < count and progress >= ready[begun]:
                current, piece = begun, 0
                begun += 1
            if current < 0 and last >= 0:
                current, piece = last, rounds[last]
            if current >= 0:
                back[current] = np.inf
                left = work[current, piece]
                starts[current, 2 * piece] = now
        speed = 1.0 - collective_contention if landed > now else 1.0
        if current >= 0 and progress < backward:
            speed /= 1.0 + codec_contention
        # The next event.
        wait, event = np.inf, 0
        goal = backward
        if begun < count and progress < ready[begun] < backward:
            goal = ready[begun]
        if progress < backward:
            wait, event = (goal - progress) / speed, 1
        if current >= 0 and left / speed <= wait:
            wait, event = left / speed, 2
        coming = np.inf
        for group in range(begun):
            if now < back[group] < coming:
                coming = back[group]
        if coming - now < wait:
            wait, event = coming - now, 3
        if event == 0:
            return np.nan  # unreachable: something is always running
        now = coming if event == 3 else now + wait
        if progress < backward:
            progress = goal if event == 1 else min(goal, progress + wait * speed)
            if progress >= backward:
                finished = now
        if event == 2:
            ends[current, 2 * piece] = now
            stage[current] = piece
            if piece < rounds[current]:
                begin = max(now, free)
                free = begin + wire[current, piece]
                back[current] = free + latency[current, piece]
                landed = max(landed, back[current])
                starts[current, 2 * piece + 1] = begin
                ends[current, 2 * piece + 1] = back[current]
            else:
                done += 1
            current = -1
        elif current >= 0:
            left = max(0.0, left - wait * speed)
    return finished
