"""One rank's state of all groups: codecs or chains, residuals, flags; commit a step at its end, or undo a void one.

Everything here is the same on `torch.distributed` and in memory: `run` yields collectives and never asks who carries
them out.
"""

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..chains.chain import Chain, exchanger
from ..codecs import Codec, CodecState
from ..codecs.driver import CodecDriver, all_finite
from ..codecs.schedule import Warmup
from ..comm.collectives import Collective, Place
from ..feedback import ResidualStore
from ..log import logger
from .layout import Group, Layout

NAN = float("nan")


@dataclass(frozen=True)
class Safety:
    """What an exchange does about values that are not finite, and about parameters that were not used.

    protected      residuals are as before after a void step, bit for bit: a copy of them is kept
    tests_results  a mean that is not finite makes the step void, also where no residual depends on it
    tracks_unused  what no rank used is not taken out of residuals, because DDP throws its mean away
    saturates      a mean that does not fit its bucket is cut, and the rest kept, instead of making the step void. Without a
                   scaler, which would halve its scale, the same mean would come again, and every step would be void
    """

    protected: bool = False
    tests_results: bool = False
    tracks_unused: bool = False
    saturates: bool = False


class GroupExchange:
    """One group on one rank: the codec, or the chain, that exchanges it, and what the current step found."""

    def __init__(self, group: Group, codec: Codec, place: Place) -> None:
        self.group, self.codec, self.info = group, codec, group.info()
        self.way = exchanger(codec.at(0), group.leaf(), self.info, place)
        self.used = self.way.now
        """The codec with the numbers of the last step, see `Codec.at`."""
        self.scheduled = any(isinstance(getattr(codec, name), Warmup) for name in codec.adjustable)
        self.excess: Tensor | None = None
        """What of this step's mean does not fit the dtype of its bucket."""
        self.inherited: Tensor | None = None
        """The residual of an earlier chain, to be added to the next gradient of a step that counts."""

    @property
    def chain(self) -> Chain | None:
        return self.way if isinstance(self.way, Chain) else None

    @property
    def driver(self) -> CodecDriver | None:
        return self.way if isinstance(self.way, CodecDriver) else None


@dataclass
class _Unused:
    """A parameter that this rank did not use in this step, and its residual from before."""

    position: int
    residual: Tensor
    before: Tensor


class RankState:
    """One rank's side of all exchanges of a layout."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        world: int,
        *,
        ranks_per_node: int | None = None,
        safety: Safety = Safety(),
    ) -> None:
        self.rank, self.world = rank, world
        place = Place(rank, world, ranks_per_node)
        self.step = 0
        self.settings: dict[str, float] = {}
        self.skipped = 0
        self.void = self.last_void = False
        self.scale = 1.0
        self.groups = [
            GroupExchange(group, codec, place) for group, codec in zip(layout.groups, layout.codecs(), strict=True)
        ]
        self.residuals = ResidualStore(
            [run.info for run in self.groups],
            [run.way.residual_parts for run in self.groups],
            protected=safety.protected,
        )
        self.protect(safety)
        self._places = {
            parameter.name: place
            for place, parameter in enumerate(
                parameter for run in self.groups if run.codec.keeps_residual for parameter in run.info.parameters
            )
        }
        self._unused: list[_Unused] = []
        self._warned = False

    def protect(self, safety: Safety) -> None:
        """From the next step on be as safe as this. Protection of residuals is added, never taken away."""
        # A dense result need only be tested where a residual, or an optimizer that is guarded, depends on it.
        tests = safety.tests_results or safety.protected or any(run.codec.keeps_residual for run in self.groups)
        self.safety = dataclasses.replace(safety, tests_results=tests)
        if safety.protected and not self.residuals.protected:
            self.residuals.protected = True
            for index in range(len(self.groups)):
                self.residuals.protect(index, everything=True)

    # -- one group -----------------------------------------------------------------------------------------------------

    def run(
        self, index: int, gradient: Tensor, riders: Tensor, unused: Sequence[str] = ()
    ) -> Generator[Collective, None, None]:
        """Exchange one group: gradient (flat [elements]) and riders (float32 [tail - 1]) hold the means afterwards.

        Parameters named in `unused` had no gradient on this rank; see `epilogue`.
        """
        run, parts, tests = self.groups[index], self.residuals.held[index], self.safety.tests_results
        residuals = [part.flat for part in parts]
        run.excess = None
        self._remember_unused(run, index, unused)
        for part in parts:
            if part.before is not None:
                part.before.copy_(part.flat)
        scaled = (run.codec.keeps_residual or run.inherited is not None) and self.scale != 1.0
        if scaled:
            gradient.mul_(1.0 / self.scale)
        if run.inherited is not None:
            gradient.add_(run.inherited)
        finite = yield from run.way.run(gradient, residuals, self.step, riders)
        if finite and (tests or residuals) and run.way.tests_result:
            finite = all_finite(gradient)
        if finite and scaled:
            gradient.mul_(self.scale)
        if finite and tests and gradient.dtype == torch.float32:
            if self.safety.saturates and (residuals or run.inherited is not None):
                run.excess = _saturate(gradient, run.group.dtype)
                if run.excess is not None and not self._warned and self.rank == 0:
                    self._warned = True
                    logger.warning(
                        "a mean in %s is larger than %s holds: it is cut, and the rest stays in the residuals; a GradScaler, "
                        "clipping or float32 parameters avoid it", run.info.name, run.group.dtype,
                    )  # fmt: skip
            finite = self._fits(gradient, run.group.dtype, scaled)
        if not finite:
            self.void = True
            gradient.fill_(NAN)
            riders.fill_(NAN)

    @staticmethod
    def _fits(result: Tensor, dtype: str, scaled: bool) -> bool:
        """Whether a float32 mean stays finite in the dtype of its bucket. A mean of finite values is, in float32."""
        if dtype in ("float16", "bfloat16"):
            return all_finite(result.to(getattr(torch, dtype)))
        return not scaled or all_finite(result)

    # -- the end of a step ---------------------------------------------------------------------------------------------

    def _remember_unused(self, run: GroupExchange, index: int, unused: Sequence[str]) -> None:
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
        if self.void:
            self.skipped += 1
            for index, run in enumerate(self.groups):
                run.way.undo(self.residuals.of(index))
                self.residuals.roll_back(index)
        else:
            by_codec: dict[tuple[Codec, str], list[CodecState]] = {}
            for index, run in enumerate(self.groups):
                by_codec.setdefault((run.way.now, run.group.chain), []).extend(run.way.states)
                run.way.observe()
                if run.inherited is not None:
                    run.inherited = None
                    self.residuals.protect(index, everything=False)
                if run.excess is not None:
                    self._keep(index, run.excess)
            for (codec, _), states in by_codec.items():
                if states:
                    codec.commit(states)
        for entry in self._unused:
            entry.residual.copy_(entry.before)
        self._unused.clear()
        self.last_void, self.void = self.void, False
        self.step += 1
        for run in self.groups:
            run.used = run.way.now
            if run.scheduled:
                run.way.use(run.codec.at(self.step, self.settings))

    def begin(self, step: int) -> None:
        """The next step is this one: codecs take the numbers that they have in it."""
        self.step = step
        for run in self.groups:
            run.way.use(run.codec.at(step, self.settings))

    def adjust(self, settings: Mapping[str, float]) -> None:
        """From the next step on, codecs that have these fields take these numbers."""
        self.settings |= settings
        self.begin(self.step)
        for run in self.groups:
            if set(run.codec.adjustable).intersection(settings):
                for state in run.way.states:
                    run.way.now.adjusted(state)

    @property
    def inherits(self) -> bool:
        """Whether residuals of an earlier chain wait for the next gradient."""
        return any(run.inherited is not None for run in self.groups)

    def unsent(self) -> dict[str, Tensor]:
        """What this rank has not sent yet, by name, shaped like the parameters; the sum over ranks is what is still to come."""
        unsent = dict(self.residuals.named())
        for run in self.groups:
            for p in run.info.parameters if run.inherited is not None else ():
                assert run.inherited is not None
                waiting = run.inherited[p.offset : p.offset + p.elements].view(p.shape)
                unsent[p.name] = unsent[p.name] + waiting if p.name in unsent else waiting
        return unsent

    def fold(self, unsent: Mapping[str, Tensor]) -> None:
        """Take over what other chains have not sent, by name, shaped like the parameters.

        It goes into the residual of a Comp that sees whole gradients, otherwise into the next gradient: until a step
        counts, all residuals of such a group are protected. Zeros are folded too: all ranks must take the same way.
        """
        for index, run in enumerate(self.groups):
            known = [parameter for parameter in run.info.parameters if parameter.name in unsent]
            if not known:
                continue
            inherited = torch.zeros(run.info.elements)
            for parameter in known:
                stop = parameter.offset + parameter.elements
                inherited[parameter.offset : stop] = unsent[parameter.name].reshape(-1)
            self._keep(index, inherited)

    def _keep(self, index: int, unsent: Tensor) -> None:
        """Add something, flat [elements], to what this rank has not sent yet of a group."""
        run = self.groups[index]
        if run.way.folds:
            self.residuals.of(index)[0].add_(unsent)
        else:
            run.inherited = unsent
            self.residuals.protect(index, everything=True)

    @property
    def bytes(self) -> int:
        """Memory that thinwire holds for this rank: residuals, message buffers, scratch of the codecs."""
        total = self.residuals.bytes
        for run in self.groups:
            total += run.way.memory_bytes
            for state in run.way.states:
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
