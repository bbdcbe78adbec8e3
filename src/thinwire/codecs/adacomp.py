"""AdaComp: each bin of elements selects by its own maximum and sends signs with a shared scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels, ranges
from ..errors import MessageCoding, MessageCount, MessageIndex, MessageLength
from ..messages import HEADER_BYTES, Flag, Header, IndexCoding, ValueCoding, read_header, write_header
from .base import CodecState, Estimate, GatheredCodec, GroupInfo, Message, ParameterInfo

SMALL_BIN = 63  # bins up to this length have words of 8 bits
LARGEST_BIN = 16383
_TABLE = 3  # uint32 a segment: first bin, bins, words


@dataclass
class Segment:
    """One tensor of a group: its bins, and scratch memory for encoding."""

    parameter: ParameterInfo
    bin_length: int
    bins: int
    tiles: int
    words: NDArray[Any]
    offsets: NDArray[np.uint32]
    maxima: NDArray[np.float64]
    means: NDArray[np.float32]
    written: int = 0

    def of(self, flat: NDArray[np.float32]) -> NDArray[np.float32]:
        return flat[self.parameter.offset : self.parameter.offset + self.parameter.elements]


@dataclass
class AdaCompState(CodecState):
    segments: list[Segment] = field(default_factory=list)
    fixed: int = HEADER_BYTES
    """Bytes of a message without its words."""


@dataclass(frozen=True)
class AdaComp(GatheredCodec):
    """Each bin of consecutive elements sends those that its latest gradient pushes to the bin's maximum.

    An element is sent when |residual + factor * gradient| reaches the largest |residual + gradient| of its bin, as a sign
    times a scale. There is no density to choose: about five elements per bin are sent in the long run.

    bin_conv    bin length of convolutions: words of 8 bits, about 40 times smaller than fp32
    bin_dense   bin length of all other layers: words of 16 bits, about 170 times smaller
    scale       tile: one scale for every 4050 or 16000 elements, the mean of their bins' maxima; layer: one for the whole
                tensor, as in the paper. Bins of small values overshoot with a scale of the whole layer and oscillate:
                residuals there were 13 to 18 times the gradient, 1.5 to 1.6 with a scale per tile (`docs/codecs.md`).

    Bytes: 8 or 16 bits for each element sent, gathered; never more than a quarter or half of fp32.  Memory passes: one,
    with two loops per bin in the cache, and the cache lines of the elements sent.
    Source: Chen et al. 2018, "AdaComp"; see `docs/methods/adacomp.md`.
    """

    bin_conv: int = 50
    bin_dense: int = 500
    factor: float = 2.0
    scale: str = "tile"

    def __post_init__(self) -> None:
        for name in ("bin_conv", "bin_dense"):
            length = getattr(self, name)
            if not isinstance(length, int) or not 1 <= length <= LARGEST_BIN:
                raise ValueError(f"{name} must be a whole number from 1 to {LARGEST_BIN}, not {length!r}")
        ranges.number("factor", self.factor, 1.0)
        if self.scale not in ("tile", "layer"):
            raise ValueError(f"scale must be 'tile' or 'layer', not {self.scale!r}")

    def bin_length(self, parameter: ParameterInfo) -> int:
        return self.bin_conv if parameter.kind == "conv" else self.bin_dense

    def start(self, group: GroupInfo, rank: int, world: int) -> AdaCompState:
        segments = []
        for parameter in group.parameters:
            length, bins, tiles = self._cut(parameter)
            words = np.empty(parameter.elements, np.uint8 if length <= SMALL_BIN else np.uint16)
            offsets, maxima, means = np.zeros(tiles, np.uint32), np.zeros(tiles), np.zeros(tiles, np.float32)
            segments.append(Segment(parameter, length, bins, tiles, words, offsets, maxima, means))
        return AdaCompState(group, rank, world, segments=segments, fixed=self._fixed(group))

    def _fixed(self, group: GroupInfo) -> int:
        scales = [self._cut(parameter)[2] if self.scale == "tile" else 1 for parameter in group.parameters]
        return HEADER_BYTES + 4 * sum(_TABLE + count for count in scales)

    def _cut(self, parameter: ParameterInfo) -> tuple[int, int, int]:
        """Bin length, bins and tiles of a tensor."""
        length = self.bin_length(parameter)
        bins = -(-parameter.elements // length)
        return length, bins, -(-bins // kernels.adacomp.tile_bins(length))

    # -- encode -------------------------------------------------------------------------------------------------------

    def encode(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Message:
        assert isinstance(state, AdaCompState)
        new, old, segments = gradient.numpy(), residual.numpy(), state.segments

        def encode(place: int, _: int) -> bool:
            segment = segments[place]
            finite, segment.written = kernels.adacomp.encode_segment(
                segment.of(new),
                segment.of(old),
                segment.bin_length,
                float(self.factor),
                segment.words,
                segment.offsets,
                segment.maxima,
                segment.means,
            )
            return finite

        finite = all(kernels.sliced.each([(place, place + 1) for place in range(len(segments))], encode))
        buffer = state.outgoing.numpy()
        if not finite:
            write_header(buffer, Header(IndexCoding.OPAQUE, ValueCoding.NONE, Flag.NONFINITE, 0, 0, 0))
            return Message(HEADER_BYTES)
        wanted = state.fixed + sum(_even(s.written * s.words.itemsize) for s in state.segments)
        size, entries = self._write(buffer, state)
        flags = Flag.CUT if size < wanted else Flag(0)
        write_header(buffer, Header(IndexCoding.OPAQUE, ValueCoding.NONE, flags, entries, wanted, size - HEADER_BYTES))
        self._add([buffer], old, -1.0, state)
        return Message(size)

    def _write(self, buffer: NDArray[np.uint8], state: AdaCompState) -> tuple[int, int]:
        """Table, scales and words, of as many segments as fit; the first segment rotates with the step."""
        count = len(state.segments)
        table = buffer[HEADER_BYTES : HEADER_BYTES + 4 * _TABLE * count].view("<u4").reshape(count, _TABLE)
        table[:] = 0
        at = HEADER_BYTES + 4 * _TABLE * count
        for segment in state.segments:
            scales = self._scales(segment)
            buffer[at : at + 4 * scales.size].view("<f4")[:] = scales
            at += 4 * scales.size
        room, entries = buffer.size - at, 0
        pieces: dict[int, NDArray[Any]] = {}
        for turn in range(count):
            place = (state.step + turn) % count
            segment = state.segments[place]
            size = _even(segment.written * segment.words.itemsize)
            if size <= room:
                first, bins, words = 0, segment.bins, segment.words[: segment.written]
            else:
                words = np.empty(max(room, 0) // segment.words.itemsize, segment.words.dtype)
                first = state.step * 7919 % max(segment.bins, 1)
                bins, written = kernels.adacomp.cut_segment(
                    segment.words, segment.offsets, segment.bins, segment.bin_length, first, words.size, words
                )
                words = words[:written]
            table[place] = (first, bins, words.size)
            pieces[place] = words
            room -= _even(words.nbytes)
            entries += words.size
        for place in range(count):
            raw = pieces[place].view(np.uint8)
            buffer[at : at + raw.size] = raw
            at += _even(raw.size)
        return at, entries

    def _scales(self, segment: Segment) -> NDArray[np.float32]:
        if self.scale == "layer":
            return np.array([kernels.adacomp.layer_scale(segment.maxima, segment.bins)], np.float32)
        tile = kernels.adacomp.tile_bins(segment.bin_length)
        bins = np.full(segment.tiles, tile, np.float64)
        if segment.tiles:
            bins[-1] = segment.bins - tile * (segment.tiles - 1)
        return (segment.maxima / bins).astype(np.float32)

    # -- decode -------------------------------------------------------------------------------------------------------

    def decode(self, messages: Sequence[Tensor], out: Tensor, scale: float, state: CodecState) -> None:
        assert isinstance(state, AdaCompState)
        self._add([message.numpy() for message in messages], out.numpy(), scale, state)

    def write(self, messages: Sequence[Tensor], out: Tensor, scale: float, state: CodecState) -> None:
        """All ranks tile by tile, so that each tile is written once, while it is in the cache."""
        assert isinstance(state, AdaCompState)
        flat = out.numpy()
        parts = [list(self._read(message.numpy(), state)) for message in messages]
        if not all(parts):  # a message without words: some gradient was not finite, the step is void
            super().write(messages, out, scale, state)
            return
        if sum(parameter.elements for parameter in state.group.parameters) < out.numel():
            kernels.sliced.clear(flat)  # gaps between parameters
        tensors = list(zip(*parts, strict=True))

        def decode(place: int, _: int) -> None:
            ranks = tensors[place]
            segment = ranks[0][0]
            words = np.concatenate([part[4] for part in ranks])
            ends = np.cumsum([0, *(part[4].size for part in ranks)])
            firsts, bins = (np.array([part[i] for part in ranks], np.int64) for i in (1, 2))
            code, rank = kernels.adacomp.decode_all(
                words, ends[:-1], ends[1:], segment.bin_length, np.stack([part[3] for part in ranks]),
                segment.of(flat), scale, firsts, bins,
            )  # fmt: skip
            if code:
                name = segment.parameter.name
                raise MessageIndex(f"the words of {name!r} from rank {rank} are malformed (code {code})")

        kernels.sliced.each([(place, place + 1) for place in range(len(tensors))], decode)

    def _add(
        self, messages: Sequence[NDArray[np.uint8]], out: NDArray[np.float32], scale: float, state: AdaCompState
    ) -> None:
        for message in messages:
            for segment, first, bins, scales, words in self._read(message, state):
                code = kernels.adacomp.decode_segment(
                    words, segment.bin_length, scales, segment.of(out), scale, first, bins
                )
                if code:
                    raise MessageIndex(f"the words of {segment.parameter.name!r} are malformed (code {code})")

    def _read(
        self, message: NDArray[np.uint8], state: AdaCompState
    ) -> Iterator[tuple[Segment, int, int, NDArray[np.float32], NDArray[Any]]]:
        header = read_header(message)
        if header.index != IndexCoding.OPAQUE or header.values != ValueCoding.NONE:
            raise MessageCoding(f"coding: an AdaComp message is opaque, not {header.index.name}/{header.values.name}")
        if header.flags & Flag.NONFINITE:
            return
        count = len(state.segments)
        size = HEADER_BYTES + header.payload
        if size < state.fixed:
            raise MessageLength(
                f"payload: {header.payload} bytes are less than the {state.fixed - HEADER_BYTES} of the table"
            )
        table = message[HEADER_BYTES : HEADER_BYTES + 4 * _TABLE * count].copy().view("<u4")
        at, scales_at = state.fixed, HEADER_BYTES + 4 * _TABLE * count
        if int(table.reshape(count, _TABLE)[:, 2].sum()) != header.entries:
            raise MessageCount(f"entries: the header says {header.entries}, the table a different number")
        for segment, (first, bins, words) in zip(state.segments, table.reshape(count, _TABLE).tolist(), strict=True):
            tiles = segment.tiles if self.scale == "tile" else 1
            scales = message[scales_at : scales_at + 4 * tiles].copy().view("<f4")
            scales_at += 4 * tiles
            length = words * segment.words.itemsize
            if at + length > size:
                raise MessageLength(f"payload: the words of {segment.parameter.name!r} reach past its end")
            raw = message[at : at + length]
            typed = raw if segment.words.itemsize == 1 else raw.copy().view("<u2")
            yield segment, first, bins, scales, typed
            at += _even(length)

    def smallest_capacity(self, group: GroupInfo) -> int:
        return self._fixed(group) + 64

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        size = self._fixed(group)
        for parameter in group.parameters:
            length, bins, _ = self._cut(parameter)
            size += (1 if length <= SMALL_BIN else 2) * 5 * bins
        return Estimate(gathered=size, passes=4.0)


def _even(size: int) -> int:
    return size + size % 2
