"""The contract of a compressor.

A codec is a small frozen value. What it remembers between steps is kept apart, in a `CodecState` for each group and
rank. `exchange` is a generator: it yields what should travel (`Gather` or `Sum`), is sent the answer, and leaves the
mean over all ranks in `gradient`. It knows nothing of processes: the engine, `LocalWorld` and the tests drive the
same generator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from ..messages import HEADER_BYTES
from .schedule import Warmup


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """One compressed tensor inside a group: elements [offset, offset + elements) of the flat group."""

    name: str
    offset: int
    elements: int
    shape: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """What a codec is told of a group. `parameters` are those it compresses; what lies between them is zero.

    `tail` elements at the end of a buffer yielded as `Sum(..., tail=True)` belong to the engine: small tensors that
    ride along, and last the flag for non-finite values.
    """

    name: str
    elements: int
    parameters: tuple[ParameterInfo, ...]
    tail: int = 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an exchange of one group costs a rank: bytes it hands to each collective, and passes over memory.

    `gathered` is the size of its message in an all-gather, `summed` that of its buffer in an all-reduce; `passes` counts
    reads and writes of the whole group in units of `residual.add_(gradient)`.
    """

    gathered: int = 0
    summed: int = 0
    passes: float = 0.0


@dataclass(slots=True)
class Message:
    """What `encode` wrote into `state.outgoing`: its size in bytes, header included."""

    size: int


@dataclass(slots=True)
class Gather:
    """Ask for the messages of all ranks. The answer is one uint8 tensor a rank, in rank order."""

    message: Message


@dataclass(slots=True)
class Sum:
    """Ask for the sum of `values` over all ranks (the mean if `average`), in place. The answer is the same tensor.

    With `tail=True` the last `group.tail` elements of float32 values are the engine's; beside other values it sends a tail of
    its own. `finite=False` makes the step void on all ranks. It travels in the tail of float32 values; without one the engine
    tests the result itself.
    """

    values: Tensor
    average: bool = False
    tail: bool = False
    finite: bool = True


Request: TypeAlias = Gather | Sum
Answer: TypeAlias = list[Tensor] | Tensor
Steps: TypeAlias = Generator[Request, Any, None]


@dataclass
class CodecState:
    """What one rank remembers of one group between steps.

    The engine sets `step`, `outgoing` (uint8, exactly as long as a message may be in this step) before each exchange.
    """

    group: GroupInfo
    rank: int
    world: int
    step: int = 0
    outgoing: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    saved: ClassVar[tuple[str, ...]] = ()
    """The fields that a checkpoint keeps."""
    elementwise: ClassVar[tuple[str, ...]] = ()
    """Those of them that are flat tensors with a value for each element of the group. Where ranks change: their mean."""
    agreed: ClassVar[tuple[str, ...]] = ()
    """Those that must be equal on all ranks, because what they send each other follows from them."""
    common: ClassVar[tuple[str, ...]] = ()
    """Those that are equal on all ranks and mean the same for any number of them: kept where ranks change."""

    def check(self) -> None:
        """Raise a ValueError if the saved fields, which come from a file, hold what no run can have left in them."""


@dataclass(frozen=True)
class Codec:
    """Base of all compressors. `rounds` is the largest number of dependent collectives in one exchange."""

    rounds: ClassVar[int] = 1
    keeps_residual: ClassVar[bool] = True
    rides: ClassVar[bool] = False
    """Whether its sums have a tail, in which small tensors can travel along."""
    direct: ClassVar[bool] = False
    """Whether the exchange is nothing but the all-reduce of the gradient, in its own dtype."""

    adjustable: ClassVar[tuple[str, ...]] = ()
    """Fields that may change from step to step: by a schedule such as `Warmup`, or by `wire.set`."""

    def at(self, step: int, settings: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """This codec with the numbers that its schedules have in a step, or those that `settings` give instead."""
        numbers = {name: settings.get(name, getattr(self, name)) for name in self.adjustable}
        numbers = {name: value.at(step) if isinstance(value, Warmup) else value for name, value in numbers.items()}
        changed = {name: value for name, value in numbers.items() if value != getattr(self, name)}
        return dataclasses.replace(self, **changed) if changed else self

    def adjusted(self, state: CodecState) -> None:
        """`wire.set` has changed something: the state may have to follow faster than from step to step."""

    def start(self, group: GroupInfo, rank: int, world: int) -> CodecState:
        return CodecState(group, rank, world)

    def exchange(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Steps:
        """Exchange one group. gradient, residual: flat float32 [elements]; both are changed in place.

        Afterwards `gradient` holds the mean and `residual` what this rank has not sent yet. The residual must stay
        finite whatever the gradient holds. Where `keeps_residual` is false, `residual` is empty.
        """
        raise NotImplementedError

    def undo(self, residual: Tensor, state: CodecState) -> None:
        """Put back into the residual what this step's exchange took out, and forget what the state learnt from it.

        Called when the step turns out to be void on all ranks. What was learnt and is only used after `commit` needs no
        undoing.
        """

    def commit(self, states: Sequence[CodecState]) -> None:
        """The step counts: move what is learnt from it (thresholds). `states` are those of all groups of this codec."""

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        raise NotImplementedError

    def sent(self, entries: int, state: CodecState) -> int:
        """How many elements of this rank's gradient the last exchange took; `entries` are those of its own message."""
        return entries

    def smallest_capacity(self, group: GroupInfo) -> int:
        """Bytes without which a message of this codec makes no progress."""
        return HEADER_BYTES + 64

    def __str__(self) -> str:
        from .registry import to_text

        return to_text(self)


@dataclass(frozen=True)
class GatheredCodec(Codec):
    """Codecs whose ranks choose their own coordinates: they write `encode` and `decode`, and gather messages once.

    Messages are added in rank order, so all ranks hold the same bits.
    """

    def encode(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Message:
        """Accumulate, select and clear; write one message into `state.outgoing`, never more than fits there.

        What does not fit stays in the residual. `header.wanted` says what would have been sent with enough room.
        """
        raise NotImplementedError

    def decode(self, messages: Sequence[Tensor], out: Tensor, scale: float, state: CodecState) -> None:
        """Add all messages times `scale` to `out`, a flat float32 tensor, one message after the other."""
        raise NotImplementedError

    def aggregate(self, messages: Sequence[Tensor], state: CodecState) -> Tensor:
        """One message with the sum of several, for chains that add before they send on."""
        raise NotImplementedError(f"{self} cannot add messages without decoding them")

    def exchange(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Steps:
        message = self.encode(gradient, residual, state)
        messages = yield Gather(message)
        self.write(messages, gradient, 1.0 / state.world, state)

    def write(self, messages: Sequence[Tensor], out: Tensor, scale: float, state: CodecState) -> None:
        """The sum of all messages times `scale`, whatever `out` held before; the same bits as `decode` into zeros."""
        from ..kernels.cpu import sliced

        sliced.clear(out.numpy())
        self.decode(messages, out, scale, state)

    def undo(self, residual: Tensor, state: CodecState) -> None:
        self.decode([state.outgoing], residual, 1.0, state)
