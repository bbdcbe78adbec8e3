"""MiCRO: each rank selects in its own partition of the vector, by one threshold controlled towards the target density."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels, messages
from ..errors import MessageCount
from ..messages import HEADER_BYTES, Flag, ValueCoding, read_header
from .base import Codec, CodecState, Estimate, Gather, GroupInfo, Message, Steps, Sum
from .micro_state import MicroState
from .schedule import Warmup, check_density
from .sparse import VALUE_CODINGS, check_momentum

CONTROLLERS = ("proportional", "fixed", "paper_code")
BLOCKS = 1024
BINS = 2048
_SHIFT = 20  # 8 exponent and 3 mantissa bits: 8 bins an octave
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_HURRY_STEPS, _HURRY, _CALM, _LARGEST_MOVE = 50, 0.25, 0.1, 1.5
_LARGEST_WORD = 2**32 - 1
_SAMPLE = 8192
_HEADROOM = 1.05  # with balance, what messages have room for, relative to the average rank


@dataclass(frozen=True)
class MiCRO(Codec):
    """Rotating partitions, one threshold, no build-up: traffic stays at the target however many ranks there are.

    In step t rank r examines partition (t + r) mod n of its accumulated gradient: what reaches the threshold is selected for
    all ranks. Indices are all-gathered, relative to the partition and Rice-coded; then the values of every rank at all of
    them are all-reduced. The first step is dense and yields the initial threshold.

    controller  proportional: threshold *= (selected / target) ** 0.25 for 50 steps, then ** 0.1, at most a factor of 1.5
                per step;
                fixed: the paper's dead band as described; paper_code: as in its code, 4 to 8 % below the target
    start_from  quantile: of the magnitudes of the first gradient on all ranks; formula: 1 / (2 sqrt(k)), as in the code
    threshold   global: one for all groups, as in the paper; layer: one per tensor, each controlled towards the density
    balance     move the borders of the partitions so that all ranks select equally (the aim of ExDyna), and agree on
                messages with room for 1.05 times a rank's share, because gathered messages are padded to the longest.
                A rank that selects more sends the largest that fit
    values      dtype of the sum: bf16 or fp16, whose rounding error stays in the residual, or fp32, as in the paper
    momentum    above 0: momentum correction and factor masking, see `SparseCodec`; the optimizer's momentum must be 0

    Bytes: log2(1/density) + 1.5 bits per index, all-gathered, 2 bytes per value, all-reduced.  Memory passes: accumulation
    with selection in 1/n of it, the cache lines of the elements taken, and one write pass for the result.
    See `docs/methods/micro.md`.
    """

    density: float | Warmup = 0.01
    controller: str = "proportional"
    start_from: str = "quantile"
    threshold: str = "global"
    balance: bool = True
    values: str = "bf16"
    momentum: float = 0.0

    rounds: ClassVar[int] = 2
    rides: ClassVar[bool] = True
    adjustable: ClassVar[tuple[str, ...]] = ("density",)

    def __post_init__(self) -> None:
        check_density(self.density)
        check_momentum(self.momentum)
        for name, value, allowed in (
            ("controller", self.controller, CONTROLLERS),
            ("start_from", self.start_from, ("quantile", "formula")),
            ("threshold", self.threshold, ("global", "layer")),
            ("values", self.values, tuple(VALUE_CODINGS)),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")

    def start(self, group: GroupInfo, rank: int, world: int) -> MicroState:
        count = len(group.parameters) if self.threshold == "layer" else 1
        ends = [parameter.offset + parameter.elements for parameter in group.parameters]
        size, rest = divmod(group.elements, world)
        sizes = [size + (part < rest) for part in range(world)]
        return MicroState(
            group,
            rank,
            world,
            thresholds=np.zeros(count),
            floors=np.zeros(count),
            borders=np.cumsum([0, *sizes], dtype=np.int64),
            weights=np.zeros(BLOCKS),
            ends=np.array(ends if self.threshold == "layer" else [group.elements], np.int64),
            histogram=torch.zeros(count * BINS),
            velocity=torch.zeros(group.elements if self.momentum else 0),
            coming=torch.zeros(group.elements if self.momentum else 0),
        )

    def sent(self, entries: int, state: CodecState) -> int:
        assert isinstance(state, MicroState)
        return state.count  # all ranks send their values at the indices that any of them selected

    # -- one step ------------------------------------------------------------------------------------------------------

    def exchange(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Steps:
        assert isinstance(state, MicroState)
        steps = self._sparse if state.steps else self._dense
        return steps(gradient, residual, state)

    def _dense(self, gradient: Tensor, residual: Tensor, state: MicroState) -> Steps:
        """The first step: everything is sent, with the histogram of magnitudes that the thresholds start from."""
        flat, elements = residual.numpy(), residual.numel()
        finite = kernels.sliced.accumulate(flat, gradient.numpy())
        counts = np.zeros(BINS, np.int64)
        for i, (begin, end) in enumerate(self._segments(state)):
            kernels.laplace.histogram(flat[begin:end], 0, _SHIFT, counts)
            state.histogram[i * BINS : (i + 1) * BINS] = torch.from_numpy(counts)
        state.support = np.arange(elements, dtype=np.int32)
        state.count, state.wanted = elements, elements
        state.taken = flat.copy()
        buffer = torch.zeros(elements + state.group.tail)
        buffer[:elements] = residual
        residual.zero_()
        yield Sum(buffer, tail=True, finite=finite)
        torch.mul(buffer[:elements], 1.0 / state.world, out=gradient)
        yield Sum(state.histogram)

    def _segments(self, state: MicroState) -> list[tuple[int, int]]:
        if self.threshold == "layer":
            return [(parameter.offset, parameter.offset + parameter.elements) for parameter in state.group.parameters]
        return [(0, state.group.elements)]

    def _sparse(self, gradient: Tensor, residual: Tensor, state: MicroState) -> Steps:
        flat, step, world = residual.numpy(), state.step, state.world
        part = (step + state.rank) % world
        begin, end = int(state.borders[part]), int(state.borders[part + 1])
        room = min(end - begin, 8 * self._target(state.group.elements) // world + 4096)
        if state.chosen.size < room:
            state.chosen = np.empty(room, np.int32)
        new = gradient
        if self.momentum:
            new = torch.add(gradient, state.velocity, alpha=self.momentum, out=state.coming)
        passes = kernels.micro if kernels.sliced.pool is None else kernels.sliced
        thresholds = self._thresholds(state)
        finite, wanted, written = passes.accumulate_select_segments(
            flat, new.numpy(), begin, end, state.ends, thresholds, state.chosen[:room]
        )
        chosen = state.chosen[:written]

        def scores(indices: NDArray[np.int32]) -> NDArray[np.float32]:
            return self._scores(flat, indices + np.int32(begin), thresholds, state)

        if finite and wanted > written:
            # The list is full of the first ones, which is no reason to send them.
            every = np.arange(end - begin, dtype=np.int32)
            magnitudes = scores(every) if thresholds.size > 1 else np.abs(flat[begin:end])
            chosen = _largest(every, magnitudes, written)
        size = _pack(chosen, scores, wanted, end - begin, state.outgoing.numpy(), finite=finite)
        answers = yield Gather(Message(size))
        self._read(answers, state)
        support, values = state.support[: state.count], state.taken[: state.count]
        total = self._sum_buffer(state)
        if self.momentum:
            state.coming.numpy()[support] = 0.0
        if self.values == "fp32":
            kernels.basic.take(flat, support, values)
            total[: state.count] = torch.from_numpy(values)
        else:
            # Clipped so that the sum over ranks fits: an overflow would make this step void, and every later one.
            limit = 0.99 * torch.finfo(total.dtype).max / world
            words = total.view(torch.int16).numpy().view(np.uint16)
            kernels.coding.take_rounded(flat, support, int(VALUE_CODINGS[self.values]), limit, words, values)
        yield Sum(total, tail=True)
        kernels.basic.write_at(gradient.numpy(), support, total[: state.count].float().numpy(), 1.0 / world)

    def _thresholds(self, state: MicroState) -> NDArray[np.float32]:
        if self._share >= 1.0:
            return np.zeros(state.thresholds.size, np.float32)  # all non-zeros
        return state.thresholds.astype(np.float32)

    def _scores(
        self, flat: NDArray[np.float32], places: NDArray[np.int32], thresholds: NDArray[np.float32], state: MicroState
    ) -> NDArray[np.float32]:
        """What the largest are chosen by: magnitudes, or their ratios to the thresholds of the layers."""
        magnitudes = np.abs(flat[places])
        if thresholds.size > 1:
            layers = np.searchsorted(state.ends[:-1], places, side="right")
            magnitudes /= np.maximum(thresholds[layers], np.finfo(np.float32).tiny)
        return magnitudes

    def request(self, headers: NDArray[np.uint32], state: CodecState) -> int:
        assert isinstance(state, MicroState)
        share = max(state.usual, self._target(state.group.elements)) / state.world
        return _request(headers, math.ceil(_HEADROOM * share) if self.balance else None)

    def _read(self, answers: Sequence[Tensor], state: MicroState) -> None:
        """Concatenate the selections of all ranks by partition, so that indices ascend."""
        world, step = state.world, state.step
        headers = [read_header(answer.numpy()) for answer in answers]
        for rank, header in enumerate(headers):  # before anything is allocated for them
            part = (step + rank) % world
            size = int(state.borders[part + 1] - state.borders[part])
            if header.entries > size:
                raise MessageCount(
                    f"entries: found {header.entries} from rank {rank}, its partition has {size} elements"
                )
        total = sum([header.entries for header in headers])
        if total > state.support.size or state.support.size > 4 * max(total, 1024):
            state.support = np.empty(total + total // 4, np.int32)
            state.taken = np.empty(state.support.size, np.float32)
        state.sent_before, state.wanted_before = np.zeros((2, world + 1), np.int64)
        at, most = 0, 0
        for part in range(world):
            rank = (part - step) % world
            begin, size = int(state.borders[part]), int(state.borders[part + 1] - state.borders[part])
            header = headers[rank]
            indices = state.support[at : at + header.entries]
            messages.decode_indices(answers[rank].numpy(), size, indices)
            indices += np.int32(begin)
            at += header.entries
            wanted = min(_selected(header.entries, header.wanted, header.payload), size)
            most = max(most, wanted)
            state.sent_before[part + 1] = at
            state.wanted_before[part + 1] = state.wanted_before[part] + wanted
        state.count, state.wanted = at, int(state.wanted_before[-1])
        state.imbalance = world * most / state.wanted if state.wanted else 1.0

    def _sum_buffer(self, state: MicroState) -> Tensor:
        tail = state.group.tail if self.values == "fp32" else 0
        dtype = _DTYPES[self.values]
        if state.buffer.numel() < state.count + tail or state.buffer.dtype != dtype:
            state.buffer = torch.zeros((state.count + tail) * 5 // 4, dtype=dtype)
        return state.buffer[: state.count + tail]

    def undo(self, residual: Tensor, state: CodecState) -> None:
        assert isinstance(state, MicroState)
        kernels.basic.put_back(residual.numpy(), state.support[: state.count], state.taken[: state.count])

    # -- between steps -------------------------------------------------------------------------------------------------

    def commit(self, states: Sequence[CodecState]) -> None:
        mine = [state for state in states if isinstance(state, MicroState)]
        if mine and mine[0].steps == 0:
            self._first_thresholds(mine)
        elif self.threshold == "global":
            factor = self._factor(sum([state.wanted for state in mine]), self._target_of(mine), mine[0].steps)
            for state in mine:
                state.thresholds = np.maximum(state.thresholds * factor, state.floors)
        else:
            for state in mine:
                self._move_layers(state)
        for state in mine:
            if self.balance and state.steps:
                self._rebalance(state)
            state.steps += 1
            # The first step sent everything, so none of its velocity remains.
            state.velocity, state.coming = state.coming, state.velocity

    @property
    def _share(self) -> float:
        assert not isinstance(self.density, Warmup)
        return self.density

    def adjusted(self, state: CodecState) -> None:
        assert isinstance(state, MicroState)
        state.steps = min(state.steps, 1)  # lets the threshold move fast again

    def _target(self, elements: int) -> int:
        return max(1, math.floor(self._share * elements))

    def _target_of(self, states: Sequence[MicroState]) -> int:
        return self._target(sum([parameter.elements for state in states for parameter in state.group.parameters]))

    def _first_thresholds(self, states: Sequence[MicroState]) -> None:
        if self.threshold == "layer":
            for state in states:
                for i, parameter in enumerate(state.group.parameters):
                    counts = state.histogram[i * BINS : (i + 1) * BINS].double().numpy()
                    state.thresholds[i] = self._start(counts, state.world, parameter.elements)
        else:
            counts = np.sum([state.histogram.double().numpy() for state in states], axis=0)
            elements = sum(parameter.elements for state in states for parameter in state.group.parameters)
            for state in states:
                state.thresholds[:] = self._start(counts, state.world, elements)
        for state in states:
            state.floors = state.thresholds * 1e-6
            state.taken, state.support, state.count = state.taken[:0].copy(), state.support[:0].copy(), 0
            state.histogram = torch.zeros(0)

    def _start(self, counts: NDArray[np.float64], world: int, elements: int) -> float:
        k = self._target(elements)
        if self.start_from == "formula":
            return 1.0 / (2.0 * math.sqrt(k))
        return quantile(counts, k * world)

    def _factor(self, selected: float, target: int, steps: int) -> float:
        if self._share >= 1.0:
            return 1.0
        ratio = selected / target
        if self.controller == "proportional":
            power = _HURRY if steps <= _HURRY_STEPS else _CALM
            return float(min(_LARGEST_MOVE, max(1.0 / _LARGEST_MOVE, ratio**power)))
        if ratio > 1.1:
            return 1.005
        if self.controller == "paper_code":
            return 1.00125 if ratio > 0.909 else 0.995
        if ratio < 1.0 / 1.1:
            return 0.995
        return 1.00125 if ratio > 1.0 else 0.99875 if ratio < 1.0 else 1.0

    def _move_layers(self, state: MicroState) -> None:
        for i, parameter in enumerate(state.group.parameters):
            first, last = _wanted_until(state, np.array([parameter.offset, parameter.offset + parameter.elements]))
            factor = self._factor(float(last - first), self._target(parameter.elements), state.steps)
            state.thresholds[i] = max(state.thresholds[i] * factor, state.floors[i])

    def _rebalance(self, state: MicroState) -> None:
        """Update the usual count, and move the borders so that all partitions hold equally many selected elements.

        By a slow average over 1024 blocks. ExDyna moves one block per step across a border; this moves all borders at once
        to where its rule converges.
        """
        state.usual += (0.3 if state.count > state.usual else 0.05) * (state.count - state.usual)
        block = -(-state.group.elements // BLOCKS)
        if block < 32:
            return
        edges = np.minimum(np.arange(BLOCKS + 1) * block, state.group.elements)
        counts = np.diff(_wanted_until(state, edges))
        state.weights = 0.95 * state.weights + 0.05 * counts
        smooth = state.weights + 0.05 * max(state.weights.sum(), 1e-9) / BLOCKS
        reached = np.cumsum(smooth) / smooth.sum()
        inner = np.searchsorted(reached, np.arange(1, state.world) / state.world) + 1
        state.borders[1:-1] = np.minimum(inner * block, state.group.elements)

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        elements = sum(parameter.elements for parameter in group.parameters)
        k = self._target(elements) if elements else 0
        part = -(-group.elements // world)
        values = VALUE_CODINGS[self.values].bytes
        return Estimate(
            gathered=messages.expected(part, -(-k // world), ValueCoding.NONE),
            summed=values * k + 4 * (group.tail if self.values == "fp32" else group.tail - 1),
            passes=1.2 + 0.8 / world + 0.6,
        )


def quantile(counts: NDArray[np.float64], k: float) -> float:
    """The magnitude that k of the counted elements reach, from a histogram of their bits, linear within a bin."""
    above = np.cumsum(counts[::-1])[::-1]
    bins = np.flatnonzero(above >= k)
    place = int(bins[-1]) if bins.size else 0
    edges = (np.array([place, place + 1], np.int64) << _SHIFT).astype(np.int32).view(np.float32).astype(np.float64)
    inside = counts[place]
    missing = k - (above[place] - inside)
    share = missing / inside if inside > 0 else 1.0
    low, high = float(edges[0]), float(edges[1])
    return max(high - share * (high - low), float(np.finfo(np.float32).tiny))


# -- messages ----------------------------------------------------------------------------------------------------------


def _wanted_until(state: MicroState, places: NDArray[np.int64]) -> NDArray[np.float64]:
    """How many elements were selected before each place: what did not fit is spread like what was sent."""
    sent = np.searchsorted(state.support[: state.count], places.astype(np.int32))
    until: NDArray[np.float64] = np.interp(sent, state.sent_before, state.wanted_before)
    return until


def _largest(indices: NDArray[np.int32], scores: NDArray[np.float32], count: int) -> NDArray[np.int32]:
    """The `count` indices with the largest scores, in their order; of equal scores the first."""
    if count >= indices.size:
        return indices
    if count <= 0:
        return indices[:0]
    if scores.size >= _SAMPLE:
        # Whatever is below a sample's quantile, lower than what is wanted, cannot be among the largest: no need to sort it.
        sample = scores[:: scores.size // (_SAMPLE // 2)]
        place = sample.size - 64 - count * sample.size * 5 // (4 * scores.size)
        if place > 0:
            near = np.flatnonzero(scores >= np.partition(sample, place)[place])
            if near.size >= count:
                indices, scores = indices[near], scores[near]
    least = np.partition(scores, scores.size - count)[scores.size - count]
    kept = scores > least
    ties = np.flatnonzero(scores == least)
    kept[ties[: count - np.count_nonzero(kept)]] = True
    found: NDArray[np.int32] = indices[kept]
    return found


def _pack(
    indices: NDArray[np.int32],
    scores: Callable[[NDArray[np.int32]], NDArray[np.float32]],
    selected: int,
    elements: int,
    buffer: NDArray[np.uint8],
    *,
    finite: bool,
) -> int:
    """Write a message of as many of the largest entries as fit the buffer; returns its size in bytes.

    indices int32 (k,), ascending within [0, elements), are the largest of `selected` ones. Scores are only asked for where
    something does not fit. The bytes of the uncut message, as the header has them, are those of this one and, for each element
    that is missing, what an entry takes, rounded up: so they tell how many are missing.
    """
    packed = messages.pack(indices, None, elements, buffer, ValueCoding.NONE, finite=finite)
    while finite and packed.entries < indices.size:
        # Entries farther apart take longer codes, so fewer of them may fit than `pack` found in a row.
        indices = _largest(indices, scores(indices), packed.entries)
        packed = messages.pack(indices, None, elements, buffer, ValueCoding.NONE)
    if finite and packed.entries < selected:
        missing = selected - packed.entries
        wanted = packed.size + missing * _bytes_each(packed.entries, packed.size - HEADER_BYTES)
        buffer[:HEADER_BYTES].view("<u2")[1] |= Flag.CUT
        buffer[:HEADER_BYTES].view("<u4")[2] = min(wanted, _LARGEST_WORD)
    return packed.size


def _bytes_each(entries: int, payload: int) -> int:
    return max(1, -(-payload // max(1, entries)))


def _selected(entries: int, wanted: int, payload: int) -> int:
    """How many elements the sender had selected, from the fields of its header."""
    beyond = max(0, wanted - HEADER_BYTES - payload)
    return entries + beyond // _bytes_each(entries, payload)


def _request(headers: NDArray[np.uint32], most: int | None) -> int:
    """Bytes for messages of as many elements as were selected, but of no more than `most`; headers: words [ranks, 4]."""
    longest = HEADER_BYTES
    for _, entries, wanted, payload in headers.tolist():
        count = _selected(entries, wanted, payload)
        if most is not None:
            count = min(count, most)
        longest = max(longest, HEADER_BYTES + -(-payload * count // max(1, entries)))
    return longest
