"""What all sparsifiers with gathered messages share: taking, rounding, packing, and what did not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import messages
from ..messages import ValueCoding
from .base import CodecState, Estimate, GatheredCodec, GroupInfo, Message
from .schedule import Warmup, check_density

VALUE_CODINGS = {"fp32": ValueCoding.FP32, "fp16": ValueCoding.FP16, "bf16": ValueCoding.BF16}


def cut_runs(packed: messages.Packed, entries: int) -> list[tuple[int, int]]:
    """The positions in the list of entries that did not fit, as runs."""
    start, stop = packed.cut_start, packed.cut_stop
    if start <= stop:
        return [(start, stop)] if start < stop else []
    return [(start, entries), (0, stop)]


def check_momentum(momentum: float) -> None:
    """Refuse what would not decay."""
    if not (isinstance(momentum, int | float) and 0.0 <= momentum < 1.0):
        raise ValueError(f"momentum must be at least 0 and below 1, not {momentum!r}")


def _mask(velocity: NDArray[np.float32], indices: NDArray[np.int32], cut: list[tuple[int, int]]) -> None:
    """Forget the velocity of what was sent: it would carry a stale direction. What did not fit keeps its own."""
    kept = [velocity[indices[start:stop]] for start, stop in cut]
    velocity[indices] = 0.0
    for (start, stop), values in zip(cut, kept, strict=True):
        velocity[indices[start:stop]] = values


@dataclass
class SparseState(CodecState):
    """Scratch of a sparsifier: room for the entries of one message."""

    indices: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    values: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    sent: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    rounded: bool = False
    """Whether `pick` gave values as their coding sends them, and left the rounding in the residual."""
    velocity: Tensor = field(default_factory=lambda: torch.empty(0))
    """The momentum after the last step that counts; empty without it."""
    coming: Tensor = field(default_factory=lambda: torch.empty(0))
    """That after this step, which waits for `commit`."""

    saved: ClassVar[tuple[str, ...]] = ("velocity",)
    elementwise: ClassVar[tuple[str, ...]] = ("velocity",)

    def room(self, entries: int) -> None:
        """Let `indices` and `values` hold that many entries; grows rarely, and never shrinks."""
        if entries > self.values.size:
            self.indices = np.empty(entries + entries // 4, np.int32)
            self.values = np.empty(self.indices.size, np.float32)

    def sent_room(self, entries: int) -> NDArray[np.float32]:
        if entries > self.sent.size:
            self.sent = np.empty(entries + entries // 4, np.float32)
        return self.sent[:entries]


@dataclass(frozen=True)
class SparseCodec(GatheredCodec):
    """A codec that sends chosen elements: subclasses write `pick`, and `State` if they remember more.

    momentum    above 0, velocity = momentum * velocity + gradient is what accumulates (momentum correction), and it is
                cleared where it was sent (factor masking), both as in DGC. The optimizer's own momentum must then be 0.
                Sent and residual together then add up to the residual before and the new *velocity*, instead of the gradient.
    """

    density: float | Warmup = 0.01
    values: str = "fp32"
    momentum: float = field(default=0.0, kw_only=True)

    adjustable: ClassVar[tuple[str, ...]] = ("density",)
    State: ClassVar[type[SparseState]] = SparseState

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.values not in VALUE_CODINGS:
            raise ValueError(f"values must be one of {', '.join(VALUE_CODINGS)}, not {self.values!r}")
        check_momentum(self.momentum)

    def start(self, group: GroupInfo, rank: int, world: int) -> SparseState:
        size = group.elements if self.momentum else 0
        return self.State(group, rank, world, velocity=torch.zeros(size), coming=torch.zeros(size))

    def pick(
        self, gradient: Tensor, residual: Tensor, state: SparseState
    ) -> tuple[bool, NDArray[np.int32], NDArray[np.float32]]:
        """Accumulate the gradient into the residual and take the chosen elements out of it.

        Returns whether all was finite, ascending indices, and their values; nothing is taken where it was not.
        """
        raise NotImplementedError

    def target(self, group: GroupInfo) -> int:
        """How many elements of the group should be sent in a step."""
        elements = sum(parameter.elements for parameter in group.parameters)
        return min(elements, max(1, round(self.share * elements))) if elements else 0

    @property
    def share(self) -> float:
        """The density as a number: the engine runs codecs only as `at` gives them."""
        assert not isinstance(self.density, Warmup)
        return self.density

    def encode(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Message:
        from ..kernels.cpu import basic

        assert isinstance(state, SparseState)
        coding = VALUE_CODINGS[self.values]
        state.rounded = False
        if self.momentum:
            gradient = torch.add(gradient, state.velocity, alpha=self.momentum, out=state.coming)
        finite, indices, values = self.pick(gradient, residual, state)
        flat = residual.numpy()
        packed = messages.pack(
            indices, values, residual.numel(), state.outgoing.numpy(), coding, rotation=state.step, finite=finite
        )
        if coding != ValueCoding.FP32 and not state.rounded:
            sent = state.sent_room(values.size)
            messages.rounded(values, coding, sent)
            np.subtract(values, sent, out=sent)
            basic.put_back(flat, indices, sent)
            np.subtract(values, sent, out=values)  # what the others see; the cut part of it goes back below
        cut = cut_runs(packed, indices.size)
        for start, stop in cut:
            basic.put_back(flat, indices[start:stop], values[start:stop])
        if self.momentum:
            _mask(state.coming.numpy(), indices, cut)
        return Message(packed.size)

    def commit(self, states: Sequence[CodecState]) -> None:
        for state in states:
            assert isinstance(state, SparseState)
            state.velocity, state.coming = state.coming, state.velocity

    def decode(self, messages_: Sequence[Tensor], out: Tensor, scale: float, state: CodecState) -> None:
        flat = out.numpy()
        for message in messages_:
            messages.add_into(message.numpy(), flat, scale)

    def aggregate(self, messages_: Sequence[Tensor], state: CodecState) -> Tensor:
        """The union of the supports, values added in the order given. Never larger than the messages together."""
        elements = state.group.elements
        coding = VALUE_CODINGS[self.values]
        total = np.zeros(elements, np.float32)
        touched = np.zeros(elements, np.bool_)
        indices, values = np.empty(elements, np.int32), np.empty(elements, np.float32)
        for message in messages_:
            header = messages.unpack(message.numpy(), elements, indices, values)
            touched[indices[: header.entries]] = True
            messages.add_into(message.numpy(), total, 1.0)
        union = np.flatnonzero(touched).astype(np.int32)
        out = torch.empty(messages.bound(elements, union.size, coding), dtype=torch.uint8)
        packed = messages.pack(union, total[union], elements, out.numpy(), coding)
        return out[: packed.size]

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        size = messages.expected(group.elements, self.target(group), VALUE_CODINGS[self.values])
        return Estimate(gathered=size, passes=2.0)
