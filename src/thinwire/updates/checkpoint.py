"""Checkpoints of local updates: their form, and how they are written.

Exact, of every rank; keys of what ranks do not share carry the rank, as in `engine.state`:

    shared.NAME                  x, float32, equal on all ranks
    rank0.residual.NAME          what this rank has not sent
    rank0.optimizer.NAME.KEY     the optimizer's state of a parameter: momentum_buffer, exp_avg, ...
    rank0.buffer.NAME            floating buffers of the model
    rank0.point.NAME             the parameter, if the period is longer than one step
    rank0.updates                a JSON text: versions, steps, strength, options of the optimizer
    rank0.thinwire, ...          of the codec, where the generic backend keeps one

Folded, once for all ranks: folded.shared.NAME (x - mean(residual)), folded.optimizer.NAME.KEY and folded.buffer.NAME
(means), folded.updates.

`torch.distributed.checkpoint` loads only what the new job says that it has: so there is a tensor for all of the optimizer's
state, before the optimizer has it. `begun` in the text says for which parameters it is real.
"""

import copy
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import SGD

from ..comm import object_collectives
from ..comm.world import TorchWorld
from ..engine.state_schema import dtype_of, encode
from ..ranges import Amount, Count, Finite, Rank, Share, Version, Whole, World
from ..version import __version__
from . import options
from .evaluation import mean_buffers, settled
from .job import UpdateJob
from .replica import Replica

FORMAT = 1

Known = dict[str, tuple[bool, dict[str, tuple[tuple[Count, ...], str]]]]
"""See `_known`."""


class Meta(msgspec.Struct, forbid_unknown_fields=True):
    """The part of a state that is not tensors.

    local    steps since the last exchange
    draws    the round: how many exchanges there were
    common, total, exchanges, strength: those of `feedback.Balance`
    options  of each parameter group of the optimizer
    numbers  of the optimizer's state of each parameter
    begun    parameters for which the optimizer has state
    """

    format: Version
    version: str
    folded: bool
    rank: Rank
    world: World
    codec: str
    feedback: str
    one_pass: bool
    steps: Count
    skipped: Count
    local_skipped: Count
    local: Count
    draws: Count
    common: Amount
    total: Amount
    exchanges: Count
    strength: Share
    options: list[dict[str, options.Value]]
    numbers: dict[str, dict[str, Finite | Whole | bool]]
    begun: list[str]


def exact(job: UpdateJob) -> dict[str, Any]:
    """The states of the ranks in this process; tensors are copies."""
    state = job.backend.state_dict()
    for rank, replica in zip(job.world.local_ranks, job.replicas, strict=True):
        expected = _expected_state(replica)
        for slot in replica.slots:
            state[f"shared.{slot.name}"] = slot.shared.clone()
            if job.period > 1:
                state[f"rank{rank}.point.{slot.name}"] = slot.point.detach().clone()
            for key, tensor in expected[slot.name].items():
                state[f"rank{rank}.optimizer.{slot.name}.{key}"] = tensor.clone()
        for name, buffer in replica.buffers.items():
            state[f"rank{rank}.buffer.{name}"] = buffer.clone()
        state[f"rank{rank}.updates"] = encode(_meta(job, replica, rank, folded=False))
    return state


def folded(job: UpdateJob) -> dict[str, Any]:
    """One state for all ranks. A collective, which all ranks have entered."""
    state: dict[str, Any] = {}
    first = job.replicas[0]
    known = [_known(replica) for replica in job.replicas]
    if isinstance(job.world, TorchWorld):
        known = object_collectives.gather(known[0], job.world.parent, Known)
    meta = _meta(job, first, 0, folded=True)
    meta.begun = [slot.name for slot in first.slots if any(own[slot.name][0] for own in known)]
    for index, slot in enumerate(first.slots):
        state[f"folded.shared.{slot.name}"] = settled(job, index)[0]
        forms = {key: form for own in known for key, form in own[slot.name][1].items()}
        for key, (shape, dtype) in sorted(forms.items()):
            # A rank that skipped its first steps has no state yet.
            nothing = torch.zeros(shape, dtype=getattr(torch, dtype))
            own = [_state_of(replica, replica.slots[index].point).get(key, nothing) for replica in job.replicas]
            means = [tensor.float().contiguous().clone() for tensor in own]
            job.average_(means)
            state[f"folded.optimizer.{slot.name}.{key}"] = means[0].to(nothing.dtype)
    for name, tensors in mean_buffers(job).items():
        state[f"folded.buffer.{name}"] = tensors[0].to(first.buffers[name].dtype)
    state["folded.updates"] = encode(meta)
    return state


def _meta(job: UpdateJob, replica: Replica, rank: int, *, folded: bool) -> Meta:
    balance = job.balance
    return Meta(
        format=FORMAT,
        version=__version__,
        folded=folded,
        rank=rank,
        world=job.world.size,
        codec=str(job.codec),
        feedback=repr(balance.feedback),
        one_pass=job.backend.one_pass,
        steps=job.steps,
        skipped=job.skipped,
        local_skipped=0 if folded else job.local_skipped,
        local=0 if folded else job.local,
        draws=job.backend.round,
        common=balance.common,
        total=balance.total,
        exchanges=balance.exchanges,
        strength=balance.strength,
        options=[options.save(group) for group in replica.optimizer.param_groups],
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


# -- the optimizer's state, also before it exists ----------------------------------------------------------------------


def _known(replica: Replica) -> Known:
    """For each parameter: whether the optimizer has state, and the shapes and dtypes it has or will have."""
    expected = _expected_state(replica)
    return {
        slot.name: (
            bool(replica.optimizer.state.get(slot.point)),
            {key: (tuple(tensor.shape), dtype_of(tensor)) for key, tensor in expected[slot.name].items()},
        )
        for slot in replica.slots
    }


def _state_of(replica: Replica, point: Tensor) -> dict[str, Tensor]:
    """The optimizer's state of a parameter, as far as it is tensors."""
    state = replica.optimizer.state.get(point, {})
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _expected_state(replica: Replica) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state by parameter; where there is none yet, zeros in the form that it will have, tried on a copy."""
    found = {slot.name: _state_of(replica, slot.point) for slot in replica.slots}
    missing = [slot for slot in replica.slots if not replica.optimizer.state.get(slot.point)]
    stateless = type(replica.optimizer) is SGD and not any(g["momentum"] for g in replica.optimizer.param_groups)
    if not missing or stateless:
        return found
    copied: dict[int, Any] = {}
    optimizer = copy.deepcopy(replica.optimizer, copied)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    for slot in missing:
        copied[id(slot.point)].grad = torch.zeros_like(slot.point)
    optimizer.step()
    for slot in missing:
        state = optimizer.state.get(copied[id(slot.point)], {})
        found[slot.name] = {k: torch.zeros_like(v) for k, v in state.items() if isinstance(v, Tensor)}
    return found
