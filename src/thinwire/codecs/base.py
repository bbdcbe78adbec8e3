"""Interface of a codec (gradient compressor).

A codec is a small frozen value; what it keeps between steps is in a separate `CodecState` per group and rank. `exchange` is
a generator: it yields requests for collectives (`Gather` or `Sum`), is sent their results, and leaves the mean over all
ranks in `gradient`. It is independent of processes: real jobs, `LocalWorld` and tests drive the same generator.
"""

import abc
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..messages import HEADER_BYTES
from .names import to_text
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
    """Layout of a group. `parameters` are those to compress; elements between them are zero.

    The last `tail` elements of a buffer yielded as `Sum(..., tail=True)` belong to the engine: small tensors that are sent
    along, and finally the flag for non-finite values.
    """

    name: str
    elements: int
    parameters: tuple[ParameterInfo, ...]
    tail: int = 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """Cost of exchanging one group, per rank: bytes contributed to each collective, and passes over memory.

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
    """Request the messages of all ranks. The result is one uint8 tensor per rank, in rank order."""

    message: Message


@dataclass(slots=True)
class Sum:
    """Request the sum of `values` over all ranks (the mean if `average`), in place. The result is the same tensor.

    With `tail=True` the last `group.tail` elements of float32 values belong to the engine; next to other dtypes it sends a
    separate tail. `finite=False` makes the step void on all ranks. It is sent in the tail of float32 values; without one the
    engine tests the result itself.
    """

    values: Tensor
    average: bool = False
    tail: bool = False
    finite: bool = True


Request: TypeAlias = Gather | Sum
Steps: TypeAlias = Generator[Request, Any, None]


@dataclass
class CodecState:
    """What one rank keeps of one group between steps.

    The engine sets `step`, `outgoing` (uint8, exactly as long as a message may be in this step) before each exchange.
    """

    group: GroupInfo
    rank: int
    world: int
    step: int = 0
    outgoing: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    saved: ClassVar[tuple[str, ...]] = ()
    """Fields that checkpoints store."""
    elementwise: ClassVar[tuple[str, ...]] = ()
    """Saved fields that are flat tensors with a value per element of the group. When the world size changes: their mean."""
    agreed: ClassVar[tuple[str, ...]] = ()
    """Saved fields that must be equal on all ranks, because message layouts depend on them."""
    common: ClassVar[tuple[str, ...]] = ()
    """Saved fields that are equal on all ranks and valid for any world size: kept when it changes."""

    def check(self) -> None:
        """Raise ValueError if the saved fields, which come from a file, hold values that no run can produce."""


@dataclass(frozen=True)
class Codec(abc.ABC):
    """Base of all compressors. `rounds` is the largest number of dependent collectives in one exchange."""

    rounds: ClassVar[int] = 1
    keeps_residual: ClassVar[bool] = True
    rides: ClassVar[bool] = False
    """Whether its sums have a tail, in which small tensors can be sent along."""
    direct: ClassVar[bool] = False
    """Whether the exchange is a plain all-reduce of the gradient in its own dtype."""

    adjustable: ClassVar[tuple[str, ...]] = ()
    """Fields that may change between steps: by a schedule such as `Warmup`, or by `wire.set`."""

    def at(self, step: int, settings: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """This codec with its schedules evaluated at a step; `settings` take precedence."""
        numbers = {name: settings.get(name, getattr(self, name)) for name in self.adjustable}
        numbers = {name: value.at(step) if isinstance(value, Warmup) else value for name, value in numbers.items()}
        changed = {name: value for name, value in numbers.items() if value != getattr(self, name)}
        return dataclasses.replace(self, **changed) if changed else self

    def adjusted(self, state: CodecState) -> None:  # noqa: B027
        """Called after `wire.set`: a state may have to adapt faster than it does from step to step."""

    def start(self, group: GroupInfo, rank: int, world: int) -> CodecState:
        return CodecState(group, rank, world)

    @abc.abstractmethod
    def exchange(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Steps:
        """Exchange one group. gradient, residual: flat float32 [elements]; both are changed in place.

        Afterwards `gradient` holds the mean and `residual` what this rank has not sent yet. The residual must stay
        finite for any gradient. Where `keeps_residual` is false, `residual` is empty.
        """

    def undo(self, residual: Tensor, state: CodecState) -> None:  # noqa: B027
        """Return to the residual what this step's exchange took out, and roll the state back.

        Called when the step turns out to be void on all ranks. State that only takes effect in `commit` needs no rollback.
        """

    def commit(self, states: Sequence[CodecState]) -> None:  # noqa: B027
        """The step is valid: update adaptive state (thresholds). `states` are those of all groups of this codec."""

    @abc.abstractmethod
    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        """What an exchange of this group costs."""

    def sent(self, entries: int, state: CodecState) -> int:
        """Elements of this rank's gradient that the last exchange sent; `entries` is the count in its message."""
        return entries

    def request(self, headers: NDArray[np.uint32], state: CodecState) -> int:
        """Bytes that messages should have room for, from the words of all headers [ranks, 4]; equal on all ranks."""
        return int(headers[:, 2].max())

    def smallest_capacity(self, group: GroupInfo) -> int:
        """Smallest message, in bytes, with which this codec makes progress."""
        return HEADER_BYTES + 64

    def __str__(self) -> str:
        return to_text(self)


@dataclass(frozen=True)
class GatheredCodec(Codec):
    """Base of codecs whose ranks choose their own coordinates: `encode`, one all-gather of messages, `decode`.

    Messages are added in rank order, so results are equal bit for bit on all ranks.
    """

    @abc.abstractmethod
    def encode(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Message:
        """Accumulate, select and clear; write one message into `state.outgoing`, never more than fits there.

        What does not fit stays in the residual. `header.wanted` is the size with enough capacity.
        """

    @abc.abstractmethod
    def decode(self, messages: Sequence[Tensor], out: Tensor, scale: float, state: CodecState) -> None:
        """Add all messages times `scale` to `out`, a flat float32 tensor, in the order given."""

    def exchange(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Steps:
        message = self.encode(gradient, residual, state)
        messages = yield Gather(message)
        self.write(messages, gradient, 1.0 / state.world, state)

    def write(self, messages: Sequence[Tensor], out: Tensor, scale: float, state: CodecState) -> None:
        """Overwrite `out` with the sum of all messages times `scale`; the same bits as `decode` into zeros."""
        kernels.sliced.clear(out.numpy())
        self.decode(messages, out, scale, state)

    def undo(self, residual: Tensor, state: CodecState) -> None:
        self.decode([state.outgoing], residual, 1.0, state)
