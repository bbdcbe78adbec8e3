"""What one rank does with its groups in a step: codecs, residuals, capacities, flags; commit or undo at the end.

Everything here is the same on `torch.distributed` and in memory: `run` yields collectives and never asks who carries
them out.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..codecs import Codec, CodecState, Gather, GroupInfo, Sum
from ..errors import ExchangeError
from ..feedback import ResidualStore
from ..messages import HEADER_BYTES, Flag
from ..schemes.world import Collective
from .capacity import Capacity
from .layout import Group, Layout

NAN = float("nan")


@dataclass
class GroupRun:
    """One group on one rank: its codec with state, its message buffers, and what the current step found."""

    group: Group
    info: GroupInfo
    codec: Codec
    now: Codec
    """The codec with the numbers of this step, see `Codec.at`."""
    state: CodecState
    capacity: Capacity | None
    outgoing: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    incoming: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    wanted: int = 0
    entries: int = 0
    bytes: int = 0
    gathered: int = 0
    """Those of `bytes` that went into an all-gather."""


@dataclass
class _Unused:
    """A parameter that this rank did not use in this step, and its residual from before."""

    position: int
    residual: Tensor
    before: Tensor


class Member:
    """One rank's side of all exchanges of a layout."""

    def __init__(
        self, layout: Layout, rank: int, world: int, *, protected: bool = False, tests_results: bool = False
    ) -> None:
        self.rank, self.world = rank, world
        self.step = 0
        self.settings: dict[str, float] = {}
        self.skipped = 0
        self.off = False
        self.last_off = False
        self.scale = 1.0
        self.groups = [self._start(group, codec) for group, codec in zip(layout.groups, layout.codecs(), strict=True)]
        self.residuals = ResidualStore(
            [run.info for run in self.groups], [run.codec for run in self.groups], protected=protected
        )
        # A dense result need only be looked at where a residual, or an optimizer that is guarded, depends on it.
        self.tests_results = tests_results or any(run.codec.keeps_residual for run in self.groups)
        self._places = {
            parameter.name: place
            for place, parameter in enumerate(
                parameter for run in self.groups if run.codec.keeps_residual for parameter in run.info.parameters
            )
        }
        self._unused: list[_Unused] = []

    def _start(self, group: Group, codec: Codec) -> GroupRun:
        info = group.info()
        now = codec.at(0)
        gathered = now.estimate(info, self.world).gathered
        # No codec needs more than every element with its index, as plain words.
        largest = HEADER_BYTES + 8 * info.elements
        capacity = Capacity(gathered, now.smallest_capacity(info), largest) if gathered else None
        return GroupRun(group, info, codec, now, now.start(info, self.rank, self.world), capacity)

    # -- one group -----------------------------------------------------------------------------------------------------

    def run(
        self, index: int, gradient: Tensor, riders: Tensor, unused: Sequence[str] = ()
    ) -> Generator[Collective, None, None]:
        """Exchange one group: gradient (flat [elements]) and riders (float32 [tail - 1]) hold the means afterwards.

        Parameters named in `unused` had no gradient on this rank; see `epilogue`.
        """
        run, residual = self.groups[index], self.residuals.flat[index]
        self._remember_unused(run, residual, unused)
        self.residuals.begin(index)
        scaled = run.codec.keeps_residual and self.scale != 1.0
        if scaled:
            gradient.mul_(1.0 / self.scale)
        run.state.step = self.step
        run.bytes = run.gathered = run.entries = 0
        run.wanted = -1
        self._make_room(run)
        finite = True
        steps = run.now.exchange(gradient, residual, run.state)
        answer: list[Tensor] | Tensor | None = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration:
                break
            if isinstance(request, Gather):
                size = run.state.outgoing.numel()
                if request.message.size > size:
                    raise ExchangeError(
                        f"{run.codec} wrote a message of {request.message.size} bytes where {size} were agreed"
                    )
                incoming = run.incoming[: size * self.world]
                run.bytes += size
                run.gathered += size
                yield Collective("gather", run.state.outgoing, incoming)
                finite &= self._read_headers(run, incoming, size)
                answer = list(incoming.view(self.world, size))
            elif isinstance(request, Sum):
                values, tail = request.values, run.info.tail if request.tail else 0
                if tail:
                    values[-tail:-1] = riders
                    values[-1] = 0.0 if request.finite else NAN
                elif not request.finite:
                    raise ExchangeError(f"{run.codec} must give its sum a tail to say that its gradient is not finite")
                run.bytes += values.numel() * values.element_size()
                yield Collective("average" if request.average else "sum", values)
                if tail:
                    torch.mul(values[-tail:-1], 1.0 if request.average else 1.0 / self.world, out=riders)
                if tail or run.codec.keeps_residual:
                    finite &= all_finite(values)  # flag, riders, and sums of finite values that overflow
                answer = values
            else:
                raise ExchangeError(f"{run.codec} yielded {type(request).__name__}, neither Gather nor Sum")
        if finite and not run.codec.keeps_residual and self.tests_results:
            finite = all_finite(gradient)
        if finite and scaled:
            gradient.mul_(self.scale)
        if finite and self.tests_results and gradient.dtype == torch.float32:
            finite = self._fits(gradient, run.group.dtype, scaled)
        if not finite:
            self.off = True
            gradient.fill_(NAN)
            riders.fill_(NAN)

    @staticmethod
    def _fits(result: Tensor, dtype: str, scaled: bool) -> bool:
        """Whether a float32 mean stays finite in the dtype of its bucket. A mean of finite values is, in float32."""
        if dtype in ("float16", "bfloat16"):
            return all_finite(result.to(getattr(torch, dtype)))
        return not scaled or all_finite(result)

    def _make_room(self, run: GroupRun) -> None:
        if run.capacity is None:
            return
        size = run.capacity.value
        if size > run.outgoing.numel():
            run.outgoing = torch.empty(size, dtype=torch.uint8)
            run.incoming = torch.empty(size * self.world, dtype=torch.uint8)
        if run.state.outgoing.numel() != size or run.state.outgoing.data_ptr() != run.outgoing.data_ptr():
            run.state.outgoing = run.outgoing[:size]

    def _read_headers(self, run: GroupRun, incoming: Tensor, size: int) -> bool:
        """Take `wanted` of all ranks out of the gathered messages; whether all of them are finite."""
        headers = np.ascontiguousarray(incoming.numpy().reshape(self.world, size)[:, :HEADER_BYTES]).view("<u4")
        run.wanted = int(headers[:, 2].max())
        run.entries = int(headers[self.rank, 1])
        return not bool((headers[:, 0] >> 16 & Flag.NONFINITE).any())

    # -- the end of a step ---------------------------------------------------------------------------------------------

    def _remember_unused(self, run: GroupRun, residual: Tensor, unused: Sequence[str]) -> None:
        if not unused or not residual.numel():
            return
        for parameter in run.info.parameters:
            if parameter.name in unused:
                view = residual[parameter.offset : parameter.offset + parameter.elements]
                self._unused.append(_Unused(self._places[parameter.name], view, view.clone()))

    def epilogue(self) -> Generator[Collective, None, None]:
        """Find out which parameters no rank used: DDP throws their results away, so they must not have been sent.

        Only with `find_unused_parameters`, where DDP itself asks the same at the same time. A rank cannot know it earlier:
        used bits of the last bucket come with the end of backward.
        """
        used = torch.ones(len(self._places), dtype=torch.uint8)
        for entry in self._unused:
            used[entry.position] = 0
        yield Collective("max", used)
        self._unused = [entry for entry in self._unused if not used[entry.position]]

    def finish(self) -> None:
        """All groups of the step are done: learn from it, or make it void."""
        if self.off:
            self.skipped += 1
            for index, run in enumerate(self.groups):
                run.now.undo(self.residuals.flat[index], run.state)
                self.residuals.roll_back(index)
        else:
            by_codec: dict[Codec, list[CodecState]] = {}
            for run in self.groups:
                by_codec.setdefault(run.now, []).append(run.state)
                if run.capacity is not None and run.wanted >= 0:
                    run.capacity.observe(run.wanted)
            for codec, states in by_codec.items():
                codec.commit(states)
        for entry in self._unused:
            entry.residual.copy_(entry.before)
        self._unused.clear()
        self.last_off, self.off = self.off, False
        self.begin(self.step + 1)

    def begin(self, step: int) -> None:
        """The next step is this one: codecs take the numbers that they have in it."""
        self.step = step
        for run in self.groups:
            run.now = run.codec.at(step, self.settings)

    def adjust(self, settings: Mapping[str, float]) -> None:
        """From the next step on, codecs that have these fields take these numbers."""
        self.settings |= settings
        self.begin(self.step)
        for run in self.groups:
            if set(run.codec.adjustable).intersection(settings):
                run.now.adjusted(run.state)

    @property
    def bytes(self) -> int:
        """Memory that thinwire holds for this rank: residuals, message buffers, scratch of the codecs."""
        total = self.residuals.bytes
        for run in self.groups:
            total += run.outgoing.numel() + run.incoming.numel()
            for value in vars(run.state).values():
                if isinstance(value, Tensor) and value is not run.state.outgoing:
                    total += value.numel() * value.element_size()
                elif isinstance(value, np.ndarray):
                    total += value.nbytes
        return total


def all_finite(tensor: Tensor) -> bool:
    """Whether a flat tensor holds no NaN and no infinity; one read pass."""
    if tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.device.type == "cpu":
        from ..kernels.cpu import basic

        return basic.all_finite(tensor.numpy())
    # A finite sum means finite terms; the slow test is only for sums that overflow.
    total = tensor.sum(dtype=torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())
