"""Restores a saved state: finds the part that is meant, checks that it fits, and fills an executor with it.

The state of this rank, of as many ranks, for the same codec, gives the same bits. Everything else is a conversion: what has
not been sent yet is kept, so that the mean over ranks is what it was, and a codec learns from scratch, except for
what is equal on all ranks (`CodecState.common`).

    another number of ranks     every rank takes the mean over the old ones
    a state of form "mean"      every rank takes it
    another codec or chain      every rank keeps its own, in the residual or for the next gradient
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..codecs import CodecState, ParameterInfo
from ..errors import StateError, ThinwireError
from .executor import Executor
from .layout import Group, Layout, TensorInfo
from .rank_state import GroupExchange, RankState
from .state import (
    FORMAT,
    MEAN,
    Array,
    Meta,
    Number,
    capacities,
    elementwise,
    member_of,
    numbered,
    others,
    remembered,
    views,
)
from .state_schema import State, decode, dtype_of, tensor_of
from .strategy import Strategy


@dataclass
class Source:
    """What of a state a rank goes on from: its own part, that of all ranks together, or those of all old ranks."""

    state: State
    metas: list[Meta]

    @property
    def meta(self) -> Meta:
        return self.metas[0]

    def own(self, rank: int, world: int) -> bool:
        """Whether it is the exact state of this rank."""
        return len(self.metas) == 1 and (self.meta.rank, self.meta.world) == (rank, world)

    def mean(self, key: str, like: Tensor) -> Tensor:
        """The mean of a tensor over its parts; in float64, so that it is rounded once."""
        total = torch.zeros(like.shape, dtype=torch.float64)
        for meta in self.metas:
            total += tensor_of(self.state, f"{meta.owner}.{key}", like)
        return (total / len(self.metas)).to(like.dtype)

    def left(self) -> dict[str, Tensor]:
        """What had not been sent yet, a mean over the parts, by name and shaped like the parameters."""
        assert self.meta.layout is not None
        left: dict[str, Tensor] = {}
        for index, group in enumerate(self.meta.layout.groups):
            for p in group.info().parameters:
                like = torch.empty(p.shape)
                total: Tensor | None = None
                for meta in self.metas:
                    keys = {numbered("residual", n): weight for n, weight in enumerate(meta.weights[index])}
                    keys |= {"carry": 1.0} if meta.carries[index] else {}
                    for key, weight in keys.items():
                        part = tensor_of(self.state, f"{meta.owner}.{key}.{p.name}", like).double() * weight
                        total = part if total is None else total + part
                if total is not None:
                    left[p.name] = (total / len(self.metas)).float()
        return left


def merge(saved: State | Sequence[State]) -> State:
    """One state of the states of several ranks."""
    parts = [saved] if isinstance(saved, Mapping) else saved
    if isinstance(parts, str | bytes) or not isinstance(parts, Sequence) or not parts:
        raise StateError(f"a state is a dictionary, as state_dict() gives it, or a list of them, not {saved!r:.60}")
    whole: dict[str, Any] = {}
    for part in parts:
        if not isinstance(part, Mapping):
            raise StateError(f"a state is a dictionary, as state_dict() gives it, not {type(part).__name__}")
        if len(parts) == 1:
            return part
        whole |= part
    return whole


def find(state: State, rank: int, world: int) -> Source:
    """What a rank of a job with `world` ranks goes on from; the first thing that is missing is named."""
    own = f"rank{rank}.thinwire"
    if own in state:
        meta = _read(state, f"rank{rank}")
        if meta.world == world:
            return Source(state, [meta])
    if f"{MEAN}.thinwire" in state:
        return Source(state, [_read(state, MEAN)])
    owners = [found[1] for key in map(str, state) if (found := re.fullmatch(r"(rank\d+)\.thinwire", key))]
    held = sorted({key.split(".")[0] for key in map(str, state) if key.startswith("rank")})
    old = _read(state, owners[0]).world if owners else world
    if old == world:
        raise StateError(
            f"this state holds nothing of rank {rank} (it has: {', '.join(held) or 'no rank at all'}): residuals "
            "differ from rank to rank, so every rank must save its own state_dict()"
        )
    for other in range(old):
        if f"rank{other}.thinwire" not in state:
            raise StateError(
                f"the state is of {old} ranks, and this job has {world}: it needs those of all old ranks, as in "
                f"load_state_dict([one, another, ...]), and that of rank {other} is missing; or one of form 'mean'"
            )
    metas = [_read(state, f"rank{other}") for other in range(old)]
    for meta in metas[1:]:
        for what in ("world", "progress", "codec", "chain", "plan", "settings", "layout", "buckets", "control"):
            ours, theirs = getattr(metas[0], what), getattr(meta, what)
            if ours != theirs:
                how = "different layouts" if what == "layout" else f"{what} {ours} and {theirs}"
                raise StateError(f"rank 0 and rank {meta.rank} of this state do not fit together: they have {how}")
    return Source(state, metas)


def _read(state: State, owner: str) -> Meta:
    key = f"{owner}.thinwire"
    meta = decode(state, key, Meta, FORMAT)
    if meta.owner != owner or not max(0, meta.rank) < meta.world:
        raise StateError(f"{key!r} says of itself that it is of {meta.owner} of {meta.world}")
    groups = len(meta.layout.groups) if meta.layout is not None else 0
    for name in ("weights", "carries", "capacities", "numbers", "arrays"):
        if len(getattr(meta, name)) != groups:
            raise StateError(f"{key!r} has {groups} groups, but {name} of {len(getattr(meta, name))}")
    return meta


# -- whether it fits ---------------------------------------------------------------------------------------------------


def check(meta: Meta, strategy: Strategy, tensors: Sequence[TensorInfo]) -> Strategy:
    """By which method it was saved. Refuses the state of another model; the first difference is named."""
    try:
        strategy.at(meta.step, kept_settings(meta, strategy))
    except (TypeError, ValueError) as error:
        raise StateError(f"'{meta.owner}.thinwire' has settings that {strategy} refuses: {error}") from None
    try:
        before = Strategy.saved(meta.codec, meta.chain) if meta.plan is None else Strategy.of(meta.plan)
        before.check(tensors, meta.world)
    except (ThinwireError, TypeError, ValueError) as error:
        raise StateError(f"'{meta.owner}.thinwire' was saved by a method that does not fit: {error}") from None
    if meta.layout is not None:
        _check_layout(meta.layout, tensors, before)
    if meta.buckets:
        names = [name for bucket in meta.buckets for name in bucket]
        dtypes = {tensor.name: tensor.dtype for tensor in tensors}
        if odd := set(names) ^ set(dtypes):
            where = "this model" if min(odd) in dtypes else "the state"
            raise StateError(f"the tensor {min(odd)!r} is only in {where}")
        if len(names) != len(dtypes) or any(len({dtypes[name] for name in bucket}) > 1 for bucket in meta.buckets):
            raise StateError(f"'{meta.owner}.thinwire' has buckets that DDP does not make")
    return before


def kept_settings(meta: Meta, strategy: Strategy) -> dict[str, float]:
    """The numbers set by hand that this method has too."""
    return {k: v for k, v in meta.settings.items() if strategy.codec == meta.codec or k in strategy.adjustable}


def _check_layout(layout: Layout, tensors: Sequence[TensorInfo], strategy: Strategy) -> None:
    """A layout that fits this model: every tensor in its place, without gaps or overlaps."""
    expected = {tensor.name: tensor for tensor in tensors}
    places: dict[str, list[tuple[str, str]]] = {}
    for group in layout.groups:
        _check_group(group, expected)
        parts = {(str(p.codec), p.chain) for slot in group.slots if (p := strategy.of_tensor(slot.name)) is not None}
        if group.codec not in {codec for codec, _ in parts} | {"dense"}:
            raise StateError(f"{group.name!r} has codec {group.codec} in a state of {strategy}")
        if (group.codec, group.chain) not in parts | {("dense", "")}:
            raise StateError(f"{group.name!r} has the chain {group.chain!r} in a state of {strategy.full}")
        if group.codec != "dense" and len(parts) > 1:
            raise StateError(f"{group.name!r} has tensors that the plan of this state sends by different codecs")
        for slot in group.slots:
            places.setdefault(slot.name, []).append((slot.role, group.codec))
    for name in expected:
        if name not in places:
            raise StateError(f"the state lacks the tensor {name!r} of this model")
        part = strategy.of_tensor(name)
        rides = part is not None and part.codec.rides and not part.chain and places[name][0][1] == str(part.codec)
        roles = [role for role, _ in places[name]]
        once = roles == ["coded"] or (roles == ["ride"] and rides)
        if not once and not (roles == ["elsewhere", "coded"] and places[name][1][1] == "dense"):
            raise StateError(f"{name!r} has a place in the state that no layout gives it: {', '.join(roles)}")


def _check_group(group: Group, expected: Mapping[str, TensorInfo]) -> None:
    offset = 0
    for slot in group.slots:
        tensor = expected.get(slot.name)
        if tensor is None:
            raise StateError(f"the state has a tensor {slot.name!r} that this model does not have")
        if tensor.shape != slot.shape:
            raise StateError(f"{slot.name!r} has shape {slot.shape} in the state and {tensor.shape} in this model")
        if tensor.dtype != group.dtype:
            raise StateError(f"{slot.name!r} is {group.dtype} in the state and {tensor.dtype} in this model")
        if tensor.kind != slot.kind:
            raise StateError(f"{slot.name!r} is of kind {slot.kind} in the state and {tensor.kind} in this model")
        if (slot.offset, slot.elements) != (offset, tensor.elements):
            raise StateError(
                f"{slot.name!r} has {slot.elements} elements at offset {slot.offset} of {group.name!r} in the state; "
                f"{tensor.elements} at offset {offset} would be right"
            )
        offset += slot.elements
    if group.elements != offset or not group.slots:
        raise StateError(f"{group.name!r} has {group.elements} elements in the state, its tensors have {offset}")


# -- what becomes of it: executors are new here, and thrown away if something does not fit ---------------------------------


def exact(executor: Executor, source: Source) -> None:
    """Fill a runner that was made with the layout of a rank's own state: it goes on with the same bits."""
    meta, state = source.meta, source.state
    rank_state = member_of(executor, meta.rank)

    def take(field: str, parameter: ParameterInfo, inside: slice, target: Tensor) -> None:
        like = torch.empty(parameter.shape, dtype=target.dtype)
        target.copy_(tensor_of(state, f"{meta.owner}.{field}.{parameter.name}", like).reshape(-1)[inside])

    for number, parameter, inside, target in rank_state.residuals.pieces():
        take(numbered("residual", number), parameter, inside, target)
    left: dict[str, Tensor] = {}
    for index, run in enumerate(rank_state.groups):
        for tag, number, start, codec_state in remembered(run):
            _remember(run, codec_state, others(codec_state), tag, meta.numbers[index], meta.arrays[index])
            for field in elementwise(codec_state):
                for piece in views(run.info, codec_state, start, torch.as_tensor(getattr(codec_state, field))):
                    take(numbered(field, number), *piece)
        for p in run.info.parameters if meta.carries[index] else ():
            left[p.name] = tensor_of(state, f"{meta.owner}.carry.{p.name}", torch.empty(p.shape))
        _observe(run, meta.capacities[index])
    rank_state.fold(left)
    _go_on(executor, rank_state, meta, meta.settings)


def converted(executor: Executor, rank: int, source: Source, settings: Mapping[str, float]) -> None:
    """Fill a runner of another number of ranks, another codec or another chain. Nothing that was to be sent is lost."""
    meta, rank_state = source.meta, member_of(executor, rank)
    assert meta.layout is not None
    left = source.left()
    lost = set(left) - {p.name for run in rank_state.groups for p in run.info.parameters}
    if lost:
        raise StateError(
            f"{min(lost)!r} has a residual in the state, and none here, because it is small or excluded: give `attach` the "
            "min_elements and exclude that it had when the state was saved"
        )
    before = {group: index for index, group in enumerate(meta.layout.groups)}
    for run in rank_state.groups:
        index = before.get(run.group)
        if index is None or run.driver is None:
            continue
        own = run.driver.state
        common = [field for field in own.common if field in {*meta.numbers[index], *meta.arrays[index]}]
        _remember(run, own, common, "", meta.numbers[index], meta.arrays[index])
        for field in elementwise(own):
            flat = torch.as_tensor(getattr(own, field))
            for p in run.info.parameters:
                target = flat[p.offset : p.offset + p.elements].view(p.shape)
                target.copy_(source.mean(f"{field}.{p.name}", target))
        if meta.world == executor.world.size:
            _observe(run, meta.capacities[index])
        run.driver.now.adjusted(own)
    rank_state.fold(left)
    _go_on(executor, rank_state, meta, settings)


def _go_on(executor: Executor, rank_state: RankState, meta: Meta, settings: Mapping[str, float]) -> None:
    rank_state.settings, rank_state.skipped = dict(settings), meta.skipped
    rank_state.begin(meta.step)
    executor.statistics.skipped = meta.skipped


def _observe(run: GroupExchange, saved: Sequence[Sequence[int]]) -> None:
    own = capacities(run)
    if len(saved) != len(own):
        raise StateError(f"{run.info.name!r} has {len(saved)} kinds of messages in the state, here {len(own)}")
    for capacity, recent in zip(own, saved, strict=True):
        capacity.recent.clear()
        for wanted in recent:
            capacity.observe(wanted)


def _remember(
    run: GroupExchange,
    codec_state: CodecState,
    fields: Sequence[str],
    tag: str,
    numbers: Mapping[str, Number],
    arrays: Mapping[str, Array],
) -> None:
    try:
        for field in fields:
            present = getattr(codec_state, field)
            saved = arrays.get(field + tag) if isinstance(present, Tensor | np.ndarray) else numbers.get(field + tag)
            try:
                setattr(codec_state, field, _value_like(present, saved))
            except ValueError as error:
                raise ValueError(f"{field!r} {error}") from None
        codec_state.check()
    except ValueError as error:
        raise StateError(f"{run.info.name!r}, codec {run.codec}: {error}") from None


def _value_like(present: Any, saved: Array | Number | None) -> Any:
    """What is saved, if it can stand in the place of `present`."""
    if saved is None:
        raise ValueError("is missing")
    if isinstance(saved, Array):
        like = torch.as_tensor(present)
        found = f"{saved.dtype} {saved.shape}, {len(saved.data)} bytes"
        if (saved.dtype, saved.shape, len(saved.data)) != (dtype_of(like), tuple(like.shape), like.nbytes):
            raise ValueError(f"should be {dtype_of(like)} {tuple(like.shape)}, {like.nbytes} bytes, but is {found}")
        tensor = torch.empty_like(like)
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(saved.data, np.uint8)
        return tensor.numpy() if isinstance(present, np.ndarray) else tensor
    if type(saved) is not type(present) and not (isinstance(present, float) and type(saved) is int):
        raise ValueError(f"should be a {type(present).__name__}, but is {saved!r}")
    return type(present)(saved)
