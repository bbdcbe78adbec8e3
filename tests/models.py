"""Small models and training loops that tests share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10))


def batch(step: int, rank: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(size, 32, generator=generator)
    return inputs, (inputs[:, :10] + 0.1 * torch.randn(size, 10, generator=generator)).argmax(1)


def train(
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    *,
    each: Callable[[int], Any] = lambda step: None,
    spoil: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """The ordinary loop; `spoil` runs between forward and backward, `each` after backward."""
    losses = []
    for step in steps:
        inputs, targets = batch(step, dist.get_rank())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), targets)
        spoil(step)
        loss.backward()
        each(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


def wrapped(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model if model is not None else mlp(), **{"bucket_cap_mb": 0.02, **options})


def digest(module: nn.Module) -> str:
    """Equal exactly when all parameters are equal bit for bit."""
    return hashlib.sha256(
        b"".join(p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in module.parameters())
    ).hexdigest()
