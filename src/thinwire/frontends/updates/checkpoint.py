"""What a checkpoint of local updates holds.

Exact, of every rank; keys of what ranks do not share carry the rank, as in `engine.state`:

    shared.NAME                  x, float32, equal on all ranks
    rank0.residual.NAME          e
    rank0.optimizer.NAME.KEY     what the optimizer remembers of a parameter: momentum_buffer, exp_avg, ...
    rank0.buffer.NAME            floating buffers of the model
    rank0.point.NAME             the parameter, if the period is longer than a step
    rank0.updates                a JSON text: versions, steps, strength, options of the optimizer
    rank0.thinwire, ...          of the codec, where the general path keeps one

Folded, once for all ranks: folded.shared.NAME (x - mean(e)), folded.optimizer.NAME.KEY and folded.buffer.NAME (means),
folded.updates.

`torch.distributed.checkpoint` loads only what the new job says that it has: so there is a tensor for everything that the
optimizer will remember, before it does. `begun` in the text says of which parameters it is real.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from torch.optim import SGD

from ...engine import restore, words
from ...engine.restore import tensor_of
from ...errors import StateError
from ...log import logger
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
    begun: list[str]
    """Parameters of which the optimizer remembers something."""


def exact(opt: LocalUpdates) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if not isinstance(opt._way, Blocks):
        state |= opt.exchange.state_dict()
    for rank, replica, errors in zip(opt.exchange.world.members, opt._replicas, opt._way.errors, strict=True):
        coming = _coming(replica)
        for slot, error in zip(replica.slots, errors, strict=True):
            state[f"shared.{slot.name}"] = slot.shared.clone()
            if error is not None and isinstance(opt._way, Blocks):  # that of the exchange is there already
                state[f"rank{rank}.residual.{slot.name}"] = error.clone()
            if opt.period > 1:
                state[f"rank{rank}.point.{slot.name}"] = slot.point.detach().clone()
            for key, tensor in (coming.get(slot.name) or _memory(replica, slot.point)).items():
                state[f"rank{rank}.optimizer.{slot.name}.{key}"] = tensor.clone()
        for name, buffer in replica.buffers.items():
            state[f"rank{rank}.buffer.{name}"] = buffer.clone()
        state[f"rank{rank}.updates"] = msgspec.json.encode(_meta(opt, replica, rank, folded=False)).decode()
    return state


def folded(opt: LocalUpdates) -> dict[str, Any]:
    """A collective, in which all ranks take part already."""
    state: dict[str, Any] = {}
    replicas = opt._replicas
    known = [_known(replica) for replica in replicas]
    if isinstance(opt.exchange.world, TorchWorld):
        known = words.gather(known[0], opt.exchange.world.parent)
    begun = []
    for index, slot in enumerate(replicas[0].slots):
        state[f"folded.shared.{slot.name}"] = opt.settled(index)[0]
        begun += [slot.name] if any(each[slot.name][0] for each in known) else []
        forms = {key: form for each in known for key, form in each[slot.name][1].items()}
        for key, (shape, dtype) in sorted(forms.items()):
            # A rank that skipped its first steps remembers nothing yet.
            nothing = torch.zeros(shape, dtype=getattr(torch, dtype))
            own = [_memory(replica, replica.slots[index].point).get(key, nothing) for replica in replicas]
            means = [tensor.float().contiguous().clone() for tensor in own]
            opt.exchange.average_(means)
            state[f"folded.optimizer.{slot.name}.{key}"] = means[0].to(nothing.dtype)
    for name, tensors in opt.mean_buffers().items():
        state[f"folded.buffer.{name}"] = tensors[0].to(replicas[0].buffers[name].dtype)
    meta = _meta(opt, replicas[0], 0, folded=True)
    meta.begun = begun
    state["folded.updates"] = msgspec.json.encode(meta).decode()
    return state


def fold(opt: LocalUpdates, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The folded state of the exact ones of all old ranks, for a job with another number of them; see `folded`."""
    replica = opt._replicas[0]
    first = _decode(saved, "rank0")
    for rank in range(first.world):
        if f"rank{rank}.updates" not in saved:
            raise StateError(
                f"the state is of {first.world} ranks, and this job has {opt.exchange.world.size}: it needs those of all old "
                f"ranks, and that of rank {rank} is missing; or one of kind 'folded'"
            )
    metas = [_decode(saved, f"rank{rank}") for rank in range(first.world)]
    for rank, meta in enumerate(metas):
        if (meta.rank, meta.world, meta.steps, meta.local) != (rank, first.world, first.steps, first.local):
            raise StateError(f"rank 0 and rank {rank} of this state do not fit together")
    left = [{} if meta.one_pass else restore.find(saved, rank, meta.world).left() for rank, meta in enumerate(metas)]
    state: dict[str, Any] = {}

    def mean(key: str, like: Tensor) -> Tensor:
        total = torch.zeros(like.shape, dtype=torch.float64)
        for rank in range(first.world):
            total += tensor_of(saved, f"rank{rank}.{key}", like) if f"rank{rank}.{key}" in saved else 0.0
        return (total / first.world).to(like.dtype)

    for slot in replica.slots:
        shared = tensor_of(saved, f"shared.{slot.name}", slot.shared)
        pending = torch.zeros(shared.shape, dtype=torch.float64)
        for rank, meta in enumerate(metas):
            if meta.one_pass:
                pending += tensor_of(saved, f"rank{rank}.residual.{slot.name}", shared)
                continue
            error = left[rank].get(slot.name)
            pending += 0.0 if error is None else error
            if meta.local:
                point = tensor_of(saved, f"rank{rank}.point.{slot.name}", slot.point.detach())
                pending += detached(shared, error, meta.strength) - point
        state[f"folded.shared.{slot.name}"] = (shared - pending / first.world).float()
        for rank in range(first.world):
            prefix = f"rank{rank}.optimizer.{slot.name}."
            for key in [key for key in saved if key.startswith(prefix) and isinstance(saved[key], Tensor)]:
                name = f"optimizer.{slot.name}.{key.removeprefix(prefix)}"
                if f"folded.{name}" not in state:
                    state[f"folded.{name}"] = mean(name, saved[key])
    for name, buffer in replica.buffers.items():
        state[f"folded.buffer.{name}"] = mean(f"buffer.{name}", buffer)
    first.begun = [slot.name for slot in replica.slots if any(slot.name in meta.begun for meta in metas)]
    first.folded, first.local, first.local_skipped = True, 0, 0
    state["folded.updates"] = msgspec.json.encode(first).decode()
    return state


def _known(replica: Replica) -> dict[str, tuple[bool, dict[str, tuple[tuple[int, ...], str]]]]:
    """Of each parameter: whether the optimizer remembers something of it, and what it does or will remember."""
    coming = _coming(replica)
    return {
        slot.name: (
            bool(replica.optimizer.state.get(slot.point)),
            {k: _form(t) for k, t in (coming.get(slot.name) or _memory(replica, slot.point)).items()},
        )
        for slot in replica.slots
    }


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
        begun=[slot.name for slot in replica.slots if replica.optimizer.state.get(slot.point)],
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


def _coming(replica: Replica) -> dict[str, dict[str, Tensor]]:
    """What the optimizer will remember of parameters of which it remembers nothing yet: found out on a copy of it."""
    slots = [slot for slot in replica.slots if not replica.optimizer.state.get(slot.point)]
    plain = type(replica.optimizer) is SGD and not any(group["momentum"] for group in replica.optimizer.param_groups)
    if not slots or plain:
        return {}
    copied: dict[int, Any] = {}
    optimizer = copy.deepcopy(replica.optimizer, copied)
    points = {slot.name: copied[id(slot.point)] for slot in slots}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    for point in points.values():
        point.grad = torch.zeros_like(point)
    optimizer.step()
    return {
        name: {
            key: torch.zeros_like(value)
            for key, value in optimizer.state.get(point, {}).items()
            if isinstance(value, Tensor)
        }
        for name, point in points.items()
    }


def _form(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


# Loading.


def load(opt: LocalUpdates, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Everything is checked before anything is changed."""
    saved = restore.merge(saved)
    ranks = opt.exchange.world.members
    if "folded.updates" not in saved and "rank0.updates" in saved:
        old, now = _decode(saved, "rank0").world, opt.exchange.world.size
        if old != now:
            saved = fold(opt, saved)
            if ranks[0] == 0:
                logger.info("the state is of %d ranks, this job has %d: it goes on from the settled model", old, now)
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
    opt._compared = False
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
                if error is not None and isinstance(opt._way, Blocks):
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
                    if not _is_plain(like) or (like.dim() and like.shape != slot.point.shape):
                        raise StateError(f"{key!r} does not fit the parameter, of shape {tuple(slot.point.shape)}")
                    memory[key.removeprefix(prefix)] = tensor_of(saved, key, like)
            self.memory.append(memory if slot.name in self.meta.begun else {})

    def carry_out(self) -> None:
        strength, errors = self.opt.strength, self.opt._way.errors[self.r]
        for i, slot in enumerate(self.replica.slots):
            slot.shared.copy_(self.shared[i])
            error, saved, point = errors[i], self.errors[i], self.points[i]
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


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor with numbers of its own, that an optimizer can remember."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not (value.is_meta or value.is_quantized or value.is_complex())
    )


def _decode(saved: Mapping[str, Any], owner: str) -> Meta:
    key = f"{owner}.updates"
    try:
        meta = msgspec.json.decode(saved[key], type=Meta)
    except (msgspec.MsgspecError, TypeError, UnicodeError, RecursionError) as error:
        raise StateError(f"{key!r} cannot be read: {error}") from error
    if meta.format != FORMAT:
        raise StateError(f"the state has format {meta.format}; version {__version__} reads format {FORMAT}")
    return meta


def _read_meta(opt: LocalUpdates, saved: Mapping[str, Any], owner: str, rank: int) -> Meta:
    if f"{owner}.updates" not in saved:
        held = sorted({name.split(".")[0] for name in map(str, saved) if name.endswith(".updates")})
        raise StateError(
            f"this state holds nothing of rank {rank} (it has: {', '.join(held) or 'no rank at all'}): every rank must save "
            "its own state_dict(), or all load one of kind 'folded'"
        )
    key, meta = f"{owner}.updates", _decode(saved, owner)
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
