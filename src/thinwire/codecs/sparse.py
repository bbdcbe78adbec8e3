"""Base of sparsifiers with gathered messages: rounding, packing, and returning what did not fit to the residual."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels, messages
from ..messages import ValueCoding
from .base import CodecState, Estimate, GatheredCodec, GroupInfo, Message
from .schedule import Warmup, check_density

VALUE_CODINGS = {"fp32": ValueCoding.FP32, "fp16": ValueCoding.FP16, "bf16": ValueCoding.BF16}


def cut_runs(packed: messages.Packed, entries: int) -> list[tuple[int, int]]:
    """Ranges of positions in the list of entries that did not fit."""
    start, stop = packed.cut_start, packed.cut_stop
    if start <= stop:
        return [(start, stop)] if start < stop else []
    return [(start, entries), (0, stop)]


def check_momentum(momentum: float) -> None:
    """Raise ValueError for a momentum outside of [0, 1)."""
    if not (isinstance(momentum, int | float) and 0.0 <= momentum < 1.0):
        raise ValueError(f"momentum must be at least 0 and below 1, not {momentum!r}")


def _mask(velocity: NDArray[np.float32], indices: NDArray[np.int32], cut: list[tuple[int, int]]) -> None:
    """Factor masking: clear the velocity of what was sent, a stale direction. What did not fit keeps its velocity."""
    kept = [velocity[indices[start:stop]] for start, stop in cut]
    velocity[indices] = 0.0
    for (start, stop), values in zip(cut, kept, strict=True):
        velocity[indices[start:stop]] = values


@dataclass
class SparseState(CodecState):
    """Scratch buffers of a sparsifier for the entries of one message."""

    indices: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    values: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    sent: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    rounded: bool = False
    """Whether `pick` returned values rounded by their coding, and left the rounding error in the residual."""
    velocity: Tensor = field(default_factory=lambda: torch.empty(0))
    """The momentum after the last valid step; empty without momentum."""
    coming: Tensor = field(default_factory=lambda: torch.empty(0))
    """The momentum after this step, taken over in `commit`."""

    saved: ClassVar[tuple[str, ...]] = ("velocity",)
    elementwise: ClassVar[tuple[str, ...]] = ("velocity",)

    def room(self, entries: int) -> None:
        """Make room for that many entries in `indices` and `values`; grows rarely, never shrinks."""
        if entries > self.values.size:
            self.indices = np.empty(entries + entries // 4, np.int32)
            self.values = np.empty(self.indices.size, np.float32)

    def sent_room(self, entries: int) -> NDArray[np.float32]:
        if entries > self.sent.size:
            self.sent = np.empty(entries + entries // 4, np.float32)
        return self.sent[:entries]


@dataclass(frozen=True)
class SparseCodec(GatheredCodec):
    """A codec that sends selected elements: subclasses implement `pick`, and `State` if they keep more.

    momentum    above 0, velocity = momentum * velocity + gradient is accumulated instead of the gradient (momentum
                correction), and cleared where it was sent (factor masking), both as in DGC. The optimizer's momentum must
                then be 0. What was sent plus the new residual equals the old residual plus the new *velocity*.
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

    @abc.abstractmethod
    def pick(
        self, gradient: Tensor, residual: Tensor, state: SparseState
    ) -> tuple[bool, NDArray[np.int32], NDArray[np.float32]]:
        """Accumulate the gradient into the residual and take the selected elements out of it.

        Returns (finite, ascending indices, values); nothing is taken if the sum is not finite.
        """

    def target(self, group: GroupInfo) -> int:
        """Elements of the group to send per step."""
        elements = sum(parameter.elements for parameter in group.parameters)
        return min(elements, max(1, round(self.share * elements))) if elements else 0

    @property
    def share(self) -> float:
        """The density as a number: the engine only runs codecs returned by `at`."""
        assert not isinstance(self.density, Warmup)
        return self.density

    def encode(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Message:
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
            kernels.basic.put_back(flat, indices, sent)
            np.subtract(values, sent, out=values)  # as the other ranks decode them; the cut part is returned below
        cut = cut_runs(packed, indices.size)
        for start, stop in cut:
            kernels.basic.put_back(flat, indices[start:stop], values[start:stop])
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

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        size = messages.expected(group.elements, self.target(group), VALUE_CODINGS[self.values])
        return Estimate(gathered=size, passes=2.0)
