"""Jobs with local updates for tests: n ranks in this process, or one rank of a real group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import thinwire
from tests.models import batch, mlp
from thinwire.updates import evaluation
from thinwire.updates.replica import Replica

SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


def make(
    ranks: int,
    codec: str = "randomblock(ratio=8)",
    *,
    model: Callable[[], nn.Module] = mlp,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[list[nn.Module], thinwire.LocalUpdates]:
    """Models and their optimizer on a LocalWorld."""
    models = [model() for _ in range(ranks)]
    inner = [optimizer(m.parameters(), **(SGD if options is None else options)) for m in models]
    world = thinwire.LocalWorld(ranks)
    return models, thinwire.LocalUpdates(inner, models, codec, process_group=world, **more)


def make_here(
    codec: str = "randomblock(ratio=8)",
    *,
    model: nn.Module | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    options: dict[str, Any] | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    **more: Any,
) -> tuple[nn.Module, thinwire.LocalUpdates]:
    """A model and its optimizer on this rank of a real group."""
    module = model if model is not None else mlp()
    inner = optimizer(module.parameters(), **(SGD if options is None else options))
    wrapped = wrap(module)
    return wrapped, thinwire.LocalUpdates(inner, wrapped, codec, **more)


def backward(models: Sequence[nn.Module], step: int, first: int = 0) -> None:
    for rank, model in enumerate(models, first):
        inputs, targets = batch(step, rank)
        functional.cross_entropy(model(inputs), targets).backward()


def train(models: Sequence[nn.Module], opt: thinwire.LocalUpdates, steps: range, first: int = 0) -> None:
    for step in steps:
        opt.zero_grad()
        backward(models, step, first)
        opt.step()


def train_here(model: nn.Module, opt: thinwire.LocalUpdates, steps: range) -> None:
    train([model], opt, steps, dist.get_rank())


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def replica(opt: thinwire.LocalUpdates, rank: int = 0) -> Replica:
    return opt._replicas[rank]


def shared(opt: thinwire.LocalUpdates, rank: int = 0) -> Tensor:
    return torch.cat([slot.shared.reshape(-1) for slot in replica(opt, rank).slots])


def errors(opt: thinwire.LocalUpdates, rank: int = 0) -> Tensor:
    """What a rank has not sent, the steps since the last exchange included."""
    slots = replica(opt, rank).slots
    parts = [evaluation.pending(opt._job, rank, i) for i in range(len(slots))]
    whole = [torch.zeros_like(slot.shared) if e is None else e for slot, e in zip(slots, parts, strict=True)]
    return torch.cat([part.reshape(-1) for part in whole])


def momentum(opt: thinwire.LocalUpdates, rank: int = 0) -> Tensor:
    one = replica(opt, rank)
    return torch.cat([one.optimizer.state[slot.point]["momentum_buffer"].reshape(-1) for slot in one.slots])


def settled(opt: thinwire.LocalUpdates) -> Tensor:
    """x - mean(e), in float64, of a LocalWorld."""
    world = opt.exchange.world.size
    return shared(opt).double() - torch.stack([errors(opt, rank).double() for rank in range(world)]).mean(0)


def everything(opt: thinwire.LocalUpdates, model: nn.Module, rank: int = 0) -> list[Tensor]:
    """All that a void step must leave as it was."""
    memory = [
        value.clone()
        for slot in replica(opt, rank).slots
        for value in replica(opt, rank).optimizer.state.get(slot.point, {}).values()
        if isinstance(value, Tensor)
    ]
    return [shared(opt, rank), errors(opt, rank), parameters(model), *memory]
