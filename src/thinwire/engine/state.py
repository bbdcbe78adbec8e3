"""What a checkpoint holds of a rank, and when it is refused.

A flat dictionary whose keys all carry the rank, because tensors under the same key on several ranks are taken for
replicas by `torch.distributed.checkpoint`:

    rank0.thinwire          a JSON text: versions, world, step, layout, capacities, numbers of the codecs
    rank0.residual.NAME     float32, shaped like the parameter
    rank0.codec.GROUP.FIELD a tensor that a codec remembers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..errors import StateError
from ..version import __version__
from .layout import Layout, TensorInfo
from .runner import Runner

FORMAT = 1


class Meta(msgspec.Struct, forbid_unknown_fields=True):
    """The part of a state that is not tensors."""

    format: int
    version: str
    rank: int
    world: int
    codec: str
    step: int = 0
    skipped: int = 0
    layout: Layout | None = None
    capacities: list[list[int]] = []
    numbers: list[dict[str, float | int | bool | str]] = []


def save(runner: Runner | None, *, rank: int, world: int, codec: str) -> dict[str, Any]:
    """The state of one rank; tensors are copies."""
    meta = Meta(FORMAT, __version__, rank, world, codec)
    state: dict[str, Any] = {}
    if runner is not None:
        member = runner.members[list(runner.world.members).index(rank)]
        meta.layout, meta.step, meta.skipped = runner.layout, member.step, member.skipped
        for name, residual in member.residuals.named():
            state[f"rank{rank}.residual.{name}"] = residual.clone()
        for run in member.groups:
            meta.capacities.append(list(run.capacity.recent) if run.capacity else [])
            numbers: dict[str, float | int | bool | str] = {}
            for field in run.state.saved:
                value = getattr(run.state, field)
                if isinstance(value, np.ndarray):
                    value = torch.from_numpy(value)
                if isinstance(value, Tensor):
                    state[f"rank{rank}.codec.{run.info.name}.{field}"] = value.clone()
                else:
                    numbers[field] = value
            meta.numbers.append(numbers)
    state[f"rank{rank}.thinwire"] = msgspec.json.encode(meta).decode()
    return state


def read_meta(state: Mapping[str, Any], *, rank: int, world: int, codec: str, tensors: Sequence[TensorInfo]) -> Meta:
    """The meta part of this rank's state, or an error that names the first thing that does not fit."""
    key = f"rank{rank}.thinwire"
    if key not in state:
        held = sorted({name.split(".")[0] for name in state if name.startswith("rank")})
        raise StateError(
            f"this state holds nothing of rank {rank} (it has: {', '.join(map(str, held)) or 'no rank at all'}): residuals "
            "differ from rank to rank, so every rank must save its own state_dict()"
        )
    try:
        meta = msgspec.json.decode(state[key], type=Meta)
    except (msgspec.MsgspecError, TypeError, UnicodeError) as error:
        raise StateError(f"{key!r} cannot be read: {error}") from error
    if meta.format != FORMAT:
        raise StateError(f"the state has format {meta.format}; version {__version__} reads format {FORMAT}")
    if (meta.rank, meta.world) != (rank, world):
        raise StateError(f"the state is of rank {meta.rank} of {meta.world}; this is rank {rank} of {world}")
    if meta.codec != codec:
        raise StateError(f"the state was saved with codec {meta.codec}; this wire uses {codec}")
    if meta.layout is not None:
        _check_layout(meta.layout, tensors)
        if len(meta.capacities) != len(meta.layout.groups) or len(meta.numbers) != len(meta.layout.groups):
            raise StateError(
                f"{key!r} has {len(meta.layout.groups)} groups, but capacities or numbers of another count"
            )
        meta.layout.codecs()
    return meta


def _check_layout(layout: Layout, tensors: Sequence[TensorInfo]) -> None:
    expected = {tensor.name: tensor for tensor in tensors}
    seen: set[str] = set()
    for group in layout.groups:
        for slot in group.slots:
            tensor = expected.get(slot.name)
            if tensor is None:
                raise StateError(f"the state has a tensor {slot.name!r} that this model does not have")
            if tensor.shape != slot.shape:
                raise StateError(f"{slot.name!r} has shape {slot.shape} in the state and {tensor.shape} in this model")
            if tensor.dtype != group.dtype:
                raise StateError(f"{slot.name!r} is {group.dtype} in the state and {tensor.dtype} in this model")
            seen.add(slot.name)
    for name in expected:
        if name not in seen:
            raise StateError(f"the state lacks the tensor {name!r} of this model")


def restore(runner: Runner, state: Mapping[str, Any], meta: Meta) -> None:
    """Fill a runner that was made with the layout of `meta`. Everything is checked before anything is changed."""
    member = runner.members[list(runner.world.members).index(meta.rank)]
    copies: list[tuple[Tensor, Tensor]] = []
    for name, residual in member.residuals.named():
        key = f"rank{meta.rank}.residual.{name}"
        saved = state.get(key)
        if not isinstance(saved, Tensor) or saved.shape != residual.shape or saved.dtype != residual.dtype:
            found = (
                "missing" if saved is None else f"{getattr(saved, 'dtype', type(saved))} {getattr(saved, 'shape', '')}"
            )
            raise StateError(f"{key!r} should be a float32 tensor of shape {tuple(residual.shape)}, but is {found}")
        if not bool(torch.isfinite(saved).all()):
            raise StateError(f"{key!r} holds a value that is not finite")
        copies.append((residual, saved))
    fields: list[tuple[Any, str, Any]] = []
    for run, numbers in zip(member.groups, meta.numbers, strict=True):
        for field in run.state.saved:
            key = f"rank{meta.rank}.codec.{run.info.name}.{field}"
            present = getattr(run.state, field)
            if isinstance(present, Tensor | np.ndarray):
                saved = state.get(key)
                if not isinstance(saved, Tensor):
                    raise StateError(f"{key!r} is missing")
                saved = saved.clone()
                fields.append((run.state, field, saved.numpy() if isinstance(present, np.ndarray) else saved))
            elif field in numbers:
                fields.append((run.state, field, numbers[field]))
            else:
                raise StateError(f"the state lacks {field!r} of {run.info.name}, codec {run.codec}")
    for residual, saved in copies:
        residual.copy_(saved)
    for target, field, value in fields:
        setattr(target, field, value)
    for run, recent in zip(member.groups, meta.capacities, strict=True):
        if run.capacity is not None:
            run.capacity.recent.clear()
            run.capacity.recent.extend(recent)
    member.step, member.skipped = meta.step, meta.skipped
