"""A codec's own protocol over one scope: what it yields becomes collectives, with sizes, flags and riders seen to."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..codecs import Codec, CodecState, Gather, GroupInfo, Sum
from ..errors import ExchangeError
from ..kernels.finite import all_finite
from ..messages import HEADER_BYTES, Flag
from .collective import Collective, Scope

NAN = float("nan")


class Room(Protocol):
    """How long a message may be, agreed by all ranks; see `engine.capacity`."""

    @property
    def value(self) -> int: ...

    def observe(self, wanted: int) -> None: ...


MakeRoom: TypeAlias = Callable[[int, int, int], Room]
"""From the bytes to expect, the fewest that make sense, and the most that can be of use."""


@dataclass
class Conversation:
    """One codec with its state on one rank, its message buffers, and what the current step found."""

    info: GroupInfo
    now: Codec
    """The codec with the numbers of this step, see `Codec.at`."""
    state: CodecState
    capacity: Room | None
    world: int
    rank: int
    scope: Scope = "flat"
    outgoing: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    incoming: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    wanted: int = 0
    entries: int = 0
    bytes: int = 0
    gathered: int = 0
    """Those of `bytes` that went into an all-gather."""

    def speak(
        self, gradient: Tensor, residual: Tensor, riders: Tensor, step: int
    ) -> Generator[Collective, None, bool]:
        """Let the codec exchange; returns whether all that it saw was finite. `riders` [tail - 1] hold means afterwards."""
        self.state.step = step
        self.bytes = self.gathered = self.entries = 0
        self.wanted = -1
        self._make_room()
        finite = True
        steps = self.now.exchange(gradient, residual, self.state)
        answer: list[Tensor] | Tensor | None = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration:
                self.entries = self.now.sent(self.entries, self.state)
                return finite
            if isinstance(request, Gather):
                size = self.state.outgoing.numel()
                if request.message.size > size:
                    raise ExchangeError(
                        f"{self.now} wrote a message of {request.message.size} bytes where {size} were agreed"
                    )
                incoming = self.incoming[: size * self.world]
                self.bytes += size
                self.gathered += size
                yield Collective("gather", self.state.outgoing, incoming, self.scope)
                finite &= self._read_headers(incoming, size)
                answer = list(incoming.view(self.world, size))
            elif isinstance(request, Sum):
                values, tail = request.values, self.info.tail if request.tail else 0
                inside = tail > 0 and values.dtype == torch.float32
                aboard, beside = values[-tail:-1] if inside else riders, None
                if inside:
                    aboard.copy_(riders)
                    values[-1] = 0.0 if request.finite else NAN
                elif not request.finite:
                    raise ExchangeError(
                        f"{self.now} must give its sum a float32 tail to say that its gradient is not finite"
                    )
                elif tail > 1:
                    beside = riders
                average = request.average
                part = Collective("average" if average else "sum", values, scope=self.scope, beside=beside)
                self.bytes += part.bytes
                yield part
                if tail > 1:
                    torch.mul(aboard, 1.0 if average else 1.0 / self.world, out=riders)
                if tail or self.now.keeps_residual:
                    finite &= all(
                        map(all_finite, part.tensors)
                    )  # flag, riders, and sums of finite values that overflow
                answer = values
            else:
                raise ExchangeError(f"{self.now} yielded {type(request).__name__}, neither Gather nor Sum")

    def _make_room(self) -> None:
        if self.capacity is None:
            return
        size = self.capacity.value
        if size > self.outgoing.numel():
            self.outgoing = torch.empty(size, dtype=torch.uint8)
            self.incoming = torch.empty(size * self.world, dtype=torch.uint8)
        if self.state.outgoing.numel() != size or self.state.outgoing.data_ptr() != self.outgoing.data_ptr():
            self.state.outgoing = self.outgoing[:size]

    def _read_headers(self, incoming: Tensor, size: int) -> bool:
        """Take `wanted` of all ranks out of the gathered messages; whether all of them are finite."""
        headers = np.ascontiguousarray(incoming.numpy().reshape(self.world, size)[:, :HEADER_BYTES]).view("<u4")
        self.wanted = int(headers[:, 2].max())
        self.entries = int(headers[self.rank, 1])
        return not bool((headers[:, 0] >> 16 & Flag.NONFINITE).any())


def make_room(codec: Codec, infos: list[GroupInfo], world: int, room: MakeRoom) -> Room | None:
    """The capacity of messages that may speak of any of these parts of a group; None for a codec without messages."""
    gathered = max(codec.estimate(info, world).gathered for info in infos)
    if not gathered:
        return None
    # No codec needs more than every element with its index, as plain words.
    largest = HEADER_BYTES + 8 * max(info.elements for info in infos)
    return room(gathered, max(codec.smallest_capacity(info) for info in infos), largest)
