"""Contents of a checkpoint: a flat dictionary of tensors and one JSON text, in one of two forms.

Exact, of one rank; all keys carry the rank, because tensors under the same key on several ranks are taken for replicas by
`torch.distributed.checkpoint`:

    rank0.thinwire          a JSON text: versions, world, step, layout, capacities, what the codecs remember
    rank0.residual.NAME     float32, shaped like the parameter; zeros where a chain keeps it on another rank
    rank0.residual1.NAME    that of the second Comp of a chain, and so on
    rank0.FIELD.NAME        the same of what a codec remembers of every element
    rank0.carry.NAME        what an earlier chain left over, until a step counts

Mean, one for all ranks and the same on each: mean.thinwire, mean.residual.NAME (what has not been sent yet, in all,
divided by the number of ranks), mean.FIELD.NAME.

`torch.distributed.checkpoint` loads a tensor only where the new job says that it has one, so tensors must not depend on
what the new job learns later: they stand under the names of parameters, and what belongs to a group is in the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..codecs import CodecState, GroupInfo, ParameterInfo
from ..codecs.driver import Capacity
from ..planner.plan import Plan
from ..ranges import Count, RankOrAll, Real, Version, Weight, Whole, World
from .executor import Executor
from .layout import Layout
from .rank_state import GroupExchange, RankState
from .state_schema import dtype_of, encode

FORMAT = 1
MEAN = "mean"
"""The owner of what stands for all ranks together; that of what belongs to one is `rank0` and so on."""


class Array(msgspec.Struct, forbid_unknown_fields=True):
    """A small tensor that a codec remembers; `data` is base64 in the text."""

    dtype: str
    shape: tuple[Count, ...]
    data: bytes


Number = Real | Whole | bool | str


class Meta(msgspec.Struct, forbid_unknown_fields=True):
    """The part of a state that is not residuals. Lists have an entry for each group of the layout."""

    format: Version
    version: str
    rank: RankOrAll
    """-1 in a state that stands for all ranks."""
    world: World
    codec: str
    chain: str = ""
    dense_steps: Count = 0
    buckets: list[list[str]] = []
    """What one all-reduce took in the dense steps of a job that has no layout yet, or takes in control steps."""
    step: Count = 0
    skipped: Count = 0
    settings: dict[str, Real] = {}
    layout: Layout | None = None
    weights: list[list[Weight]] = []
    """For each residual of a group, its share in the sum of all ranks."""
    carries: list[bool] = []
    capacities: list[list[list[Count]]] = []
    numbers: list[dict[str, Number]] = []
    arrays: list[dict[str, Array]] = []
    plan: Plan | None = None
    control: Count | msgspec.UnsetType = msgspec.UNSET
    """The number of the next control step, of all since training began; only where one is agreed on."""

    @property
    def owner(self) -> str:
        return MEAN if self.rank < 0 else f"rank{self.rank}"

    @property
    def progress(self) -> tuple[int, int]:
        return self.dense_steps, self.step


def blank(layout: Layout, meta: Meta) -> dict[str, Any]:
    """The tensors of a job that has not begun to compress, as many as it will have."""
    state: dict[str, Any] = {}
    for group, codec in zip(layout.groups, layout.codecs(), strict=True):
        info, leaf = group.info(), group.leaf()
        begun = codec.at(0).start(info, max(0, meta.rank), meta.world)
        flat = {"residual": torch.zeros(info.elements)} if codec.keeps_residual else {}
        if meta.rank >= 0 or leaf is None:
            flat |= {field: torch.as_tensor(getattr(begun, field)) for field in elementwise(begun)}
        for field, tensor in flat.items():
            for number in range(leaf.compressions if leaf is not None and meta.rank >= 0 else 1):
                for p in info.parameters:
                    view = tensor[p.offset : p.offset + p.elements].view(p.shape)
                    state[f"{meta.owner}.{numbered(field, number)}.{p.name}"] = view.clone()
    return state


def exact(executor: Executor | None, meta: Meta) -> dict[str, Any]:
    """The state of one rank; tensors are copies."""
    state: dict[str, Any] = {}

    def put(field: str, parameter: ParameterInfo, inside: slice, values: Tensor) -> None:
        key = f"{meta.owner}.{field}.{parameter.name}"
        whole = state.setdefault(key, torch.zeros(parameter.shape, dtype=values.dtype))
        whole.view(-1)[inside] = values

    if executor is not None:
        rank_state = member_of(executor, meta.rank)
        _describe(executor.layout, rank_state, meta)
        for number, parameter, inside, values in rank_state.residuals.pieces():
            put(numbered("residual", number), parameter, inside, values)
        for run, numbers, arrays in zip(rank_state.groups, meta.numbers, meta.arrays, strict=True):
            for tag, number, start, codec_state in remembered(run):
                _note(codec_state, others(codec_state), tag, numbers, arrays)
                for field in elementwise(codec_state):
                    for piece in views(run.info, codec_state, start, torch.as_tensor(getattr(codec_state, field))):
                        put(numbered(field, number), *piece)
            for parameter in run.info.parameters if run.inherited is not None else ():
                assert run.inherited is not None
                flat = run.inherited[parameter.offset : parameter.offset + parameter.elements]
                put("carry", parameter, slice(0, parameter.elements), flat)
    state[f"{meta.owner}.thinwire"] = encode(meta)
    return state


def mean(executor: Executor, meta: Meta, average: Callable[[Sequence[Tensor]], None]) -> dict[str, Any]:
    """One state for all ranks. `average` replaces a tensor of each rank_state by the mean over all ranks: a collective.

    Means are taken in float64, so they are rounded once. What a codec remembers of its own rank is left out.
    """
    state: dict[str, Any] = {}
    first = executor.rank_states[0]
    _describe(executor.layout, first, meta)
    meta.weights = [[1.0] if run.codec.keeps_residual or run.inherited is not None else [] for run in first.groups]
    meta.carries = [False for _ in first.groups]

    def put(key: str, tensors: Sequence[Tensor]) -> None:
        means = [tensor.double() for tensor in tensors]
        average(means)
        state[f"{MEAN}.{key}"] = means[0].to(tensors[0].dtype)

    left = [rank_state.unsent() for rank_state in executor.rank_states]
    for name in left[0]:
        put(f"residual.{name}", [own[name] for own in left])
    for index, run in enumerate(first.groups):
        if run.driver is None:
            continue
        own_state = run.driver.state
        _note(own_state, own_state.common, "", meta.numbers[index], meta.arrays[index])
        for field in elementwise(own_state):
            everyone = [rank_state.groups[index].way.states[0] for rank_state in executor.rank_states]
            flat = [torch.as_tensor(getattr(codec_state, field)) for codec_state in everyone]
            for p in run.info.parameters:
                put(f"{field}.{p.name}", [own[p.offset : p.offset + p.elements].view(p.shape) for own in flat])
    state[f"{MEAN}.thinwire"] = encode(meta)
    return state


def _describe(layout: Layout, rank_state: RankState, meta: Meta) -> None:
    meta.layout, meta.step, meta.skipped = layout, rank_state.step, rank_state.skipped
    meta.weights = [[part.weight for part in run.way.residual_parts] for run in rank_state.groups]
    meta.carries = [run.inherited is not None for run in rank_state.groups]
    meta.capacities = [[list(capacity.recent) for capacity in capacities(run)] for run in rank_state.groups]
    meta.numbers = [{} for _ in rank_state.groups]
    meta.arrays = [{} for _ in rank_state.groups]


def _note(
    codec_state: CodecState, fields: Sequence[str], tag: str, numbers: dict[str, Number], arrays: dict[str, Array]
) -> None:
    for field in fields:
        value = getattr(codec_state, field)
        if isinstance(value, Tensor | np.ndarray):
            tensor = torch.as_tensor(value).contiguous()
            data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            arrays[field + tag] = Array(dtype_of(tensor), tuple(tensor.shape), data)
        else:
            numbers[field + tag] = value


def agreement(executor: Executor, rank: int) -> str:
    """A digest of what must be equal on all ranks, because sizes and kinds of messages follow from it."""
    rank_state = member_of(executor, rank)
    digest = hashlib.sha256(msgspec.json.encode([rank_state.step, rank_state.settings]))
    for run in rank_state.groups:
        if run.driver is None:  # ranks of a chain have different parts
            continue
        own = run.driver.state
        numbers: dict[str, Number] = {}
        arrays: dict[str, Array] = {}
        _note(own, own.agreed, "", numbers, arrays)
        digest.update(msgspec.json.encode([numbers, arrays, [list(c.recent) for c in capacities(run)]]))
    return digest.hexdigest()[:16]


# What is where, for those who save and those who load.


def member_of(executor: Executor, rank: int) -> RankState:
    return executor.rank_states[list(executor.world.local_ranks).index(rank)]


def numbered(field: str, number: int) -> str:
    """The name of a field of the first Comp is that without a chain."""
    return f"{field}{number}" if number else field


def remembered(run: GroupExchange) -> Iterator[tuple[str, int, int, CodecState]]:
    """Each state of a group: how its fields are marked, the number of its Comp, its first element."""
    if run.chain is None:
        yield "", 0, 0, run.way.states[0]
        return
    for number, position in enumerate(run.chain.positions):
        for i, piece in enumerate(position.pieces):
            yield f"@{number}.{i}", number, piece.range.start, piece.state


def capacities(run: GroupExchange) -> list[Capacity]:
    found = [run.driver.capacity] if run.driver is not None else []
    if run.chain is not None:
        found = [p.talk.capacity if p.talk is not None else p.capacity for p in run.chain.positions]
    return [capacity for capacity in found if capacity is not None]


def elementwise(codec_state: CodecState) -> list[str]:
    """The fields of `CodecState.elementwise` that are in use; one that is not may be empty."""
    shape = (codec_state.group.elements,)
    return [field for field in codec_state.elementwise if tuple(getattr(codec_state, field).shape) == shape]


def others(codec_state: CodecState) -> list[str]:
    """The saved fields that stand in the text."""
    large = elementwise(codec_state)
    return [field for field in codec_state.saved if field not in large]


def views(
    group: GroupInfo, codec_state: CodecState, start: int, flat: Tensor
) -> Iterator[tuple[ParameterInfo, slice, Tensor]]:
    """For each parameter in a flat tensor that begins at element `start` of its group: which of its elements, and where."""
    whole = {parameter.name: parameter for parameter in group.parameters}
    for piece in codec_state.group.parameters:
        parameter = whole[piece.name]
        first = start + piece.offset - parameter.offset
        yield parameter, slice(first, first + piece.elements), flat[piece.offset : piece.offset + piece.elements]
