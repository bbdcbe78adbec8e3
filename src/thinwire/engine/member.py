"""What one rank does with its groups in a step: codecs, residuals, capacities, flags; commit or undo at the end.

Everything here is the same on `torch.distributed` and in memory: `run` yields collectives and never asks who carries
them out.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..codecs import Codec, CodecState
from ..feedback import ResidualStore
from ..kernels.finite import all_finite
from ..log import logger
from ..schemes.chain import Chain
from ..schemes.collective import Collective, Place, Scope
from ..schemes.conversation import Conversation, make_room
from .capacity import Capacity
from .layout import Group, Layout

NAN = float("nan")


class GroupRun(Conversation):
    """One group on one rank: its codec in conversation with all ranks, or its chain, and what the current step found."""

    def __init__(self, group: Group, codec: Codec, place: Place) -> None:
        info = group.info()
        self.group, self.place = group, place
        leaf = group.leaf()
        self.codec, now = codec, codec.at(0)
        self.chain = Chain(leaf, now, info, place, Capacity) if leaf is not None else None
        capacity = make_room(now, [info], place.size, Capacity) if self.chain is None else None
        state = (
            now.start(info, place.rank, place.size) if self.chain is None else CodecState(info, place.rank, place.size)
        )
        super().__init__(info, now, state, capacity, place.size, place.rank)
        self.traffic: dict[Scope, float] = {}
        self.excess: Tensor | None = None
        """What of this step's mean does not fit the dtype of its bucket."""
        self.carry: Tensor | None = None
        """What an earlier chain left over, to be added to the next gradient of a step that counts."""

    @property
    def rounds(self) -> int:
        return self.chain.rounds if self.chain is not None else max(1, self.codec.rounds)

    @property
    def holdings(self) -> list[tuple[int, int, float]]:
        """What is kept here: start, stop and weight of each residual."""
        if not self.codec.keeps_residual:
            return []
        if self.chain is None:
            return [(0, self.info.elements, 1.0)]
        return [(holding.start, holding.stop, holding.weight) for holding in self.chain.holdings]

    @property
    def states(self) -> list[CodecState]:
        return [self.state] if self.chain is None else self.chain.states

    def exchange(
        self, gradient: Tensor, residuals: Sequence[Tensor], riders: Tensor, step: int
    ) -> Generator[Collective, None, bool]:
        """Returns whether everything was finite, as far as messages and sums say."""
        if self.chain is None:
            self.traffic = {}
            steps = self.speak(gradient, residuals[0] if residuals else torch.empty(0), riders, step)
            while True:
                try:
                    part = next(steps)
                except StopIteration as end:
                    return bool(end.value)
                self.traffic["flat"] = self.traffic.get("flat", 0.0) + part.traffic(self.world)
                yield part
        finite = yield from self.chain.run(gradient, residuals, step)
        chain = self.chain
        self.bytes, self.gathered, self.entries, self.traffic = (
            chain.bytes,
            chain.gathered,
            chain.entries,
            chain.traffic,
        )
        return finite

    def undo(self, residuals: Sequence[Tensor]) -> None:
        if self.chain is None:
            self.now.undo(residuals[0] if residuals else torch.empty(0), self.state)
        elif residuals:
            self.chain.undo(residuals[0])

    def use(self, now: Codec) -> None:
        """From now on exchange with these numbers of the codec, see `Codec.at`."""
        self.now = now
        if self.chain is not None:
            self.chain.use(now)

    def observe(self) -> None:
        """The step counts: capacities follow what was wanted."""
        if self.chain is not None:
            self.chain.observe()
        elif self.capacity is not None and self.wanted >= 0:
            self.capacity.observe(self.wanted)


@dataclass
class _Unused:
    """A parameter that this rank did not use in this step, and its residual from before."""

    position: int
    residual: Tensor
    before: Tensor


class Member:
    """One rank's side of all exchanges of a layout."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        world: int,
        *,
        ranks_per_node: int | None = None,
        protected: bool = False,
        tests_results: bool = False,
        saturates: bool = False,
    ) -> None:
        self.rank, self.world = rank, world
        self.saturates = saturates
        """Whether a mean that does not fit its bucket is cut, and the rest kept, instead of making the step void.

        Without a scaler, which would halve its scale, the same mean would come again, and every step would be void.
        """
        place = Place(rank, world, ranks_per_node)
        self.step = 0
        self.settings: dict[str, float] = {}
        self.skipped = 0
        self.off = False
        self.last_off = False
        self.scale = 1.0
        self.groups = [
            GroupRun(group, codec, place) for group, codec in zip(layout.groups, layout.codecs(), strict=True)
        ]
        self.residuals = ResidualStore(
            [run.info for run in self.groups], [run.holdings for run in self.groups], protected=protected
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
        self._told = False

    # -- one group -----------------------------------------------------------------------------------------------------

    def run(
        self, index: int, gradient: Tensor, riders: Tensor, unused: Sequence[str] = ()
    ) -> Generator[Collective, None, None]:
        """Exchange one group: gradient (flat [elements]) and riders (float32 [tail - 1]) hold the means afterwards.

        Parameters named in `unused` had no gradient on this rank; see `epilogue`.
        """
        run, residuals = self.groups[index], self.residuals.of(index)
        run.excess = None
        self._remember_unused(run, index, unused)
        self.residuals.begin(index)
        scaled = (run.codec.keeps_residual or run.carry is not None) and self.scale != 1.0
        if scaled:
            gradient.mul_(1.0 / self.scale)
        if run.carry is not None:
            gradient.add_(run.carry)
        finite = yield from run.exchange(gradient, residuals, riders, self.step)
        if finite and run.chain is not None and run.chain.tests_result and (self.tests_results or residuals):
            finite = all_finite(gradient)
        if finite and run.chain is None and not run.codec.keeps_residual and self.tests_results:
            finite = all_finite(gradient)
        if finite and scaled:
            gradient.mul_(self.scale)
        if finite and self.tests_results and gradient.dtype == torch.float32:
            if self.saturates and (residuals or run.carry is not None):
                run.excess = _saturate(gradient, run.group.dtype)
                if run.excess is not None and not self._told and self.rank == 0:
                    self._told = True
                    logger.warning(
                        "a mean in %s is larger than %s holds: it is cut, and the rest stays in the residuals; a GradScaler, "
                        "clipping or float32 parameters avoid it", run.info.name, run.group.dtype,
                    )  # fmt: skip
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

    # -- the end of a step ---------------------------------------------------------------------------------------------

    def _remember_unused(self, run: GroupRun, index: int, unused: Sequence[str]) -> None:
        for parameter in run.info.parameters if unused and self.residuals.held[index] else ():
            if parameter.name in unused:
                for held in self.residuals.held[index]:
                    view = held.of(parameter)[1]
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
                run.undo(self.residuals.of(index))
                self.residuals.roll_back(index)
        else:
            by_codec: dict[tuple[Codec, str], list[CodecState]] = {}
            for index, run in enumerate(self.groups):
                by_codec.setdefault((run.now, run.group.chain), []).extend(run.states)
                run.observe()
                if run.carry is not None:
                    run.carry = None
                    self.residuals.protect(index, everything=False)
                if run.excess is not None:
                    self._keep(index, run.excess)
            for (codec, _), states in by_codec.items():
                if states:
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
            run.use(run.codec.at(step, self.settings))

    def adjust(self, settings: Mapping[str, float]) -> None:
        """From the next step on, codecs that have these fields take these numbers."""
        self.settings |= settings
        self.begin(self.step)
        for run in self.groups:
            if set(run.codec.adjustable).intersection(settings):
                for state in run.states:
                    run.now.adjusted(state)

    @property
    def carries(self) -> bool:
        """Whether something of an earlier chain waits for the next gradient."""
        return any(run.carry is not None for run in self.groups)

    def left(self) -> dict[str, Tensor]:
        """What this rank has not sent yet, by name, shaped like the parameters; the sum over ranks is what is still to come."""
        left = dict(self.residuals.named())
        for run in self.groups:
            for p in run.info.parameters if run.carry is not None else ():
                assert run.carry is not None
                waiting = run.carry[p.offset : p.offset + p.elements].view(p.shape)
                left[p.name] = left[p.name] + waiting if p.name in left else waiting
        return left

    def fold(self, left: Mapping[str, Tensor]) -> None:
        """Take over what other chains have not sent, by name, shaped like the parameters.

        It goes into the residual of a Comp that sees whole gradients, otherwise into the next gradient: until a step
        counts, all residuals of such a group are protected. Zeros are carried too: all ranks must take the same way.
        """
        for index, run in enumerate(self.groups):
            known = [parameter for parameter in run.info.parameters if parameter.name in left]
            if not known:
                continue
            carry = torch.zeros(run.info.elements)
            for parameter in known:
                stop = parameter.offset + parameter.elements
                carry[parameter.offset : stop] = left[parameter.name].reshape(-1)
            self._keep(index, carry)

    def _keep(self, index: int, left: Tensor) -> None:
        """Add something, flat [elements], to what this rank has not sent yet of a group."""
        run = self.groups[index]
        if run.holdings and (run.chain is None or run.chain.folds):
            self.residuals.of(index)[0].add_(left)
        else:
            run.carry = left
            self.residuals.protect(index, everything=True)

    @property
    def bytes(self) -> int:
        """Memory that thinwire holds for this rank: residuals, message buffers, scratch of the codecs."""
        total = self.residuals.bytes
        for run in self.groups:
            total += run.outgoing.numel() + run.incoming.numel()
            total += run.chain.memory_bytes if run.chain is not None else 0
            for state in run.states:
                for value in vars(state).values():
                    if isinstance(value, Tensor) and value is not state.outgoing:
                        total += value.numel() * value.element_size()
                    elif isinstance(value, np.ndarray):
                        total += value.nbytes
        return total


def _saturate(mean: Tensor, dtype: str) -> Tensor | None:
    """Cut a float32 mean, the same on all ranks, to what a 16-bit dtype holds; what was cut off, if anything was."""
    if dtype not in ("float16", "bfloat16"):
        return None
    largest = torch.finfo(getattr(torch, dtype)).max
    low, high = torch.aminmax(mean) if mean.numel() else (mean.new_zeros(()), mean.new_zeros(()))
    if max(-float(low), float(high)) <= largest:
        return None
    cut = mean.clamp(-largest, largest)
    excess = mean - cut
    mean.copy_(cut)
    return excess
