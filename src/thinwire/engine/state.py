"""What a checkpoint holds of a rank, and when it is refused.

A flat dictionary whose keys all carry the rank, because tensors under the same key on several ranks are taken for
replicas by `torch.distributed.checkpoint`:

    rank0.thinwire          a JSON text: versions, world, step, layout, capacities, what the codecs remember
    rank0.residual.NAME     float32, shaped like the parameter
    rank0.FIELD.NAME        the same of what a codec remembers of every element

It loads a tensor only where the new job says that it has one, so tensors must not depend on what the new job learns
later: they stand under the names of parameters, and what belongs to a group is in the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..codecs import CodecState, GroupInfo, ParameterInfo, parse
from ..errors import StateError
from ..version import __version__
from .layout import Layout, TensorInfo
from .runner import Runner

FORMAT = 1


class Array(msgspec.Struct, forbid_unknown_fields=True):
    """A small tensor that a codec remembers; `data` is base64 in the text."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Number = float | int | bool | str


class Meta(msgspec.Struct, forbid_unknown_fields=True):
    """The part of a state that is not residuals."""

    format: int
    version: str
    rank: int
    world: int
    codec: str
    step: int = 0
    skipped: int = 0
    layout: Layout | None = None
    capacities: list[list[int]] = []
    numbers: list[dict[str, Number]] = []
    arrays: list[dict[str, Array]] = []


def blank(layout: Layout, *, rank: int, world: int) -> dict[str, Any]:
    """The tensors of a job that has not begun to compress, as many as it will have."""
    state: dict[str, Any] = {}
    for group, codec in zip(layout.groups, layout.codecs(), strict=True):
        info = group.info()
        begun = codec.start(info, rank, world)
        flat = {"residual": torch.zeros(info.elements)} if codec.keeps_residual else {}
        flat |= {field: torch.as_tensor(getattr(begun, field)) for field in _elementwise(begun)}
        for field, tensor in flat.items():
            state |= {f"rank{rank}.{field}.{p.name}": view.clone() for p, view in _views(info, tensor)}
    return state


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
            numbers: dict[str, Number] = {}
            arrays: dict[str, Array] = {}
            elementwise = _elementwise(run.state)
            for field in run.state.saved:
                value = getattr(run.state, field)
                if field in elementwise:
                    for parameter, view in _views(run.info, torch.as_tensor(value)):
                        state[f"rank{rank}.{field}.{parameter.name}"] = view.clone()
                elif isinstance(value, Tensor | np.ndarray):
                    tensor = torch.as_tensor(value).contiguous()
                    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                    arrays[field] = Array(_dtype(tensor), tuple(tensor.shape), data)
                else:
                    numbers[field] = value
            meta.numbers.append(numbers)
            meta.arrays.append(arrays)
    state[f"rank{rank}.thinwire"] = msgspec.json.encode(meta).decode()
    return state


def read_meta(state: Mapping[str, Any], *, rank: int, world: int, codec: str, tensors: Sequence[TensorInfo]) -> Meta:
    """The meta part of this rank's state, or an error that names the first thing that does not fit."""
    key = f"rank{rank}.thinwire"
    if not isinstance(state, Mapping):
        raise StateError(f"a state is a dictionary, as state_dict() gives it, not {type(state).__name__}")
    if key not in state:
        held = sorted({name.split(".")[0] for name in map(str, state) if name.startswith("rank")})
        raise StateError(
            f"this state holds nothing of rank {rank} (it has: {', '.join(held) or 'no rank at all'}): residuals "
            "differ from rank to rank, so every rank must save its own state_dict()"
        )
    try:
        meta = msgspec.json.decode(state[key], type=Meta)
    except (msgspec.MsgspecError, TypeError, UnicodeError, RecursionError) as error:
        raise StateError(f"{key!r} cannot be read: {error}") from error
    if meta.format != FORMAT:
        raise StateError(f"the state has format {meta.format}; version {__version__} reads format {FORMAT}")
    if (meta.rank, meta.world) != (rank, world):
        raise StateError(f"the state is of rank {meta.rank} of {meta.world}; this is rank {rank} of {world}")
    if meta.codec != codec:
        raise StateError(f"the state was saved with codec {meta.codec}; this wire uses {codec}")
    if min(meta.step, meta.skipped, *(wanted for recent in meta.capacities for wanted in recent), 0) < 0:
        raise StateError(f"{key!r} has a negative step, number of skipped steps or capacity")
    if meta.layout is not None:
        _check_layout(meta.layout, tensors, codec)
        for name in ("capacities", "numbers", "arrays"):
            if len(getattr(meta, name)) != len(meta.layout.groups):
                raise StateError(
                    f"{key!r} has {len(meta.layout.groups)} groups, but {name} of {len(getattr(meta, name))}"
                )
    return meta


def _check_layout(layout: Layout, tensors: Sequence[TensorInfo], codec: str) -> None:
    """A layout that fits this model: every tensor in its place, nothing beside or upon it."""
    expected = {tensor.name: tensor for tensor in tensors}
    places: dict[str, list[tuple[str, str]]] = {}
    rides = parse(codec).rides
    for group in layout.groups:
        if group.codec not in (codec, "dense"):
            raise StateError(f"{group.name!r} has codec {group.codec} in the state; this wire uses {codec}")
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
                    f"{slot.name!r} has {slot.elements} elements at {slot.offset} of {group.name!r} in the state; "
                    f"{tensor.elements} at {offset} would be right"
                )
            offset += slot.elements
            places.setdefault(slot.name, []).append((slot.role, group.codec))
        if group.elements != offset or not group.slots:
            raise StateError(f"{group.name!r} has {group.elements} elements in the state, its tensors have {offset}")
    for name in expected:
        if name not in places:
            raise StateError(f"the state lacks the tensor {name!r} of this model")
        roles = [role for role, _ in places[name]]
        once = roles == ["coded"] or (roles == ["ride"] and rides and places[name][0][1] == codec)
        if not once and not (roles == ["elsewhere", "coded"] and places[name][1][1] == "dense"):
            raise StateError(f"{name!r} has a place in the state that no layout gives it: {', '.join(roles)}")


def restore(runner: Runner, state: Mapping[str, Any], meta: Meta) -> None:
    """Fill a runner that was made with the layout of `meta`. Everything is checked before anything is changed."""
    member = runner.members[list(runner.world.members).index(meta.rank)]
    copies = [
        (residual, tensor_of(state, f"rank{meta.rank}.residual.{name}", residual))
        for name, residual in member.residuals.named()
    ]
    fields: list[tuple[Any, str, Any]] = []
    for run, numbers, arrays in zip(member.groups, meta.numbers, meta.arrays, strict=True):
        elementwise = _elementwise(run.state)
        for field in run.state.saved:
            present = getattr(run.state, field)
            if field in elementwise:
                for parameter, view in _views(run.info, torch.as_tensor(present)):
                    copies.append((view, tensor_of(state, f"rank{meta.rank}.{field}.{parameter.name}", view)))
                continue
            value = arrays.get(field) if isinstance(present, Tensor | np.ndarray) else numbers.get(field)
            try:
                fields.append((run.state, field, _value_like(present, value)))
            except ValueError as error:
                raise StateError(f"{field!r} of {run.info.name!r}, codec {run.codec}, {error}") from None
    for target, saved in copies:
        target.copy_(saved)
    for owner, field, value in fields:
        setattr(owner, field, value)
    for run, recent in zip(member.groups, meta.capacities, strict=True):
        if run.capacity is not None:
            run.capacity.recent.clear()
            for wanted in recent:
                run.capacity.observe(wanted)
    member.step, member.skipped = meta.step, meta.skipped
    runner.statistics.skipped = meta.skipped


def _elementwise(codec_state: CodecState) -> set[str]:
    """The saved fields that have one value for each element of the group; they may be as large as the residual."""
    shape = (codec_state.group.elements,)
    return {field for field in codec_state.saved if getattr(getattr(codec_state, field), "shape", None) == shape}


def _views(info: GroupInfo, flat: Tensor) -> Iterator[tuple[ParameterInfo, Tensor]]:
    """The part of each parameter in a flat tensor of its group, shaped like it. What lies between them is zero."""
    for parameter in info.parameters:
        yield parameter, flat[parameter.offset : parameter.offset + parameter.elements].view(parameter.shape)


def tensor_of(state: Mapping[str, Any], key: str, like: Tensor) -> Tensor:
    """A saved tensor that can be copied to `like`, or an error that names it."""
    saved = state.get(key)
    if not _is_like(saved, like):
        found = "missing" if saved is None else _describe(saved)
        raise StateError(f"{key!r} should be {_dtype(like)} {tuple(like.shape)}, but is {found}")
    if not bool(torch.isfinite(saved).all()):
        raise StateError(f"{key!r} holds a value that is not finite")
    return saved


def _value_like(present: Any, saved: Array | Number | None) -> Any:
    """What is saved, if it can stand in the place of `present`."""
    if saved is None:
        raise ValueError("is missing")
    if isinstance(saved, Array):
        like = torch.as_tensor(present)
        found = f"{saved.dtype} {saved.shape}, {len(saved.data)} bytes"
        if (saved.dtype, saved.shape, len(saved.data)) != (_dtype(like), tuple(like.shape), like.nbytes):
            raise ValueError(f"should be {_dtype(like)} {tuple(like.shape)}, {like.nbytes} bytes, but is {found}")
        tensor = torch.empty_like(like)
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(saved.data, np.uint8)
        return tensor.numpy() if isinstance(present, np.ndarray) else tensor
    if type(saved) is not type(present) and not (isinstance(present, float) and type(saved) is int):
        raise ValueError(f"should be a {type(present).__name__}, but is {saved!r}")
    return type(present)(saved)


def _is_like(saved: Any, tensor: Tensor) -> TypeGuard[Tensor]:
    return (
        isinstance(saved, Tensor)
        and (saved.shape, saved.dtype, saved.layout) == (tensor.shape, tensor.dtype, tensor.layout)
        and not saved.is_meta
    )


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    odd = " sparse" if value.layout != torch.strided else " without data" if value.is_meta else ""
    return f"{_dtype(value)}{odd} {tuple(value.shape)}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
