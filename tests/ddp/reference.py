"""What the gradients should be: computed in one process, without DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.models import batch

Loss = Callable[[nn.Module, int, int], Tensor]


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    inputs, targets = batch(step, rank)
    dtype = next(model.parameters()).dtype
    return nn.functional.cross_entropy(model(inputs.to(dtype)).float(), targets)


def local_gradients(model: nn.Module, rank: int, steps: Sequence[int], loss: Loss = loss_of) -> list[Tensor]:
    """The gradient of each parameter on one rank, accumulated over `steps`; zeros where it has none."""
    twin = copy.deepcopy(model)
    twin.zero_grad(set_to_none=True)
    for step in steps:
        loss(twin, step, rank).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()]


def mean_gradients(model: nn.Module, world: int, steps: Sequence[int], loss: Loss = loss_of) -> list[Tensor]:
    """The mean over ranks, in float64."""
    ranks = [local_gradients(model, rank, steps, loss) for rank in range(world)]
    return [torch.stack([g.double() for g in gradients]).mean(0) for gradients in zip(*ranks, strict=True)]


def distance(found: Sequence[Tensor | None], expected: Sequence[Tensor]) -> float:
    """The norm of the difference, relative to that of what is expected."""
    pairs = [(torch.zeros_like(e) if f is None else f, e) for f, e in zip(found, expected, strict=True)]
    off = sum(float((f.double() - e.double()).square().sum()) for f, e in pairs)
    return float((off / sum(float(e.double().square().sum()) for e in expected)) ** 0.5)


class Ledger:
    """Books what goes into an exchange and what comes out, by parameter, in float64.

    Local gradients are taken when autograd has accumulated them, which is before DDP hands them to its hook.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.named = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
        self.given = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.named.items()}
        self.received = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.named.items()}
        self.used: set[str] = set()
        for name, p in self.named.items():
            p.register_post_accumulate_grad_hook(self._booker(name))

    def _booker(self, name: str) -> Callable[[Tensor], None]:
        def book(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.used.add(name)
            self.given[name] += parameter.grad.double()

        return book

    def close_step(self, discarded: Sequence[str] = ()) -> None:
        """After backward. Gradients must have been cleared before it; `discarded` are those that no rank used."""
        self.used.clear()
        for name, p in self.named.items():
            if name not in discarded and p.grad is not None:
                self.received[name] += p.grad.double()

    def balance(self, wire: Any) -> float:
        """|mean of what was given - received - mean residual| / |sum of all gradients|. A collective."""
        residuals = {
            name.split(".residual.")[1]: value for name, value in wire.state_dict().items() if ".residual." in name
        }
        off = total = 0.0
        for name in self.named:
            mean = self.given[name].clone()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            left = residuals[name].double() if name in residuals else torch.zeros_like(mean)
            dist.all_reduce(left)
            left /= dist.get_world_size()
            total += float(mean.square().sum())
            off += float((mean - self.received[name] - left).square().sum())
        return float((off / total) ** 0.5)
