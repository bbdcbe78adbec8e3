"""How a wire is saved and loaded: as a dictionary, as files, by `torch.distributed.checkpoint`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from ..errors import AttachError, ExchangeError, StateError, WireClosed
from ..log import logger
from ..schemes.collective import Collective
from ..schemes.world import TorchWorld, World
from ..version import __version__
from . import files, restore, state
from .agree import agree
from .layout import Layout, TensorInfo
from .method import Method
from .runner import SLICE_SECONDS, Runner

Form = Literal["exact", "mean"]


class Checkpoint:
    """The part of `Wire` that has to do with saved states."""

    world: World
    method: Method
    tensors: list[TensorInfo]
    runner: Runner | None
    settings: dict[str, float]
    dense_steps: int
    _partition: list[tuple[str, ...]] | None
    """What one all-reduce takes in dense steps, where it is not what comes along."""

    @property
    def error(self) -> BaseException | None:
        """What closed this wire, if it is closed."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _layout(self, buckets: Sequence[Sequence[TensorInfo]], method: Method | None = None) -> Layout:
        """How this wire, or one with another method, would cut these buckets."""
        raise NotImplementedError

    def _make(self, layout: Layout) -> Runner:
        raise NotImplementedError

    def _use(self, runner: Runner) -> Runner:
        raise NotImplementedError

    def state_dict(self, form: Form = "exact") -> dict[str, Any]:
        """Residuals, what codecs remember, step and layout.

        "exact"  of this rank, for as many ranks and the same bits. Local, never a collective; every rank saves its own
        "mean"   the same on all ranks, for any number of them: one residual in all, their mean. **A collective**: every rank
                 calls it, between two steps; one may save it, all must load it
        """
        if form not in ("exact", "mean"):
            raise ValueError(f"state_dict({form!r}): there is 'exact' and 'mean'")
        result: dict[str, Any] = {}
        if form == "mean":
            self._meet("state_dict(form='mean')")
            meta = self._meta(-1)
            if self.runner is not None:
                return state.mean(self.runner, meta, self.average_)
            return {f"{meta.owner}.thinwire": meta.to_json(), **state.blank(self._loose_layout(), meta)}
        for rank in self.world.members:
            meta = self._meta(rank)
            result |= state.exact(self.runner, meta)
            if self.runner is None:
                result |= state.blank(self._loose_layout(), meta)
        return result

    def _meta(self, rank: int) -> state.Meta:
        return state.Meta(
            state.FORMAT,
            __version__,
            rank,
            self.world.size,
            self.method.codec,
            self.method.chain,
            dense_steps=self.dense_steps,
            buckets=[list(names) for names in self._partition or ()] if self.runner is None else [],
            settings=dict(self.settings),
            plan=self.method.plan,
        )

    def _loose_layout(self) -> Layout:
        return self._layout([[tensor] for tensor in self.tensors])

    def _meet(self, purpose: str) -> None:
        """Come together with all ranks for the same purpose, at the same step."""
        if self.error is not None:
            raise WireClosed(f"this wire is closed: {self.error}") from self.error
        busy = "an exchange is under way" if self.runner is not None and self.runner.busy else None
        if isinstance(self.world, TorchWorld):
            agree(self.world.parent, {"purpose": purpose, "step": self.steps}, busy)
        elif busy is not None:
            raise ExchangeError(f"{purpose}: {busy}")

    @property
    def steps(self) -> int:
        """Steps since training began, those before a resume included."""
        return self.dense_steps + (self.runner.members[0].step if self.runner is not None else 0)

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace one tensor of each rank in this process by its plain mean, outside of any step. Every rank calls it alike."""
        if self.error is not None:
            raise WireClosed(f"this wire is closed: {self.error}") from self.error
        woken = threading.Event()
        pending = self.world.issue(0, [Collective("average", tensor) for tensor in tensors], woken.set)
        try:
            while not pending.done():
                woken.wait(SLICE_SECONDS)
            pending.check()
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError):
                place = f"all-reduce (average) outside of steps, rank {self.world.members[0]}"
                raise ExchangeError(f"{place}: {error}") from error
            raise

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where `state_dict()` was taken. Local; refuses what does not fit, changing nothing.

        The state of this rank gives the same bits as a job that was never interrupted. If the number of ranks has changed, give
        a list with the states of all old ranks, or one of form "mean": every rank then goes on with the mean of what the old
        ones had not sent. Another codec or chain keeps the residuals and learns anew. All ranks must load alike.
        """
        self._prepare(saved)[2]()

    def _prepare(
        self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> tuple[state.Meta, str, Callable[[], None]]:
        """What a state is, a digest of what all ranks must have learnt alike, and what loads it; refuses what does not fit."""
        whole = restore.merge(saved)
        size = self.world.size
        sources = [restore.find(whole, rank, size) for rank in self.world.members]
        meta = sources[0].meta
        for source in sources:
            before = restore.check(source.meta, self.method, self.tensors)
            if source.meta.layout != meta.layout:
                raise StateError("the ranks of this state have different layouts")
        method = self._method_after(before)
        settings, candidate = restore.kept_settings(meta, method), None
        if meta.layout is None:
            if self.runner is not None and any(member.step for member in self.runner.members):
                raise StateError(
                    "the state was saved before the layout was frozen; this wire has already begun to compress"
                )
        else:
            same = before.facts() == method.facts()
            candidate = self._make(meta.layout if same else self._layout(meta.layout.buckets(), method))
            for rank, source in zip(self.world.members, sources, strict=True):
                if same and source.own(rank, size):
                    restore.exact(candidate, source)
                else:
                    restore.converted(candidate, rank, source, settings)
            if len({state.agreement(candidate, rank) for rank in self.world.members}) > 1:
                raise StateError(
                    "the ranks of this state have learnt different things: their messages would not fit together"
                )

        def load() -> None:
            self.method = method
            if candidate is not None:
                self._use(candidate)
            self.settings, self.dense_steps = settings, meta.dense_steps
            self._resume(meta)
            self._explain(meta, before)

        learnt = state.agreement(candidate, self.world.members[0]) if candidate is not None else ""
        return meta, learnt, load

    def _method_after(self, saved: Method) -> Method:
        """How this wire exchanges once it has loaded a state of this method."""
        return self.method

    def _resume(self, meta: state.Meta) -> None:
        """What else a frontend takes from a state that fits."""

    def _explain(self, meta: state.Meta, before: Method) -> None:
        """Say once what was not simply taken over."""
        if self.world.members[0] != 0 or meta.layout is None:
            return
        if meta.world != self.world.size:
            logger.info(
                "the state is of %d ranks, this job has %d: every rank goes on with the mean of what they had not sent",
                meta.world, self.world.size,
            )  # fmt: skip
        if before.facts() != self.method.facts():
            logger.info(
                "the state is of %s: residuals are kept, and %s begins to learn anew", before.full, self.method.full
            )

    def save(self, folder: files.Where, form: Form = "exact") -> None:
        """Write `state_dict(form)` as safetensors files: one a rank, or one in all, each whole or not at all.

        Every rank calls it. With "exact" it is no collective, and rank 1 of 2 writes `folder/rank1-of-2.safetensors`. With
        "mean" it is one, and rank 0 writes `folder/mean.safetensors`.
        """
        if form == "mean":
            whole = self.state_dict("mean")
            if self.world.members[0] == 0:
                files.write(folder, files.name_of(None, self.world.size), whole, self.steps)
            return
        whole = self.state_dict(form)
        for rank in self.world.members:
            own = {key: value for key, value in whole.items() if key.startswith(f"rank{rank}.")}
            files.write(folder, files.name_of(rank, self.world.size), own, self.steps)

    def load(self, where: files.Where | Sequence[files.Where], *, key: str | None = None) -> None:
        """Go on from files of `save`: a folder, a file, or several; see `load_state_dict`.

        **A collective**: all ranks load, from the same step, or none does.
        In a folder the newest complete set counts, those for this number of ranks before others. The folder may also be one of
        `torch.distributed.checkpoint`, of any number of ranks; `key` says where in it, if it has several wires.
        """
        facts: dict[str, Any] = {}
        problem: StateError | None = None
        load = None
        try:
            meta, learnt, load = self._prepare(files.read(where, self.world.members, self.world.size, key))
            facts = {"state": {"ranks": meta.world, "mean": meta.rank < 0, "steps": meta.progress}, "learnt": learnt}
        except StateError as error:  # the other ranks wait to hear of it
            problem = error
        if isinstance(self.world, TorchWorld):
            try:
                agree(self.world.parent, facts, str(problem) if problem is not None else None)
            except AttachError as error:
                raise problem or StateError(str(error)) from None
        if problem is not None:
            raise problem
        assert load is not None
        load()
