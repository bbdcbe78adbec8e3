"""What a checkpoint of local updates holds.

Exact, of every rank; keys of what ranks do not share carry the rank, as in `engine.state`:

    shared.NAME                  x, float32, equal on all ranks
    rank0.residual.NAME          e
    rank0.optimizer.NAME.KEY     what the optimizer remembers of a parameter: momentum_buffer, exp_avg, ...
    rank0.buffer.NAME            floating buffers of the model
    rank0.point.NAME             the parameter, in the middle of a period only
    rank0.updates                a JSON text: versions, steps, strength, options of the optimizer
    rank0.thinwire, ...          of the codec, where the general path keeps one

Folded, once for all ranks: folded.shared.NAME (x - mean(e)), folded.optimizer.NAME.KEY and folded.buffer.NAME (means),
folded.updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.restore import tensor_of
from ...errors import StateError
from ...schemes.world import TorchWorld
from ...version import __version__
from .blocks import Blocks
from .general import detached

if TYPE_CHECKING:
    from .optimizer import LocalUpdates
    from .replica import Replica

FORMAT = 1

Value = bool | int | float | str | None | list[float]


class Meta(msgspec.Struct, forbid_unknown_fields=True):
    """The part of a state that is not tensors."""

    format: int
    version: str
    folded: bool
    rank: int
    world: int
    codec: str
    feedback: str
    one_pass: bool
    steps: int
    skipped: int
    local_skipped: int
    local: int
    draws: int
    common: float
    total: float
    exchanges: int
    strength: float
    options: list[dict[str, Value]]
    numbers: dict[str, dict[str, float | int | bool]]


def exact(opt: LocalUpdates) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if not isinstance(opt._way, Blocks):
        state |= opt.exchange.state_dict()
    for rank, replica, errors in zip(opt.exchange.world.members, opt._replicas, opt._way.errors, strict=True):
        for slot, error in zip(replica.slots, errors, strict=True):
            state[f"shared.{slot.name}"] = slot.shared.clone()
            if error is not None:
                state[f"rank{rank}.residual.{slot.name}"] = error.clone()
            if opt._local:
                state[f"rank{rank}.point.{slot.name}"] = slot.point.detach().clone()
            for key, tensor in _memory(replica, slot.point).items():
                state[f"rank{rank}.optimizer.{slot.name}.{key}"] = tensor.clone()
        for name, buffer in replica.buffers.items():
            state[f"rank{rank}.buffer.{name}"] = buffer.clone()
        state[f"rank{rank}.updates"] = msgspec.json.encode(_meta(opt, replica, rank, folded=False)).decode()
    return state


def folded(opt: LocalUpdates) -> dict[str, Any]:
    """A collective, in which all ranks take part already."""
    state: dict[str, Any] = {}
    replicas = opt._replicas
    known = [{s.name: {k: _form(t) for k, t in _memory(r, s.point).items()} for s in r.slots} for r in replicas]
    if isinstance(opt.exchange.world, TorchWorld):
        mine, known = known[0], [{} for _ in range(opt.exchange.world.size)]
        dist.all_gather_object(known, mine, group=opt.exchange.world.parent)
    for index, slot in enumerate(replicas[0].slots):
        state[f"folded.shared.{slot.name}"] = opt.settled(index)[0]
        forms = {key: form for memory in known for key, form in memory.get(slot.name, {}).items()}
        for key, (shape, dtype) in sorted(forms.items()):
            # A rank that skipped its first steps remembers nothing yet.
            nothing = torch.zeros(shape, dtype=getattr(torch, dtype))
            own = [_memory(replica, replica.slots[index].point).get(key, nothing) for replica in replicas]
            means = [tensor.float().contiguous().clone() for tensor in own]
            opt.exchange.average_(means)
            state[f"folded.optimizer.{slot.name}.{key}"] = means[0].to(nothing.dtype)
    for name, tensors in opt.mean_buffers().items():
        state[f"folded.buffer.{name}"] = tensors[0].to(replicas[0].buffers[name].dtype)
    state["folded.updates"] = msgspec.json.encode(_meta(opt, replicas[0], 0, folded=True)).decode()
    return state


def _meta(opt: LocalUpdates, replica: Replica, rank: int, *, folded: bool) -> Meta:
    balance = opt._balance
    return Meta(
        format=FORMAT,
        version=__version__,
        folded=folded,
        rank=rank,
        world=opt.exchange.world.size,
        codec=str(opt.codec),
        feedback=repr(opt.feedback),
        one_pass=isinstance(opt._way, Blocks),
        steps=opt.steps,
        skipped=opt.skipped,
        local_skipped=0 if folded else opt.local_skipped,
        local=0 if folded else opt._local,
        draws=opt._way.draws,
        common=balance.common,
        total=balance.total,
        exchanges=balance.exchanges,
        strength=balance.strength,
        options=[_options(group) for group in replica.optimizer.param_groups],
        numbers={
            slot.name: {
                key: value
                for key, value in replica.optimizer.state.get(slot.point, {}).items()
                if isinstance(value, bool | int | float)
            }
            for slot in replica.slots
        },
    )


def _options(group: dict[str, Any]) -> dict[str, Value]:
    result: dict[str, Value] = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            value = float(value)
        if isinstance(value, tuple) and all(isinstance(item, int | float) for item in value):
            value = list(value)
        if key != "params" and (value is None or isinstance(value, bool | int | float | str | list)):
            result[key] = value
    return result


def _memory(replica: Replica, point: Tensor) -> dict[str, Tensor]:
    """What the optimizer remembers of a parameter, as tensors."""
    memory = replica.optimizer.state.get(point, {})
    return {key: value for key, value in memory.items() if isinstance(value, Tensor)}


def _form(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


# Loading.


def load(opt: LocalUpdates, saved: Mapping[str, Any]) -> None:
    """Everything is checked before anything is changed."""
    if not isinstance(saved, Mapping):
        raise StateError(f"a state is a dictionary, as state_dict() gives it, not {type(saved).__name__}")
    is_folded = "folded.updates" in saved
    plans = [
        _Plan(opt, r, saved, "folded" if is_folded else f"rank{rank}", rank)
        for r, rank in enumerate(opt.exchange.world.members)
    ]
    if not is_folded and not isinstance(opt._way, Blocks):
        opt.exchange.load_state_dict(saved)
    meta = plans[0].meta
    opt.steps, opt.skipped, opt.local_skipped = meta.steps, meta.skipped, meta.local_skipped
    opt._local = meta.local
    balance = opt._balance
    balance.common, balance.total, balance.exchanges = meta.common, meta.total, meta.exchanges
    if balance.feedback.automatic:
        balance.strength = meta.strength
    if is_folded:
        opt._way.forget(meta.draws)
    else:
        opt._way.restart(meta.draws)
    for plan in plans:
        plan.carry_out()
    if not isinstance(opt._way, Blocks):
        opt._way.moved = opt._local > 0


class _Plan:
    """What a state means for one replica, found to fit."""

    def __init__(self, opt: LocalUpdates, r: int, saved: Mapping[str, Any], owner: str, rank: int) -> None:
        self.opt, self.r = opt, r
        self.replica = opt._replicas[r]
        self.meta = _read_meta(opt, saved, owner, rank)
        at = "folded.shared" if self.meta.folded else "shared"
        slots = self.replica.slots
        self.shared = [tensor_of(saved, f"{at}.{slot.name}", slot.shared) for slot in slots]
        self.errors: list[Tensor | None] = [None for _ in slots]
        self.points: list[Tensor | None] = [None for _ in slots]
        if not self.meta.folded:
            for i, (slot, error) in enumerate(zip(slots, opt._way.errors[r], strict=True)):
                if error is not None:
                    self.errors[i] = tensor_of(saved, f"{owner}.residual.{slot.name}", error)
                if self.meta.local:
                    self.points[i] = tensor_of(saved, f"{owner}.point.{slot.name}", slot.point.detach())
        self.buffers = {
            name: tensor_of(saved, f"{owner}.buffer.{name}", buffer) for name, buffer in self.replica.buffers.items()
        }
        self.memory: list[dict[str, Any]] = []
        for slot in slots:
            prefix = f"{owner}.optimizer.{slot.name}."
            memory: dict[str, Any] = dict(self.meta.numbers.get(slot.name, {}))
            for key in saved:
                if key.startswith(prefix) and "." not in key.removeprefix(prefix):
                    like = saved[key]
                    if not isinstance(like, Tensor) or (like.dim() and like.shape != slot.point.shape):
                        raise StateError(f"{key!r} does not fit the parameter, of shape {tuple(slot.point.shape)}")
                    memory[key.removeprefix(prefix)] = tensor_of(saved, key, like)
            self.memory.append(memory)

    def carry_out(self) -> None:
        strength = self.opt.strength
        for i, slot in enumerate(self.replica.slots):
            slot.shared.copy_(self.shared[i])
            error, saved, point = self.opt._way.errors[self.r][i], self.errors[i], self.points[i]
            if error is not None and saved is not None:
                error.copy_(saved)
            slot.write(detached(slot.shared, error, strength) if point is None else point)
            memory = {
                key: value.clone() if isinstance(value, Tensor) else value for key, value in self.memory[i].items()
            }
            if memory or slot.point in self.replica.optimizer.state:
                self.replica.optimizer.state[slot.point] = memory
        for name, buffer in self.buffers.items():
            self.replica.buffers[name].copy_(buffer)
        for group, options in zip(self.replica.optimizer.param_groups, self.meta.options, strict=True):
            for key, value in options.items():
                present = group.get(key)
                if isinstance(present, Tensor) and isinstance(value, int | float):
                    present.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value


def _read_meta(opt: LocalUpdates, saved: Mapping[str, Any], owner: str, rank: int) -> Meta:
    key = f"{owner}.updates"
    if key not in saved:
        held = sorted({name.split(".")[0] for name in map(str, saved) if name.endswith(".updates")})
        raise StateError(
            f"this state holds nothing of rank {rank} (it has: {', '.join(held) or 'no rank at all'}): every rank must save "
            "its own state_dict(), or all load one of kind 'folded'"
        )
    try:
        meta = msgspec.json.decode(saved[key], type=Meta)
    except (msgspec.MsgspecError, TypeError, UnicodeError, RecursionError) as error:
        raise StateError(f"{key!r} cannot be read: {error}") from error
    if meta.format != FORMAT:
        raise StateError(f"the state has format {meta.format}; version {__version__} reads format {FORMAT}")
    replica = opt._replicas[0]
    if len(meta.options) != len(replica.optimizer.param_groups):
        raise StateError(
            f"the state has {len(meta.options)} parameter groups, the optimizer has {len(replica.optimizer.param_groups)}"
        )
    names = {slot.name for slot in replica.slots}
    if odd := sorted(names ^ set(meta.numbers)):
        where = "this model" if odd[0] in names else "the state"
        raise StateError(f"the parameter {odd[0]!r} is only in {where}")
    if meta.folded != (owner == "folded"):
        raise StateError(f"{key!r} says of itself that it is {'folded' if meta.folded else 'of one rank'}")
    if not 0.0 <= meta.strength <= 1.0:
        raise StateError(f"{key!r} has a strength of {meta.strength}")
    if min(meta.steps, meta.skipped, meta.local_skipped, meta.local, meta.draws, meta.exchanges) < 0:
        raise StateError(f"{key!r} has a negative count")
    if meta.folded:
        return meta
    world, one_pass = opt.exchange.world.size, isinstance(opt._way, Blocks)
    if (meta.rank, meta.world) != (rank, world):
        raise StateError(
            f"the state is of rank {meta.rank} of {meta.world}; this is rank {rank} of {world}. "
            "state_dict('folded') gives a state for any number of ranks"
        )
    for what, theirs, ours in (
        ("codec", meta.codec, str(opt.codec)),
        ("feedback", meta.feedback, repr(opt.feedback)),
        ("way of one pass", str(meta.one_pass), str(one_pass)),
    ):
        if theirs != ours:
            raise StateError(f"the state was saved with {what} {theirs}; this one has {ours}")
    if meta.local >= opt.period:
        raise StateError(f"the state was saved {meta.local} steps into a period; the period is now {opt.period}")
    return meta
