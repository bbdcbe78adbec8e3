"""Options to exchange a tensor of a given size, reduced to the Pareto-optimal ones.

An option affects other tensors only through its four durations (see `side_stream`), so options that are not better than
another in any of them are dropped: of 4341 leaves, one to about a dozen remain per size.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..chains import tree
from ..chains.tree import Leaf
from ..errors import PlanError
from ..kernels.cpu._jit import Doubles, Offsets, kernel
from .costs import GpuCodec, programs, vectors
from .network import Network
from .side_stream import CPU, GPU, LEAD, SER

EQUAL = 1 + 1e-14


@dataclass(frozen=True, slots=True)
class Option:
    """A leaf, and the codec of its compressions (None if there are none)."""

    leaf: Leaf
    codec: GpuCodec | None

    def __str__(self) -> str:
        return f"{self.codec.name} via {self.leaf}" if self.codec is not None else str(self.leaf)


@dataclass(slots=True)
class Table:
    """The Pareto-optimal options of several sizes: rows offsets[i] to offsets[i + 1] belong to size i."""

    offsets: Offsets
    ids: Offsets
    vector: Doubles

    def rows(self, size: int) -> range:
        return range(self.offsets[size], self.offsets[size + 1])


class Menu:
    """All options on a network, by number; those without compression come first.

    cpu               codecs may also run on the CPU
    max_compressions  most compressions along a chain
    """

    def __init__(
        self, codecs: Sequence[GpuCodec], network: Network, *, cpu: bool = True, max_compressions: int = 4
    ) -> None:
        if max_compressions < 0:
            raise PlanError(f"max_compressions must be at least 0, not {max_compressions}")
        self.network = network
        self.options: list[Option] = []
        self._parts: list[tuple[GpuCodec | None, NDArray[np.int8], Offsets]] = []
        self._add(None, _leaves("dense", 1))
        for codec in codecs:
            found = _leaves("summed" if codec.summed else "gathered", 2 if cpu else 1)
            self._add(codec, tuple(leaf for leaf in found if leaf.compressions <= max_compressions))
        self.dense = len(_leaves("dense", 1))

    def _add(self, codec: GpuCodec | None, leaves: tuple[Leaf, ...]) -> None:
        self.options += [Option(leaf, codec) for leaf in leaves]
        self._parts.append((codec, *_programs(leaves)))

    def vectors(self, sizes: Doubles, only: Offsets | None = None) -> Doubles:
        """[options, sizes, 4]; with `only`, of these options in ascending order."""
        found, start = [], 0
        for codec, codes, lengths in self._parts:
            stop = start + len(lengths)
            if only is not None:
                chosen = only[(only >= start) & (only < stop)] - start
                codes, lengths = codes[chosen], lengths[chosen]
            found.append(vectors(codes, lengths, sizes, codec, self.network))
            start = stop
        return np.concatenate(found)

    def table(self, sizes: Sequence[float] | Doubles, only: Offsets | None = None) -> Table:
        """The Pareto-optimal options of each size."""
        values = np.asarray(sizes, np.float64)
        found = self.vectors(values, only)
        ids = np.arange(len(self.options)) if only is None else only
        offsets = np.zeros(len(values) + 1, np.int64)
        kept = np.zeros((len(values), found.shape[0]), np.int64)
        _undominated(found, offsets, kept)
        rows = np.concatenate([kept[i, : offsets[i + 1]] for i in range(len(values))])
        owner = np.repeat(np.arange(len(values)), offsets[1:])
        return Table(np.cumsum(offsets), ids[rows], np.ascontiguousarray(found[rows, owner]))

    def candidates(self, low: float, high: float, points: int = 48) -> Offsets:
        """The options that are Pareto-optimal for some size in a range."""
        grid = np.geomspace(max(low, 1.0), max(high, 2.0), points)
        return np.unique(self.table(grid).ids)

    @functools.cached_property
    def gpu_only(self) -> Offsets:
        """The options that do not use the CPU."""
        return np.flatnonzero([all(op.device != "cpu" for op in option.leaf.ops) for option in self.options])

    @functools.cached_property
    def on_cpu(self) -> dict[int, int]:
        """Maps options that do not use the CPU to the same chain with all codec work on the CPU."""
        numbers = {(option.codec, str(option.leaf)): index for index, option in enumerate(self.options)}
        found = {}
        for (codec, chain), index in numbers.items():
            moved = " ".join(f"{word}@cpu" if word in ("comp", "dec") else word for word in chain.split())
            if "@cpu" not in chain and (codec, moved) in numbers:
                found[index] = numbers[codec, moved]
        return found


@functools.cache
def _leaves(kind: str, devices: int) -> tuple[Leaf, ...]:
    if kind == "summed":
        found = [leaf for leaf in tree.full(devices) if leaf.summed]
    else:
        found = [leaf for leaf in tree.espresso(devices) if (leaf.compressions == 0) == (kind == "dense")]
    return tuple(sorted(found, key=lambda leaf: leaf.compressions))


@functools.cache
def _programs(leaves: tuple[Leaf, ...]) -> tuple[NDArray[np.int8], Offsets]:
    return programs(list(leaves))


@kernel
def _undominated(vector, counts, kept):  # type: ignore[no-untyped-def]
    """The Pareto-optimal options of vector [options, sizes, 4], by size: kept[size, : counts[size + 1]]."""
    for size in range(vector.shape[1]):
        count = 0
        for option in range(vector.shape[0]):
            new = vector[option, size]
            beaten = False
            for at in range(count):
                if _beats(vector[kept[size, at], size], new):
                    beaten = True
                    break
            if beaten:
                continue
            left = 0
            for at in range(count):
                if not _beats(new, vector[kept[size, at], size]):
                    kept[size, left] = kept[size, at]
                    left += 1
            kept[size, left] = option
            count = left + 1
        counts[size + 1] = count


@kernel
def _beats(one, other):  # type: ignore[no-untyped-def]
    """Whether `one` is at least as good in every state. A lead on the GPU never waits for the CPU.

    Differences within rounding, as between an all-reduce and its two halves, count as equal.
    """
    if one[GPU] > other[GPU] * EQUAL or one[SER] > other[SER] * EQUAL:
        return False
    if one[CPU] == 0.0:
        return one[LEAD] <= other[LEAD] + other[CPU]
    return one[LEAD] <= other[LEAD] and one[CPU] <= other[CPU]
