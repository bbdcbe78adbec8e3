"""Checkpoints of a wire: as a dictionary, as files, through `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ..errors import StateError
from ..log import logger
from ..version import __version__
from . import files, restore, state
from .consensus import load_alike
from .layout import Layout
from .session import Session
from .state_schema import encode
from .strategy import Strategy

Form = Literal["exact", "mean"]


class Checkpointer:
    """Saves and loads what a session has learnt; `Wire` has the same methods, and says what they do.

    adopts  whether a state that was saved by another plan brings that plan with it, instead of being converted
    """

    def __init__(self, session: Session, *, adopts: bool = False) -> None:
        self.session, self.adopts = session, adopts

    def state_dict(self, form: Form = "exact") -> dict[str, Any]:
        if form not in ("exact", "mean"):
            raise ValueError(f"state_dict({form!r}): there is 'exact' and 'mean'")
        session, result = self.session, dict[str, Any]()
        if form == "mean":
            session.meet("state_dict(form='mean')")
            meta = self._meta(-1)
            if session.executor is not None:
                return state.mean(session.executor, meta, session.average_)
            return {f"{meta.owner}.thinwire": encode(meta), **state.blank(self._loose_layout(), meta)}
        for rank in session.world.local_ranks:
            meta = self._meta(rank)
            result |= state.exact(session.executor, meta)
            if session.executor is None:
                result |= state.blank(self._loose_layout(), meta)
        return result

    def _meta(self, rank: int) -> state.Meta:
        session = self.session
        buckets = session.partition or () if session.executor is None else session.control_partition
        control = session.progress.control
        return state.Meta(
            state.FORMAT,
            __version__,
            rank,
            session.world.size,
            session.strategy.codec,
            session.strategy.chain,
            dense_steps=session.progress.dense_steps,
            buckets=[list(names) for names in buckets],
            settings=dict(session.settings),
            plan=session.strategy.plan,
            control=session.steps + control if control else msgspec.UNSET,
        )

    def _loose_layout(self) -> Layout:
        return self.session.layout([[tensor] for tensor in self.session.job.tensors])

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        self._prepare(saved)[2]()

    def _prepare(
        self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> tuple[state.Meta, str, Callable[[], None]]:
        """What a state is, a digest of what all ranks must have learnt alike, and what loads it; refuses what does not fit."""
        session, whole = self.session, restore.merge(saved)
        size = session.world.size
        sources = [restore.find(whole, rank, size) for rank in session.world.local_ranks]
        meta = sources[0].meta
        for source in sources:
            before = restore.check(source.meta, session.strategy, session.job.tensors)
            if source.meta.layout != meta.layout:
                raise StateError("the ranks of this state have different layouts")
        # Rounds of plans were made ready when the wire was, chains between nodes were not.
        strategy = before if self.adopts and not before.chains else session.strategy
        settings, candidate = restore.kept_settings(meta, strategy), None
        if meta.layout is None:
            if session.step > 0:
                raise StateError(
                    "the state was saved before the layout was frozen; this wire has already begun to compress"
                )
        else:
            same = before.facts() == strategy.facts()
            layout = meta.layout if same else session.layout(meta.layout.buckets(), strategy)
            candidate = session.make(layout, strategy)
            for rank, source in zip(session.world.local_ranks, sources, strict=True):
                if same and source.own(rank, size):
                    restore.exact(candidate, source)
                else:
                    restore.converted(candidate, rank, source, settings)
            if len({state.agreement(candidate, rank) for rank in session.world.local_ranks}) > 1:
                raise StateError(
                    "the ranks of this state have learnt different things: their messages would not fit together"
                )

        def load() -> None:
            session.strategy = strategy
            if candidate is not None:
                session.use(candidate)
            session.settings, session.progress.dense_steps = settings, meta.dense_steps
            buckets = [tuple(names) for names in meta.buckets]
            if session.executor is None:
                session.partition = buckets or None
            else:
                session.control_partition = buckets
            session.progress.control = 0
            if meta.control is not msgspec.UNSET and candidate is not None and not strategy.direct:
                session.progress.control = max(0, meta.control - meta.dense_steps - meta.step)
            self._explain(meta, before)

        learnt = state.agreement(candidate, session.world.local_ranks[0]) if candidate is not None else ""
        return meta, learnt, load

    def _explain(self, meta: state.Meta, before: Strategy) -> None:
        session = self.session
        if session.world.local_ranks[0] != 0 or meta.layout is None:
            return
        if meta.world != session.world.size:
            logger.info(
                "the state is of %d ranks, this job has %d: every rank goes on with the mean of what they had not sent",
                meta.world, session.world.size,
            )  # fmt: skip
        if before.facts() != session.strategy.facts():
            logger.info(
                "the state is of %s: residuals are kept, and %s starts to learn from scratch",
                before.full,
                session.strategy.full,
            )

    def save(self, folder: files.Where, form: Form = "exact") -> None:
        world = self.session.world
        files.write_all(folder, self.state_dict(form), world, self.session.steps, shared=form == "mean")

    def load(self, where: files.Where | Sequence[files.Where], *, key: str | None = None) -> None:
        world = self.session.world

        def prepare() -> tuple[Callable[[], None], dict[str, Any]]:
            meta, learnt, load = self._prepare(files.read(where, world.local_ranks, world.size, key))
            return load, {
                "state": {"ranks": meta.world, "mean": meta.rank < 0, "steps": meta.progress},
                "learnt": learnt,
            }

        load_alike(prepare, self.session.agree)()
