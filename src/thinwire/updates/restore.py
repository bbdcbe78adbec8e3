"""Loads a checkpoint of local updates: finds what this job needs in it, checks that it fits, then fills the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine import restore
from ..engine.state_schema import decode, encode, tensor_of
from ..errors import StateError
from ..log import logger
from . import options
from .checkpoint import FORMAT, Meta
from .job import UpdateJob
from .replica import detached


def load(job: UpdateJob, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Resume from one state, or from those of several ranks. Everything is checked before anything is changed."""
    saved, ranks = restore.merge(saved), job.world.local_ranks
    if "folded.updates" not in saved and "rank0.updates" in saved:
        old, now = _decode(saved, "rank0").world, job.world.size
        if old != now:
            saved = fold(job, saved)
            if ranks[0] == 0:
                logger.info("the state is of %d ranks, this job has %d: it resumes from the settled model", old, now)
    is_folded = "folded.updates" in saved
    states = [_ReplicaState(job, r, saved, "folded" if is_folded else f"rank{rank}") for r, rank in enumerate(ranks)]
    meta, balance = states[0].meta, job.balance
    if is_folded:
        job.backend.reset(meta.draws)
    else:
        job.backend.load_state_dict(saved)
        job.backend.restart(meta.draws)
    job.steps, job.skipped, job.local_skipped, job.local = meta.steps, meta.skipped, meta.local_skipped, meta.local
    balance.common, balance.total, balance.exchanges = meta.common, meta.total, meta.exchanges
    if balance.feedback.automatic:
        balance.strength = meta.strength
    for r, state in enumerate(states):
        state.fill(job.backend.residuals[r], balance.strength)


def fold(job: UpdateJob, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The folded state of the exact ones of all old ranks, for another number of ranks; see `checkpoint.folded`."""
    first = _decode(saved, "rank0")
    for rank in range(first.world):
        if f"rank{rank}.updates" not in saved:
            raise StateError(
                f"the state is of {first.world} ranks, and this job has {job.world.size}: it needs those of all old "
                f"ranks, and that of rank {rank} is missing; or one of kind 'folded'"
            )
    metas = [_decode(saved, f"rank{rank}") for rank in range(first.world)]
    for rank, meta in enumerate(metas):
        if meta.rank != rank:
            raise StateError(f"'rank{rank}.updates' says that it is of rank {meta.rank}")
        for what in ("world", "steps", "local"):
            ours, theirs = getattr(first, what), getattr(meta, what)
            if ours != theirs:
                raise StateError(
                    f"rank 0 and rank {rank} of this state do not fit together: they have {what} {ours} and {theirs}"
                )
    residuals = [{} if m.one_pass else restore.find(saved, rank, m.world).left() for rank, m in enumerate(metas)]
    state: dict[str, Any] = {}

    def mean(key: str, like: Tensor) -> Tensor:
        total = torch.zeros(like.shape, dtype=torch.float64)
        for rank in range(first.world):
            total += tensor_of(saved, f"rank{rank}.{key}", like) if f"rank{rank}.{key}" in saved else 0.0
        return (total / first.world).to(like.dtype)

    for slot in job.replicas[0].slots:
        shared = tensor_of(saved, f"shared.{slot.name}", slot.shared)
        pending = torch.zeros(shared.shape, dtype=torch.float64)
        for rank, meta in enumerate(metas):
            if meta.one_pass:
                pending += tensor_of(saved, f"rank{rank}.residual.{slot.name}", shared)
                continue
            residual = residuals[rank].get(slot.name)
            pending += 0.0 if residual is None else residual
            if meta.local:
                point = tensor_of(saved, f"rank{rank}.point.{slot.name}", slot.point.detach())
                pending += detached(shared, residual, meta.strength) - point
        state[f"folded.shared.{slot.name}"] = (shared - pending / first.world).float()
        for rank in range(first.world):
            for key, tensor in _optimizer_state(saved, f"rank{rank}", slot.name).items():
                name = f"optimizer.{slot.name}.{key}"
                if isinstance(tensor, Tensor) and f"folded.{name}" not in state:
                    state[f"folded.{name}"] = mean(name, tensor)
    for name, buffer in job.replicas[0].buffers.items():
        state[f"folded.buffer.{name}"] = mean(f"buffer.{name}", buffer)
    first.begun = [slot.name for slot in job.replicas[0].slots if any(slot.name in meta.begun for meta in metas)]
    first.folded, first.local, first.local_skipped = True, 0, 0
    state["folded.updates"] = encode(first)
    return state


class _ReplicaState:
    """What a checkpoint holds for one replica, checked to fit."""

    def __init__(self, job: UpdateJob, r: int, saved: Mapping[str, Any], owner: str) -> None:
        self.replica, self.meta = job.replicas[r], _read_meta(job, saved, owner, job.world.local_ranks[r])
        slots = self.replica.slots
        shared = "folded.shared" if self.meta.folded else "shared"
        self.shared = [tensor_of(saved, f"{shared}.{slot.name}", slot.shared) for slot in slots]
        self.points: list[Tensor] | None = None
        if self.meta.local and not self.meta.folded:
            self.points = [tensor_of(saved, f"{owner}.point.{slot.name}", slot.point.detach()) for slot in slots]
        self.buffers = {
            name: tensor_of(saved, f"{owner}.buffer.{name}", buffer) for name, buffer in self.replica.buffers.items()
        }
        self.optimizer_states: list[dict[str, Any]] = []
        for slot in slots:
            state: dict[str, Any] = dict(self.meta.numbers.get(slot.name, {}))
            for key, like in _optimizer_state(saved, owner, slot.name).items():
                name = f"{owner}.optimizer.{slot.name}.{key}"
                if not _is_plain(like) or (like.dim() and like.shape != slot.point.shape):
                    raise StateError(f"{name!r} does not fit the parameter, of shape {tuple(slot.point.shape)}")
                state[key] = tensor_of(saved, name, like)
            self.optimizer_states.append(state if slot.name in self.meta.begun else {})

    def fill(self, residuals: Sequence[Tensor | None], strength: float) -> None:
        """Give the replica what was saved; its residuals have been loaded."""
        optimizer = self.replica.optimizer
        for i, slot in enumerate(self.replica.slots):
            slot.shared.copy_(self.shared[i])
            slot.write(detached(slot.shared, residuals[i], strength) if self.points is None else self.points[i])
            state = self.optimizer_states[i]
            if state or slot.point in optimizer.state:
                optimizer.state[slot.point] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        for name, buffer in self.buffers.items():
            self.replica.buffers[name].copy_(buffer)
        for group, saved in zip(optimizer.param_groups, self.meta.options, strict=True):
            options.load(group, saved)


def _optimizer_state(saved: Mapping[str, Any], owner: str, name: str) -> dict[str, Any]:
    """What a state holds of the optimizer's state of a parameter, by key."""
    prefix = f"{owner}.optimizer.{name}."
    found = {key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)}
    return {key: value for key, value in found.items() if "." not in key}


def _is_plain(value: Any) -> bool:
    """Whether it is a dense tensor with data, as an optimizer's state has."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not (value.is_meta or value.is_quantized or value.is_complex())
    )


def _decode(saved: Mapping[str, Any], owner: str) -> Meta:
    return decode(saved, f"{owner}.updates", Meta, FORMAT)


def _read_meta(job: UpdateJob, saved: Mapping[str, Any], owner: str, rank: int) -> Meta:
    key = f"{owner}.updates"
    if key not in saved:
        owners = sorted({name.split(".")[0] for name in map(str, saved) if name.endswith(".updates")})
        raise StateError(
            f"this state holds nothing of rank {rank} (it has: {', '.join(owners) or 'no rank at all'}): every rank must save "
            "its own state_dict(), or all load one of kind 'folded'"
        )
    meta, replica = _decode(saved, owner), job.replicas[0]
    if len(meta.options) != len(replica.optimizer.param_groups):
        raise StateError(
            f"the state has {len(meta.options)} parameter groups, the optimizer has {len(replica.optimizer.param_groups)}"
        )
    for index, saved_options in enumerate(meta.options):
        if problem := options.refuses(replica.optimizer, index, saved_options):
            raise StateError(f"{key!r}: options[{index}]: {problem}")
    names = {slot.name for slot in replica.slots}
    if odd := sorted(names ^ set(meta.numbers)):
        where = "this model" if odd[0] in names else "the state"
        raise StateError(f"the parameter {odd[0]!r} is only in {where}")
    if meta.folded != (owner == "folded"):
        raise StateError(f"{key!r} says that it is {'folded' if meta.folded else 'of one rank'}")
    if meta.folded:
        return meta
    if (meta.rank, meta.world) != (rank, job.world.size):
        raise StateError(
            f"the state is of rank {meta.rank} of {meta.world}; this is rank {rank} of {job.world.size}. "
            "state_dict('folded') gives a state for any number of ranks"
        )
    for what, theirs, ours in (
        ("codec", meta.codec, str(job.codec)),
        ("feedback", meta.feedback, repr(job.balance.feedback)),
        ("one pass", meta.one_pass, job.backend.one_pass),
    ):
        if theirs != ours:
            raise StateError(f"the state was saved with {what} {theirs}; this job has {ours}")
    if meta.local >= job.period:
        raise StateError(f"the state was saved {meta.local} local steps into a period; the period is now {job.period}")
    return meta
