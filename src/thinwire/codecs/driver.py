"""Drives a codec's generator over one scope: what it yields becomes collectives, with capacity, flags and riders seen to.

The capacity of a gathered message is a number that all ranks know before they encode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..comm.collectives import Collective, Scope
from ..errors import ExchangeError
from ..messages import HEADER_BYTES, Flag
from . import Codec, CodecState, Gather, GroupInfo, Sum

NAN = float("nan")
WINDOW = 16
GRAIN = 64


class ResidualPart(NamedTuple):
    """Elements [start, stop) of a group that a residual speaks of; `weight` is its share in the sum of all ranks."""

    start: int
    stop: int
    weight: float = 1.0


class Capacity:
    """Bytes of a group's messages in the next step: a pure function of what all ranks wanted in earlier ones.

    All ranks read the same headers, so they agree without asking. The margin above the recent maximum follows the recent
    spread: 2 % for a codec that always wants the same, up to 25 %. What does not fit waits in the residual.

    `wanted` comes from other ranks and from checkpoints: never more than `largest`, whatever they say.
    """

    def __init__(self, expected: int, smallest: int, largest: int) -> None:
        self._smallest = smallest
        self._first = _round_up(max(smallest, expected + expected // 4))
        self.largest = max(_round_up(largest), self._first)
        self.recent: deque[int] = deque(maxlen=WINDOW)

    @classmethod
    def of(cls, codec: Codec, infos: Sequence[GroupInfo], world: int) -> Capacity | None:
        """For messages that may speak of any of these parts of a group; None for a codec without messages."""
        gathered = max(codec.estimate(info, world).gathered for info in infos)
        if not gathered:
            return None
        # No codec needs more than every element with its index, as plain words.
        largest = HEADER_BYTES + 8 * max(info.elements for info in infos)
        return cls(gathered, max(codec.smallest_capacity(info) for info in infos), largest)

    @property
    def value(self) -> int:
        if not self.recent:
            return self._first
        most, least = max(self.recent), min(self.recent)
        margin = max(most // 50, min(most // 4, (most - least) // 2))
        return min(self.largest, _round_up(max(self._smallest, most + margin)))

    def observe(self, wanted: int) -> None:
        """The largest `wanted` of all headers of a step that counts."""
        self.recent.append(wanted)


def _round_up(size: int) -> int:
    return -(-size // GRAIN) * GRAIN


@dataclass
class CodecDriver:
    """One codec with its state on one rank, its message buffers, and what the current step found."""

    info: GroupInfo
    now: Codec
    """The codec with the numbers of this step, see `Codec.at`."""
    rank: int
    world: int
    scope: Scope = "flat"
    state: CodecState = field(init=False)
    capacity: Capacity | None = field(init=False)
    outgoing: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    incoming: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    wanted: int = 0
    entries: int = 0
    bytes: int = 0
    gathered: int = 0
    """Those of `bytes` that went into an all-gather."""
    traffic: dict[Scope, float] = field(default_factory=dict)
    """What the collectives put on the link of this rank, by scope."""

    def __post_init__(self) -> None:
        self.state = self.now.start(self.info, self.rank, self.world)
        self.capacity = Capacity.of(self.now, [self.info], self.world)

    @property
    def rounds(self) -> int:
        return max(1, self.now.rounds)

    @property
    def states(self) -> list[CodecState]:
        return [self.state]

    @property
    def tests_result(self) -> bool:
        """Whether a step can be void without a word in its messages: where there are no residuals to keep it out of."""
        return not self.now.keeps_residual

    @property
    def memory_bytes(self) -> int:
        return self.outgoing.numel() + self.incoming.numel()

    @property
    def residual_parts(self) -> list[ResidualPart]:
        """What is kept here of what was not sent."""
        return [ResidualPart(0, self.info.elements)] if self.now.keeps_residual else []

    @property
    def folds(self) -> bool:
        """Whether its residual is one of the whole gradient of this rank."""
        return self.now.keeps_residual

    def use(self, now: Codec) -> None:
        """Exchange with these numbers of the codec from now on."""
        self.now = now

    def observe(self) -> None:
        """The step counts: the capacity follows what was wanted."""
        if self.capacity is not None and self.wanted >= 0:
            self.capacity.observe(self.wanted)

    def undo(self, residuals: Sequence[Tensor]) -> None:
        """The step is void: put back what it took out of the residual."""
        self.now.undo(residuals[0] if residuals else torch.empty(0), self.state)

    def run(
        self, gradient: Tensor, residuals: Sequence[Tensor], step: int, riders: Tensor | None = None
    ) -> Generator[Collective, None, bool]:
        """Let the codec exchange; returns whether all that it saw was finite. `riders` [tail - 1] hold means afterwards."""
        self.state.step = step
        self.bytes = self.gathered = self.entries = 0
        self.wanted, self.traffic = -1, {}
        self._make_room()
        finite = True
        riders = torch.empty(0) if riders is None else riders
        steps = self.now.exchange(gradient, residuals[0] if residuals else torch.empty(0), self.state)
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
                part = Collective("gather", self.state.outgoing, incoming, self.scope)
                self._count(part)
                yield part
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
                self._count(part)
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

    def _count(self, part: Collective) -> None:
        self.traffic[self.scope] = self.traffic.get(self.scope, 0.0) + part.traffic(self.world)

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
        """Take what is requested and sent out of the headers of all ranks; whether all of them are finite."""
        headers = np.ascontiguousarray(incoming.numpy().reshape(self.world, size)[:, :HEADER_BYTES]).view("<u4")
        self.wanted = self.now.request(headers, self.state)
        self.entries = int(headers[self.rank, 1])
        return not bool((headers[:, 0] >> 16 & Flag.NONFINITE).any())


def all_finite(tensor: Tensor) -> bool:
    """Whether a flat tensor, on any device and in any dtype, holds no NaN and no infinity; one read pass."""
    if tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.device.type == "cpu":
        return kernels.basic.all_finite(tensor.numpy())
    if tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.device.type == "cpu":
        return kernels.basic.all_finite_bf16(tensor.view(torch.int16).numpy())
    # A finite sum means finite terms; the slow test is only for sums that overflow.
    total = tensor.sum(dtype=torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())
