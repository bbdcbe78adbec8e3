"""Run-time state of a chain: the tensor or messages of one rank, and buffers kept between steps."""

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..codecs import CodecState
from ..codecs.driver import Capacity, CodecDriver, ResidualPart
from ..comm.collectives import Collective, Place, Scope
from ..messages import HEADER_BYTES, Flag
from .partition import Partition, Range
from .tree import Op

Steps: TypeAlias = Generator[Collective, None, None]

NAN = float("nan")


@dataclass(frozen=True)
class Stage:
    """One operation of a chain, with the state of the rank before and after it.

    `position` is the Comp that produced the messages. `note` lists the Comps whose wanted bytes are appended to every message
    of this operation, four bytes each: see `chain.py`.
    """

    number: int
    op: Op
    before: Partition
    after: Partition
    place: Place
    position: int = -1
    note: tuple[int, ...] = ()
    last: bool = False

    @property
    def scope(self) -> Scope:
        assert self.op.scope is not None
        return self.op.scope

    @cached_property
    def count(self) -> int:
        return self.place.count(self.scope)

    @cached_property
    def pieces(self) -> list[Range]:
        """Ranges of the messages before it."""
        return self.before.pieces

    @property
    def takes_part(self) -> bool:
        """Whether this rank takes part: it holds something before or after."""
        return self.before.holder or self.after.holder


@dataclass
class Piece:
    """The range of one message of a Comp, and the codec state for it."""

    range: Range
    state: CodecState


@dataclass
class Position:
    """One Comp of a chain: its messages on this rank, and the bytes that all ranks wanted."""

    range: Range
    residual: ResidualPart
    pieces: list[Piece]
    count: int
    capacity: Capacity | None
    talk: CodecDriver | None = None
    buffer: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    wanted: int = -1
    entries: int = 0

    def make_room(self) -> Tensor:
        """Buffers for the messages of this step, uint8 [1, pieces, capacity]."""
        assert self.capacity is not None
        size = self.capacity.value
        if self.buffer.numel() < size * self.count:
            self.buffer = torch.zeros(size * self.count, dtype=torch.uint8)
        rows = self.buffer[: size * self.count].view(1, self.count, size)
        for row, piece in zip(rows[0], self.pieces, strict=True):
            piece.state.outgoing = row
        return rows


@dataclass
class ChainRuntime:
    """Data between stages: `tensor` is float32 [range.size], `messages` uint8 [sources, pieces, capacity]."""

    target: Tensor
    tensor: Tensor | None = None
    messages: Tensor | None = None
    capacity: int = 0
    wanted: list[int] = field(default_factory=list)
    finite: bool = True
    memory: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def room(self, stage: Stage, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer of one stage, kept between steps; grows rarely."""
        held = self.memory.get((stage.number, name))
        if held is None or held.numel() < count or held.dtype != dtype:
            held = self.memory[stage.number, name] = torch.empty(count, dtype=dtype, device=self.target.device)
        return held[:count]

    def result_room(self, stage: Stage, count: int) -> Tensor:
        """Output buffer of a stage for `count` floats: the gradient itself if the stage is the last and they fit."""
        if stage.last and count == self.target.numel():
            return self.target
        return self.room(stage, "result", count, torch.float32)

    def padded(self, stage: Stage, size: int) -> Tensor:
        """The tensor, zero-padded to `size` elements."""
        assert self.tensor is not None
        elements = stage.before.range.elements
        if self.tensor.numel() >= size and elements == size:
            return self.tensor[:size]
        whole = self.room(stage, "padded", size, torch.float32)
        whole[:elements] = self.tensor[:elements]
        whole[elements:] = 0.0
        return whole

    def with_note(self, stage: Stage, payload: Tensor) -> Tensor:
        """What a rank sends in a second step: its payload and the wanted bytes of earlier messages."""
        if not stage.note:
            return payload
        words = np.array([self.wanted[position] for position in stage.note], "<i4")
        flat = payload.contiguous().view(-1).view(torch.uint8)
        whole = self.room(stage, "noted", flat.numel() + words.nbytes, torch.uint8)
        whole[: flat.numel()] = flat
        whole[flat.numel() :] = torch.from_numpy(words.view(np.uint8)).to(whole.device)
        return whole

    def read_notes(self, stage: Stage, rows: Tensor) -> Tensor:
        """Strip and read the notes of what was received, uint8 [ranks, bytes]; returns the payloads."""
        if not stage.note:
            return rows
        size = rows.shape[1] - 4 * len(stage.note)
        words = np.ascontiguousarray(rows[:, size:].cpu().numpy()).view("<i4")
        for column, position in enumerate(stage.note):
            self.wanted[position] = max(self.wanted[position], int(words[:, column].max()))
        return rows[:, :size]

    def bundle(self, stage: Stage) -> Tensor:
        """The messages in contiguous memory, flat."""
        assert self.messages is not None
        if self.messages.is_contiguous():
            return self.messages.view(-1)
        whole = self.room(stage, "bundle", self.messages.numel(), torch.uint8)
        whole.view(self.messages.shape).copy_(self.messages)
        return whole

    def read_headers(self, position: int) -> None:
        """Read wanted bytes and the NONFINITE flag from the headers of all messages held."""
        assert self.messages is not None
        headers = self.messages[..., :HEADER_BYTES].contiguous().cpu().numpy().reshape(-1, HEADER_BYTES).view("<u4")
        if headers.size:
            self.wanted[position] = max(
                self.wanted[position], int(headers[:, 2].astype(np.int64).clip(0, 2**31 - 1).max())
            )
            self.finite &= not bool((headers[:, 0] >> 16 & Flag.NONFINITE).any())


def idle(_: ChainRuntime, stage: Stage) -> Steps:
    """This rank waits while others exchange."""
    yield Collective("idle", torch.empty(0, dtype=torch.uint8), scope=stage.scope)
