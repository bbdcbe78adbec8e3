"""The profile file: what backward, links and codecs of one job cost, as measured on one cluster. JSON, versioned.

Seconds everywhere. Costs are lines, `max(floor, start + slope * x)`, with the error of the fit beside them.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from ..codecs import parse
from ..errors import CodecTextError, ProfileError, ThinwireError

VERSION = 1
LARGE_BYTES = 256 << 10
"""From here on a message says something about the rate of a link: smaller ones pass in bursts."""

Scope = Literal["flat", "intra", "inter"]
Collective = Literal["all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "reduce", "gather"]


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """max(floor, start + slope * x). For links x is in bytes, for codecs in elements.

    error  mean relative distance of the measurements from the line
    """

    floor: float = 0.0
    start: float = 0.0
    slope: float = 0.0
    error: float = 0.0

    def __call__(self, x: float) -> float:
        return max(self.floor, self.start + self.slope * x)


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One gradient. Tensors stand in the order in which backward makes them ready.

    ready   seconds since backward began, without any exchange beside it
    energy  squared norm of the gradient, mean over steps: how much a relative loss weighs. 0: not measured
    """

    name: str
    elements: int
    kind: str
    dtype: str
    ready: float
    shape: tuple[int, ...] = ()
    energy: float = 0.0


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a collective takes, over the bytes that one rank hands to it.

    line    in short; all that is known where there are no points
    points  as it was measured, bytes and seconds, both ascending. A byte of a message of middle size costs more than one of a
            small or a large one, which no single line says
    """

    collective: Collective
    scope: Scope
    ranks: int
    line: Line
    points: tuple[tuple[float, float], ...] = ()

    def seconds(self, size: float) -> float:
        """Between points along lines, beyond the last one at the best rate that was seen, or the slope of the upper half."""
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
        """Seconds of a byte in a large message that kept the wire busy."""
        return min((seconds / at for at, seconds in self.points if at >= LARGE_BYTES), default=math.inf)

    def parts(self, size: float) -> tuple[float, float]:
        """Seconds on the wire, one collective after the other, and latency, which passes beside the next one.

        A collective alone does not keep the wire busy, its ranks wait for each other: others then use what it leaves.
        """
        total = self.seconds(size)
        busy = min(total - self.points[0][1], self._at_best * size) if len(self.points) > 1 else self.line.slope * size
        wire = max(0.0, busy)
        return wire, max(0.0, total - wire)


class Round(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One collective of a codec's exchange.

    bytes  what a rank hands to it, as a line over the elements of the group
    work   codec work between this collective and the next one; nothing after the last, where `decode` follows
    """

    collective: Collective
    bytes: Line
    scope: Scope = "flat"
    work: Line = Line()


class CodecCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one way to exchange a group costs a rank: encode, then `rounds` with work between them, then decode.

    codec  the text of a codec; chain: a leaf of the tree, or empty for the codec's own collectives
    loss   relative loss of the result with error feedback on, measured on the job's gradients; 0 for dense
    """

    codec: str
    encode: Line
    decode: Line
    rounds: tuple[Round, ...]
    loss: float
    chain: str = ""


class Contention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much longer backward takes for each second in which something runs beside it: 0 not at all, 1 a whole second.

    codec       beside codec work
    collective  beside a collective
    latency     seconds that a collective takes longer beside backward, because its threads wait for the core
    """

    codec: float = 0.0
    collective: float = 0.0
    latency: float = 0.0


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where it was measured. Without known nodes every rank counts as a node."""

    nodes: int
    ranks_per_node: int
    backend: str = "gloo"
    rate: str = ""
    device: str = "cpu"

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One job on one cluster.

    group_overhead  seconds of processor time that the engine spends on a group beside the codec's work
    native_seconds  a step of plain DDP, without a hook; 0: not measured
    fit             how many times the seconds of `links`, which were measured alone, a byte takes beside a computation
    """

    version: int
    fingerprint: str
    model: str
    cluster: Cluster
    forward: float
    backward: float
    optimizer: float
    tensors: tuple[Tensor, ...]
    links: tuple[Link, ...]
    codecs: tuple[CodecCost, ...]
    contention: Contention = Contention()
    group_overhead: float = 0.0
    native_seconds: float = 0.0
    fit: float = 1.0
    remarks: tuple[str, ...] = ()

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read and check a file; a `ProfileError` says which field is wrong."""
        profile = load_struct(path, Profile, "profile", ProfileError)
        profile.check(str(path))
        return profile

    def save(self, path: str | Path) -> None:
        self.check("the profile to be saved")
        save_struct(path, self)

    @property
    def compute(self) -> float:
        """A step without communication."""
        return self.forward + self.backward + self.optimizer

    def link(self, collective: Collective, scope: Scope) -> Link:
        for link in self.links:
            if (link.collective, link.scope) == (collective, scope):
                return link
        known = ", ".join(f"{link.collective} {link.scope}" for link in self.links) or "none"
        raise ProfileError(f"the profile has no link {collective} {scope}; it has: {known}")

    def check(self, where: str = "the profile") -> None:
        """Refuse what no measurement can give."""

        def refuse(problem: str) -> None:
            raise ProfileError(f"{where}: {problem}")

        if self.version != VERSION:
            refuse(f"version {self.version}, this thinwire reads {VERSION}")
        if not self.tensors:
            refuse("it has no tensors")
        _check_numbers(self, where)
        if self.fit == 0:
            refuse("fit is 0: a byte takes some time")
        if self.cluster.nodes < 1 or self.cluster.ranks_per_node < 1:
            refuse(f"a cluster of {self.cluster.nodes} nodes with {self.cluster.ranks_per_node} ranks each")
        before, seen = 0.0, set()
        for tensor in self.tensors:
            if tensor.name in seen:
                refuse(f"tensor {tensor.name!r} stands there twice")
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
    """Of the names, sizes and dtypes in any order, the number of nodes and of ranks on each."""
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


def _check_numbers(profile: Profile, where: str) -> None:
    """No number of a profile is negative or not finite, save what a line starts at."""
    for path, value in _numbers(msgspec.to_builtins(profile), ""):
        if not math.isfinite(value) or (value < 0 and not path.endswith(".start")):
            raise ProfileError(f"{where}: {path[1:]} is {value}")


def _numbers(value: Any, path: str) -> Iterable[tuple[str, float]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(part, f"{path}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, part in enumerate(value):
            yield from _numbers(part, f"{path}[{index}]")
    elif isinstance(value, int | float):
        yield path, value
