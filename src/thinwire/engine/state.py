"""What a checkpoint holds of a rank, and when it is refused.

A flat dictionary whose keys all carry the rank, because tensors under the same key on several ranks are taken for
replicas by `torch.distributed.checkpoint`:

    rank0.thinwire          a JSON text: versions, world, step, layout, capacities, what the codecs remember
    rank0.residual.NAME     float32, shaped like the parameter; zeros where a chain keeps it on another rank
    rank0.residual1.NAME    that of the second Comp of a chain, and so on
    rank0.FIELD.NAME        the same of what a codec remembers of every element
    rank0.carry.NAME        what an earlier chain left over, until a step counts

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

from ..codecs import CodecState, GroupInfo, ParameterInfo
from ..errors import StateError
from ..planner.plan import Plan
from ..version import __version__
from .capacity import Capacity
from .layout import Layout, TensorInfo
from .member import GroupRun
from .method import Method
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
    chain: str = ""
    step: int = 0
    skipped: int = 0
    settings: dict[str, float] = {}
    layout: Layout | None = None
    capacities: list[list[list[int]]] = []
    numbers: list[dict[str, Number]] = []
    arrays: list[dict[str, Array]] = []
    plan: Plan | None = None


def blank(layout: Layout, *, rank: int, world: int) -> dict[str, Any]:
    """The tensors of a job that has not begun to compress, as many as it will have."""
    state: dict[str, Any] = {}
    for group, codec in zip(layout.groups, layout.codecs(), strict=True):
        info, leaf = group.info(), group.leaf()
        begun = codec.at(0).start(info, rank, world)
        flat = {"residual": torch.zeros(info.elements)} if codec.keeps_residual else {}
        flat |= {field: torch.as_tensor(getattr(begun, field)) for field in _elementwise(begun)}
        for field, tensor in flat.items():
            for number in range(leaf.compressions if leaf is not None else 1):
                for p in info.parameters:
                    view = tensor[p.offset : p.offset + p.elements].view(p.shape)
                    state[f"rank{rank}.{_numbered(field, number)}.{p.name}"] = view.clone()
    return state


def save(
    runner: Runner | None, *, rank: int, world: int, method: Method, settings: Mapping[str, float]
) -> dict[str, Any]:
    """The state of one rank; tensors are copies."""
    meta = Meta(
        FORMAT, __version__, rank, world, method.codec, method.chain, settings=dict(settings), plan=method.plan
    )
    state: dict[str, Any] = {}

    def put(field: str, parameter: ParameterInfo, inside: slice, values: Tensor) -> None:
        key = f"rank{rank}.{field}.{parameter.name}"
        whole = state.setdefault(key, torch.zeros(parameter.shape, dtype=values.dtype))
        whole.view(-1)[inside] = values

    if runner is not None:
        member = runner.members[list(runner.world.members).index(rank)]
        meta.layout, meta.step, meta.skipped = runner.layout, member.step, member.skipped
        for number, parameter, inside, values in member.residuals.pieces():
            put(_numbered("residual", number), parameter, inside, values)
        for run in member.groups:
            meta.capacities.append([list(capacity.recent) for capacity in _capacities(run)])
            numbers: dict[str, Number] = {}
            arrays: dict[str, Array] = {}
            for tag, number, start, codec_state in _remembered(run):
                elementwise = _elementwise(codec_state)
                for field in codec_state.saved:
                    value = getattr(codec_state, field)
                    if field in elementwise:
                        for piece in _views(run.info, codec_state, start, torch.as_tensor(value)):
                            put(_numbered(field, number), *piece)
                    elif isinstance(value, Tensor | np.ndarray):
                        tensor = torch.as_tensor(value).contiguous()
                        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                        arrays[field + tag] = Array(_dtype(tensor), tuple(tensor.shape), data)
                    else:
                        numbers[field + tag] = value
            meta.numbers.append(numbers)
            meta.arrays.append(arrays)
            for parameter in run.info.parameters if run.carry is not None else ():
                assert run.carry is not None
                flat = run.carry[parameter.offset : parameter.offset + parameter.elements]
                put("carry", parameter, slice(0, parameter.elements), flat)
    state[f"rank{rank}.thinwire"] = msgspec.json.encode(meta).decode()
    return state


def _numbered(field: str, number: int) -> str:
    """The name of a field of the first Comp is that without a chain."""
    return f"{field}{number}" if number else field


def _remembered(run: GroupRun) -> Iterator[tuple[str, int, int, CodecState]]:
    """Each state of a group: how its fields are marked, the number of its Comp, its first element."""
    if run.chain is None:
        yield "", 0, 0, run.state
        return
    for number, position in enumerate(run.chain.positions):
        for i, piece in enumerate(position.pieces):
            yield f"@{number}.{i}", number, piece.range.start, piece.state


def _capacities(run: GroupRun) -> list[Capacity]:
    found = [run.capacity]
    if run.chain is not None:
        found = [p.talk.capacity if p.talk is not None else p.capacity for p in run.chain.positions]
    return [capacity for capacity in found if isinstance(capacity, Capacity)]


def read_meta(
    state: Mapping[str, Any], *, rank: int, world: int, method: Method, tensors: Sequence[TensorInfo]
) -> Meta:
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
    if meta.codec != method.codec:
        raise StateError(f"the state was saved with codec {meta.codec}; this wire uses {method.codec}")
    if meta.chain != method.chain:
        names = [str(text or "the codec's own collectives") for text in (meta.chain, method.chain)]
        raise StateError(f"the state was saved with the chain {names[0]}; this wire uses {names[1]}")
    _check_plan(meta.plan, method.plan)
    observed = [wanted for group in meta.capacities for recent in group for wanted in recent]
    if min(meta.step, meta.skipped, *observed, 0) < 0:
        raise StateError(f"{key!r} has a negative step, number of skipped steps or capacity")
    try:
        method.at(meta.step, meta.settings)
    except (TypeError, ValueError) as error:
        raise StateError(f"{key!r} has settings that {method} refuses: {error}") from None
    if meta.layout is not None:
        _check_layout(meta.layout, tensors, method)
        for name in ("capacities", "numbers", "arrays"):
            if len(getattr(meta, name)) != len(meta.layout.groups):
                raise StateError(
                    f"{key!r} has {len(meta.layout.groups)} groups, but {name} of {len(getattr(meta, name))}"
                )
    return meta


def _check_plan(saved: Plan | None, own: Plan | None) -> None:
    """The same tensors in the same groups, by the same codecs and chains."""
    if saved is None or own is None:
        if saved is not own:
            raise StateError(
                "the state has no plan, this wire has one" if own else "the state has a plan, this wire none"
            )
        return
    if len(saved.groups) != len(own.groups):
        raise StateError(f"the plan of the state has {len(saved.groups)} groups, that of this wire {len(own.groups)}")
    for place, (theirs, mine) in enumerate(zip(saved.groups, own.groups, strict=True)):
        for field in ("names", "codec", "chain"):
            if getattr(theirs, field) != getattr(mine, field):
                raise StateError(
                    f"group {place} of the plan has {field} {getattr(theirs, field)!r} in the state; "
                    f"this wire has {getattr(mine, field)!r}"
                )


def _check_layout(layout: Layout, tensors: Sequence[TensorInfo], method: Method) -> None:
    """A layout that fits this model: every tensor in its place, nothing beside or upon it."""
    expected = {tensor.name: tensor for tensor in tensors}
    places: dict[str, list[tuple[str, str]]] = {}
    for group in layout.groups:
        # Not that of the codec's text: nothing in a state is believed before it is compared.
        parts = [method.of_tensor(slot.name) for slot in group.slots] or method.parts
        own = {(str(part.codec), part.chain) for part in parts if part is not None}
        if group.codec not in {codec for codec, _ in own} | {"dense"}:
            raise StateError(f"{group.name!r} has codec {group.codec} in the state; this wire uses {method}")
        if (group.codec, group.chain) not in own | {("dense", "")}:
            raise StateError(
                f"{group.name!r} has the chain {group.chain!r} in the state; this wire uses {method.chain!r}"
            )
        if (group.codec, group.chain) != ("dense", "") and len(own) > 1:
            raise StateError(f"{group.name!r} has tensors in the state that this wire sends by different codecs")
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
        part = method.of_tensor(name)
        rides = part is not None and part.codec.rides and not part.chain and places[name][0][1] == str(part.codec)
        roles = [role for role, _ in places[name]]
        once = roles == ["coded"] or (roles == ["ride"] and rides)
        if not once and not (roles == ["elsewhere", "coded"] and places[name][1][1] == "dense"):
            raise StateError(f"{name!r} has a place in the state that no layout gives it: {', '.join(roles)}")


def restore(runner: Runner, state: Mapping[str, Any], meta: Meta) -> None:
    """Fill a runner that was made with the layout of `meta`. Everything is checked before anything is changed."""
    member = runner.members[list(runner.world.members).index(meta.rank)]
    copies: list[tuple[Tensor, Tensor]] = []

    def take(field: str, parameter: ParameterInfo, inside: slice, target: Tensor) -> None:
        like = torch.empty(parameter.shape, dtype=target.dtype)
        saved = tensor_of(state, f"rank{meta.rank}.{field}.{parameter.name}", like)
        copies.append((target, saved.reshape(-1)[inside]))

    for number, parameter, inside, target in member.residuals.pieces():
        take(_numbered("residual", number), parameter, inside, target)
    fields: list[tuple[Any, str, Any]] = []
    for run, numbers, arrays in zip(member.groups, meta.numbers, meta.arrays, strict=True):
        for tag, number, start, codec_state in _remembered(run):
            elementwise = _elementwise(codec_state)
            for field in codec_state.saved:
                present = getattr(codec_state, field)
                if field in elementwise:
                    for piece in _views(run.info, codec_state, start, torch.as_tensor(present)):
                        take(_numbered(field, number), *piece)
                    continue
                kind = arrays if isinstance(present, Tensor | np.ndarray) else numbers
                try:
                    fields.append((codec_state, field, _value_like(present, kind.get(field + tag))))
                except ValueError as error:
                    raise StateError(f"{field!r} of {run.info.name!r}, codec {run.codec}, {error}") from None
    left: dict[str, Tensor] = {}
    for run in member.groups:
        for parameter in run.info.parameters:
            key = f"rank{meta.rank}.carry.{parameter.name}"
            if key in state:
                left[parameter.name] = tensor_of(state, key, torch.empty(parameter.shape))
    for run, saved_capacities in zip(member.groups, meta.capacities, strict=True):
        if len(saved_capacities) != len(_capacities(run)):
            raise StateError(
                f"{run.info.name!r} has {len(saved_capacities)} kinds of messages in the state, here {len(_capacities(run))}"
            )
    for target, saved in copies:
        target.copy_(saved)
    for owner, field, value in fields:
        setattr(owner, field, value)
    for run, saved_capacities in zip(member.groups, meta.capacities, strict=True):
        for capacity, recent in zip(_capacities(run), saved_capacities, strict=True):
            capacity.recent.clear()
            for wanted in recent:
                capacity.observe(wanted)
    member.fold(left)
    member.settings, member.skipped = dict(meta.settings), meta.skipped
    member.begin(meta.step)
    runner.statistics.skipped = meta.skipped


def _elementwise(codec_state: CodecState) -> set[str]:
    """The saved fields that have one value for each element of the group; they may be as large as the residual."""
    shape = (codec_state.group.elements,)
    return {field for field in codec_state.saved if getattr(getattr(codec_state, field), "shape", None) == shape}


def _views(
    group: GroupInfo, codec_state: CodecState, start: int, flat: Tensor
) -> Iterator[tuple[ParameterInfo, slice, Tensor]]:
    """For each parameter in a flat tensor that begins at element `start` of its group: which of its elements, and where."""
    whole = {parameter.name: parameter for parameter in group.parameters}
    for piece in codec_state.group.parameters:
        parameter = whole[piece.name]
        first = start + piece.offset - parameter.offset
        yield parameter, slice(first, first + piece.elements), flat[piece.offset : piece.offset + piece.elements]


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
