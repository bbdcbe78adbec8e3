"""Profile files: the measured costs of backward, links and codecs of a job on a cluster. JSON, versioned.

All times are in seconds. Costs are lines, `max(floor, start + slope * x)`, with their fit error.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from ..codecs import parse
from ..errors import CodecTextError, ProfileError, ThinwireError
from ..ranges import Amount, Count, Positive, Real, Version, World

VERSION = 1
LARGE_BYTES = 256 << 10
"""Smallest message that shows the rate of a link; smaller ones pass in bursts."""

Scope = Literal["flat", "intra", "inter"]
Collective = Literal["all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "reduce", "gather"]


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """max(floor, start + slope * x). For links x is in bytes, for codecs in elements.

    error  mean relative distance of the measurements from the line
    """

    floor: Amount = 0.0
    start: Real = 0.0
    slope: Amount = 0.0
    error: Amount = 0.0

    def __call__(self, x: float) -> float:
        return max(self.floor, self.start + self.slope * x)


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One gradient. Tensors are in the order in which backward completes them.

    ready   seconds since the start of backward, without concurrent exchange
    energy  mean squared norm of the gradient, the weight of its relative loss. 0: not measured
    """

    name: str
    elements: Count
    kind: str
    dtype: str
    ready: Amount
    shape: tuple[Count, ...] = ()
    energy: Amount = 0.0


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time of a collective as a function of the bytes per rank.

    line    linear fit; used if there are no points
    points  measured (bytes, seconds), both ascending. A byte costs more in messages of medium size than in small or large
            ones, which a line cannot express
    spread  by how much more than the least a message usually took, relative to the least; older files lack it
    """

    collective: Collective
    scope: Scope
    ranks: World
    line: Line
    points: tuple[tuple[Amount, Amount], ...] = ()
    spread: Amount | msgspec.UnsetType = msgspec.UNSET

    def seconds(self, size: float) -> float:
        """Interpolated between points; beyond the last one at the best measured rate, or the slope of the upper half."""
        if len(self.points) < 2:
            return self.line(size)
        place = bisect.bisect_right(self.points, (size, math.inf))
        if place == 0:
            return self.points[0][1]
        if place == len(self.points):
            (x0, t0), (x1, t1) = self.points[(place - 1) // 2], self.points[-1]
            return t1 + (size - x1) * min(self._at_best, (t1 - t0) / (x1 - x0))
        (x0, t0), (x1, t1) = self.points[place - 1], self.points[place]
        return t1 + (size - x1) * (t1 - t0) / (x1 - x0)

    @property
    def _at_best(self) -> float:
        """Seconds per byte of large messages that keep the wire busy."""
        return min((seconds / at for at, seconds in self.points if at >= LARGE_BYTES), default=math.inf)

    def parts(self, size: float) -> tuple[float, float]:
        """Wire seconds, which cannot overlap with other collectives, and latency, which can.

        A single collective does not keep the wire busy while its ranks wait for each other; others can use the rest.
        """
        total = self.seconds(size)
        busy = min(total - self.points[0][1], self._at_best * size) if len(self.points) > 1 else self.line.slope * size
        wire = max(0.0, busy)
        return wire, max(0.0, total - wire)


class Round(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One collective of a codec's exchange.

    bytes  bytes per rank, as a line over the elements of the group
    work   codec work between this collective and the next; zero after the last, which `decode` follows
    """

    collective: Collective
    bytes: Line
    scope: Scope = "flat"
    work: Line = Line()


class CodecCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The costs per rank of a codec and chain: encode, `rounds` with work between them, decode.

    codec  the text of a codec; chain: a leaf of the tree, or empty for the codec's own collectives
    loss   relative loss of the result with error feedback, measured on the job's gradients; 0 for dense
    spread  by how much more than the least its work usually took, relative to the least; older files lack it
    """

    codec: str
    encode: Line
    decode: Line
    rounds: tuple[Round, ...]
    loss: Amount
    chain: str = ""
    spread: Amount | msgspec.UnsetType = msgspec.UNSET


class Contention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Delay of backward in seconds per second of concurrent work: 0 is none, 1 is full serialization.

    codec       during codec work
    collective  during a collective
    latency     additional seconds of a collective during backward, while its threads wait for a core
    """

    codec: Amount = 0.0
    collective: Amount = 0.0
    latency: Amount = 0.0


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cluster of the measurements. If nodes are unknown, every rank counts as a node."""

    nodes: World
    ranks_per_node: World
    backend: str = "gloo"
    rate: str = ""
    device: str = "cpu"

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One job on one cluster.

    group_overhead  CPU seconds of the engine per group in addition to codec work
    native_seconds  step time of plain DDP without a hook; 0: not measured
    fit             ratio of the seconds per byte during computation to those of `links`, measured on idle cores
    """

    version: Version
    fingerprint: str
    model: str
    cluster: Cluster
    forward: Amount
    backward: Amount
    optimizer: Amount
    tensors: tuple[Tensor, ...]
    links: tuple[Link, ...]
    codecs: tuple[CodecCost, ...]
    contention: Contention = Contention()
    group_overhead: Amount = 0.0
    native_seconds: Amount = 0.0
    fit: Positive = 1.0
    remarks: tuple[str, ...] = ()

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read and validate a file; a `ProfileError` names the invalid field."""
        profile = load_struct(path, Profile, "profile", ProfileError)
        profile.check(str(path))
        return profile

    def save(self, path: str | Path) -> None:
        self.check("the profile to be saved")
        save_struct(path, self)

    @property
    def spread(self) -> float:
        """By how much more than the least collectives of the whole job took, relative to the least."""
        known = (link.spread for link in self.links if link.scope == "flat")
        return max((spread for spread in known if spread is not msgspec.UNSET), default=0.0)

    @property
    def compute(self) -> float:
        """Step time without communication."""
        return self.forward + self.backward + self.optimizer

    def link(self, collective: Collective, scope: Scope) -> Link:
        for link in self.links:
            if (link.collective, link.scope) == (collective, scope):
                return link
        known = ", ".join(f"{link.collective} {link.scope}" for link in self.links) or "none"
        raise ProfileError(f"the profile has no link {collective} {scope}; it has: {known}")

    def check(self, where: str = "the profile") -> None:
        """Raise `ProfileError` for values that no measurement can give."""

        def refuse(problem: str) -> None:
            raise ProfileError(f"{where}: {problem}")

        if self.version != VERSION:
            refuse(f"version {self.version}, this thinwire reads {VERSION}")
        if not self.tensors:
            refuse("it has no tensors")
        check_numbers(self, where, ProfileError)
        before, seen = 0.0, set()
        for tensor in self.tensors:
            if tensor.name in seen:
                refuse(f"tensor {tensor.name!r} is listed twice")
            seen.add(tensor.name)
            if math.prod(tensor.shape) != tensor.elements and tensor.shape:
                refuse(f"tensor {tensor.name!r} has {tensor.elements} elements and shape {tensor.shape}")
            if tensor.ready < before:
                refuse(
                    f"tensor {tensor.name!r} is ready at {tensor.ready:g} s, before the one above it ({before:g} s)"
                )
            before = tensor.ready
        if before > self.backward * (1 + 1e-9):
            refuse(f"the last tensor is ready at {before:g} s, after the end of backward ({self.backward:g} s)")
        for link in self.links:
            for (x0, t0), (x1, t1) in itertools.pairwise(link.points):
                if x1 <= x0 or t1 < t0:
                    refuse(f"the points of {link.collective} {link.scope} do not ascend at {x1:g} bytes, {t1:g} s")
        for cost in self.codecs:
            try:
                parse(cost.codec)
                for round_ in cost.rounds if self.cluster.world > 1 else ():
                    self.link(round_.collective, round_.scope)
            except CodecTextError as error:
                refuse(str(error))
            except ProfileError as error:
                refuse(f"codec {cost.codec!r}: {error}")
        if not any(cost.codec == "dense" and not cost.chain for cost in self.codecs):
            refuse("the costs of 'dense' are missing: nothing can be compared with it")
        expected = fingerprint(self.tensors, self.cluster)
        if self.fingerprint != expected:
            refuse(f"fingerprint {self.fingerprint!r} is not that of its tensors and cluster ({expected!r})")


def fingerprint(tensors: Iterable[Tensor], cluster: Cluster) -> str:
    """A hash of the tensors' names, sizes and dtypes in any order, the number of nodes and the ranks per node."""
    lines = sorted(f"{tensor.name} {tensor.elements} {tensor.dtype}" for tensor in tensors)
    lines.append(f"{cluster.nodes} x {cluster.ranks_per_node}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


# -- files, for profiles and plans -----------------------------------------------------------------------------------

Struct = TypeVar("Struct")


def load_struct(path: str | Path, kind: type[Struct], word: str, error: type[ThinwireError]) -> Struct:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except OSError as problem:
        raise error(f"there is no {word} {str(path)!r}: {problem.strerror}") from None
    except (
        msgspec.DecodeError,
        UnicodeError,
        RecursionError,
    ) as problem:  # bad JSON, or a field that is missing, unknown or wrong
        raise error(f"{str(path)!r} is not a {word}: {problem}") from None


def save_struct(path: str | Path, content: object) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def check_numbers(content: msgspec.Struct, where: str, error: type[ThinwireError]) -> None:
    """That what was computed would be read again: every number is finite and in its range."""
    try:
        msgspec.convert(msgspec.to_builtins(content), type(content))
    except msgspec.ValidationError as problem:
        raise error(f"{where}: {problem}") from None
