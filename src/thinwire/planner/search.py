"""Plan search for a measured job: groups and their codecs, evaluated with `predict`.

The dynamic program of `pareto` with the engine's costs gives starting points; hill climbing then applies single changes
(another codec, a merge, a split, a moved border) as long as the predicted step time falls. Of all plans within `SLACK` of the
fastest, the one with the least loss is chosen.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ..errors import PlanError
from . import SLACK, pareto
from .plan import VERSION, Plan, PlanGroup, PlanTensor, Quality
from .predict import Job, Pieces, predict
from .profile import CodecCost, Profile

LOSSES: dict[Quality, float] = {"lossless": 0.0, "high": 0.97, "fast": float("inf")}
"""Largest relative loss per step, with error feedback, of the codecs considered for a quality.

0.97 is a norm: 6 % of the accumulated energy is sent per step. The largest 1 % of a Gaussian hold 8 %, of a gradient more; the
largest 0.1 %, or one block of 64, less than 2 %."""

DDP_FIRST, DDP_CAP = 1 << 20, 25 << 20
"""Bytes of DDP's first bucket and of the others."""

MOST_PREDICTIONS = 6000

_TURN, _BREAK = 0.0002, 0.0001
"""Seconds for which a search in a thread keeps the interpreter, and for which it then lets go."""

Group = tuple[int, int, int]
"""First tensor, one past the last, index of the option."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    groups: tuple[Group, ...]
    seconds: float
    loss: float


def choose(profile: Profile, *, quality: Quality = "fast", slack: float = SLACK, borders: Sequence[int] = ()) -> Plan:
    """The plan for the job that this profile describes.

    borders: ends of the buckets of an existing DDP module, as positions in the order of the tensors; see `by_buckets`. Groups
    do not span buckets, since that would need copies.
    """
    if quality not in LOSSES:
        raise PlanError(f"quality must be one of {', '.join(LOSSES)}, not {quality!r}")
    if not 0.0 <= slack <= 1.0:
        raise PlanError(f"slack must be between 0 and 1, not {slack}")
    begun = time.perf_counter()
    allowed = [cost for cost in profile.codecs if cost.loss <= LOSSES[quality]]
    dense = next(at for at, cost in enumerate(allowed) if cost.codec == "dense" and not cost.chain)
    search = _PlanSearch(profile, allowed, borders)
    plain = search.attempt(search.buckets(dense))
    remarks = []
    if profile.cluster.world == 1:
        best = search.attempt(search.cut([(0, len(profile.tensors), dense)]))
        remarks.append("one rank: there is nothing to exchange")
    else:
        best = search.least_loss(search.fastest(plain), plain, slack)
        if len(allowed) == 1:
            remarks.append(
                f"quality {quality!r} allows no codec that the profile has costs of, so nothing is compressed"
            )
        elif all(option == dense for _, _, option in best.groups):
            remarks.append(f"no codec makes the step more than {100 * slack:g} % shorter: nothing is compressed")
    return _written(profile, search, best, plain.seconds, quality, time.perf_counter() - begun, remarks)


def by_buckets(profile: Profile, borders: Sequence[int]) -> Profile:
    """The profile if tensors become ready bucket by bucket, each with the last one of its bucket."""
    tensors = list(profile.tensors)
    for start, stop in itertools.pairwise([0, *borders]):
        ready = max((tensor.ready for tensor in tensors[start:stop]), default=0.0)
        tensors[start:stop] = [msgspec.structs.replace(tensor, ready=ready) for tensor in tensors[start:stop]]
    return msgspec.structs.replace(profile, tensors=tuple(tensors))


def as_ddp(
    profile: Profile, codec: str = "dense", chain: str = "", borders: Sequence[int] = ()
) -> tuple[PlanGroup, ...]:
    """DDP's own buckets as groups, all with one codec."""
    names = [tensor.name for tensor in profile.tensors]
    cuts = _PlanSearch(profile, [], borders).buckets(0)
    return tuple(PlanGroup(tuple(names[start:stop]), codec, chain) for start, stop, _ in cuts)


def _written(
    profile: Profile,
    search: _PlanSearch,
    best: _Candidate,
    dense: float,
    quality: Quality,
    spent: float,
    remarks: list[str],
) -> Plan:
    names = [tensor.name for tensor in profile.tensors]
    costs = [search.options[option] for _, _, option in best.groups]
    groups = [
        PlanGroup(tuple(names[start:stop]), cost.codec, cost.chain)
        for (start, stop, _), cost in zip(best.groups, costs, strict=True)
    ]
    found = predict(profile, groups)
    return Plan(
        version=VERSION,
        fingerprint=profile.fingerprint,
        model=profile.model,
        cluster=profile.cluster,
        quality=quality,
        search="joint",
        predicted_seconds=found.seconds,
        bound_seconds=profile.compute,
        dense_seconds=dense,
        tensors=tuple(PlanTensor(t.name, t.shape or (t.elements,), t.dtype) for t in profile.tensors),
        groups=tuple(
            PlanGroup(group.names, group.codec, group.chain, operations)
            for group, operations in zip(groups, found.operations, strict=True)
        ),
        loss=best.loss,
        search_seconds=spent,
        remarks=tuple(remarks),
    )


class _PlanSearch:
    """The search on one profile, with a cache of predictions."""

    def __init__(self, profile: Profile, options: Sequence[CodecCost], borders: Sequence[int] = ()) -> None:
        self.profile, self.options = profile, list(options)
        self.job = Job(profile, self.options)
        self.elements = np.array([tensor.elements for tensor in profile.tensors], np.float64)
        self.total = np.concatenate([[0.0], np.cumsum(self.elements)])
        self.ready = np.array([tensor.ready for tensor in profile.tensors])
        self.borders = sorted({*borders, len(profile.tensors)} - {0}) if borders else []
        energy = np.array([tensor.energy for tensor in profile.tensors])
        weight = energy if energy.any() else self.elements
        self.weight = np.concatenate([[0.0], np.cumsum(weight / max(weight.sum(), 1e-300))])
        self._beside, self._kept_since = threading.current_thread() is not threading.main_thread(), 0.0
        self._pieces: dict[Group, Pieces] = {}
        self._tries: dict[tuple[Group, ...], _Candidate] = {}

    def attempt(self, groups: Sequence[Group]) -> _Candidate:
        """Predicted time and loss of a plan."""
        key = tuple(groups)
        within = (bisect.bisect_right(self.borders, a) == bisect.bisect_left(self.borders, b) for a, b, _ in key)
        if self.borders and not all(within):
            return _Candidate(key, math.inf, math.inf)
        if key not in self._tries:
            self._give_way()
            parts = [self._of(group) for group in key]
            pieces = Pieces(
                *(
                    np.concatenate([getattr(part, name) for part in parts])
                    for name in ("rounds", "work", "wire", "latency")
                )
            )
            ready = self.ready[[stop - 1 for _, stop, _ in key]]
            loss = sum(
                (self.weight[stop] - self.weight[start]) * self.options[option].loss for start, stop, option in key
            )
            self._tries[key] = _Candidate(key, self.job.seconds(ready, pieces), float(loss))
        return self._tries[key]

    def _give_way(self) -> None:
        """Beside a training, let go of the interpreter often: its thread would wait 5 ms each time that it wants it."""
        if self._beside and time.perf_counter() - self._kept_since > _TURN:
            time.sleep(_BREAK)
            self._kept_since = time.perf_counter()

    def _of(self, group: Group) -> Pieces:
        if group not in self._pieces:
            start, stop, option = group
            self._pieces[group] = self.job.pieces([option], self.total[[stop]] - self.total[start])
        return self._pieces[group]

    def cut(self, groups: Sequence[Group]) -> list[Group]:
        """The groups, split at every border."""
        found = []
        for start, stop, option in groups:
            inside = [border for border in self.borders if start < border < stop]
            found += [(first, last, option) for first, last in itertools.pairwise([start, *inside, stop])]
        return found

    def buckets(self, option: int) -> list[Group]:
        """The tensors in DDP's buckets, or in those that DDP would build by default."""
        if self.borders:
            return self.cut([(0, len(self.elements), option)])
        found, start, size, cap = [], 0, 0.0, DDP_FIRST
        for at, elements in enumerate(self.elements):
            size += 4.0 * elements
            if size >= cap or at + 1 == len(self.elements):
                found.append((start, at + 1, option))
                start, size, cap = at + 1, 0.0, DDP_CAP
        return found

    def fastest(self, plain: _Candidate) -> _Candidate:
        """The fastest plan found by hill climbing from several starts."""
        starts = [plain, self.attempt(self._seed(range(len(self.options))))]
        for option in range(len(self.options)):
            starts += [self.attempt(self.buckets(option)), self.attempt(self._seed([option]))]
        starts.sort(key=lambda each: each.seconds)
        climbed = [self._climb(start, _faster) for start in starts[:3]]
        return min(climbed, key=lambda each: each.seconds)

    def least_loss(self, fastest: _Candidate, plain: _Candidate, slack: float) -> _Candidate:
        """The plan with the least loss within `slack` of the fastest.

        Starts are the fastest plan, all dense, and the best plan for each bound on the loss of a codec.
        """
        limit = fastest.seconds * (1 + slack)
        starts = [fastest, plain]
        for bound in sorted({cost.loss for cost in self.options}):
            some = [at for at, cost in enumerate(self.options) if cost.loss <= bound]
            start = self.attempt(self._seed(some))
            starts.append(self._climb(start, _faster, only=some))
            if starts[-1].seconds <= limit:
                break
        within = [start for start in starts if start.seconds <= limit]
        within.sort(key=lambda each: (each.loss, each.seconds))

        def better(new: _Candidate, old: _Candidate) -> bool:
            if new.seconds > limit:
                return False
            return new.loss < old.loss - 1e-12 or (new.loss <= old.loss and new.seconds < old.seconds * (1 - 1e-6))

        climbed = [self._climb(start, better) for start in within[:4]]
        return min(climbed, key=lambda each: (each.loss, each.seconds))

    def _climb(
        self, start: _Candidate, better: Callable[[_Candidate, _Candidate], bool], only: Sequence[int] | None = None
    ) -> _Candidate:
        """Hill climbing by single changes."""
        best, budget = start, MOST_PREDICTIONS
        moved = True
        while moved and budget > 0:
            moved = False
            for groups in self._changes(best.groups, only if only is not None else range(len(self.options))):
                new = self.attempt(groups)
                budget -= 1
                if better(new, best):
                    best, moved = new, True
                    break
                if budget <= 0:
                    break
        return best

    def _changes(self, groups: tuple[Group, ...], options: Sequence[int]) -> Iterator[list[Group]]:
        """All plans that differ by one change."""
        for at, (start, stop, option) in enumerate(groups):
            before, after = list(groups[:at]), list(groups[at + 1 :])
            for other in options:
                if other != option:
                    yield [*before, (start, stop, other), *after]
            if after:
                _, far, following = after[0]
                yield [*before, (start, far, option), *after[1:]]
                if following != option:
                    yield [*before, (start, far, following), *after[1:]]
                for step in (1, 2, 4, 8, 16, 32):
                    if stop + step < far:
                        yield [*before, (start, stop + step, option), (stop + step, far, following), *after[1:]]
                    if stop - step > start:
                        yield [*before, (start, stop - step, option), (stop - step, far, following), *after[1:]]
            cuts = np.unique(
                np.searchsorted(self.total, self.total[start] + (self.total[stop] - self.total[start]) * _PARTS)
            )
            for cut in (int(each) for each in cuts if start < each < stop):
                for first, second in (
                    (option, option),
                    *((option, o) for o in options),
                    *((o, option) for o in options),
                ):
                    if first == option or second == option:
                        yield [*before, (start, cut, first), (cut, stop, second), *after]

    def _seed(self, options: Sequence[int]) -> list[Group]:
        """The dynamic program with the engine's costs: codec work and collectives delay backward by their contention, and
        groups are processed one after the other."""
        lengths = pareto.lengths_up_to(len(self.elements), dense=8, growth=1.3)
        contention = self.profile.contention
        vectors, offsets, owners = [], [0], []
        for stop in range(len(self.elements) + 1):
            for length in lengths:
                if length <= stop:
                    for option in options:
                        part = self._of((stop - int(length), stop, option))
                        work, wire = float(part.work.sum()), float(part.wire.sum() + part.latency.sum())
                        lead = float(part.work[0, 0]) * (1 + contention.codec)
                        delay = contention.codec * work + contention.collective * wire
                        vectors.append((lead, 0.0, delay, work - float(part.work[0, 0]) + wire))
                        owners.append(option)
                offsets.append(len(owners))
        compute = np.diff(self.ready, prepend=0.0)
        problem = pareto.Problem(compute, lengths, np.array(offsets), np.array(vectors))
        found = pareto.solve(problem, limit=24, beams=())
        return self.cut([(start, stop, owners[row]) for start, stop, row in found.groups])


def _faster(new: _Candidate, old: _Candidate) -> bool:
    return new.seconds < old.seconds * (1 - 1e-6)


_PARTS = np.array([0.125, 0.25, 0.5, 0.75, 0.875])
