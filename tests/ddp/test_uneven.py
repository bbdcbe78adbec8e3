"""Ranks with different amounts of data: `Join`, an empty last batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

import thinwire
from tests.ddp.reference import Ledger, loss_of
from tests.models import batch, digest, mlp, wrapped
from tests.ranks import run


def _uneven(codec: str, options: dict[str, Any], batches: tuple[int, ...]) -> tuple[str, float, int]:
    """Two epochs, in which rank r has `batches[r]` batches; those that have ended still answer the others."""
    model, rank = mlp(), dist.get_rank()
    ddp = wrapped(model, **options)
    wire = thinwire.attach(ddp, codec, min_elements=100)
    ledger = Ledger(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    last = max(range(len(batches)), key=lambda r: (batches[r], r))
    for epoch in range(2):
        with Join([ddp]):
            for step in range(batches[rank]):
                optimizer.zero_grad()
                loss_of(ddp, 100 * epoch + step, rank).backward()
                ledger.close_step()
                optimizer.step()
        # Ranks that ended early have not seen the last results: the last one knows them all.
        for received in ledger.received.values():
            dist.broadcast(received, last)
    stats = wire.stats()
    return digest(ddp), ledger.balance(wire), stats["steps"] + stats["dense_steps"]


@pytest.mark.parametrize(
    ("codec", "options", "batches"),
    [
        ("topk(density=0.05)", {}, (4, 9, 14)),
        ("topk(density=0.05)", {"find_unused_parameters": True}, (4, 9, 14)),
        ("topk(density=0.05)", {"gradient_as_bucket_view": True}, (6, 0, 3)),
        ("micro(density=0.05, values='fp32')", {}, (3, 7, 0)),
        ("sign", {"static_graph": True}, (2, 4, 7)),
        ("randomblock(ratio=8)", {}, (2, 5, 8)),
        ("dense", {}, (2, 5, 8)),
    ],
)
def test_join(codec: str, options: dict[str, Any], batches: tuple[int, ...]) -> None:
    results = run(3, _uneven, codec, options, batches)
    assert len({parameters for parameters, _, _ in results}) == 1, "Join gives all ranks the last parameters"
    for _, balance, steps in results:
        assert steps == 2 * max(batches), "ranks that have joined take part in every exchange"
        assert balance <= 1e-6


def _by_active_ranks() -> str:
    ddp = wrapped()
    thinwire.attach(ddp, "topk(density=0.05)", min_elements=100)
    with pytest.raises(RuntimeError) as caught, ddp.join(divide_by_initial_world_size=False):
        loss_of(ddp, 0, dist.get_rank()).backward()
    return str(caught.value)


def test_a_mean_over_active_ranks_is_refused() -> None:
    for text in run(2, _by_active_ranks):
        assert "join(divide_by_initial_world_size=False) is not possible with a communication hook" in text


def _empty(reduction: str) -> tuple[str, list[bool], float]:
    """The last batch of every epoch is empty on the last rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = mlp()
    ddp = wrapped(model)
    wire = thinwire.attach(ddp, "topk(density=0.05)", min_elements=100)
    ledger = Ledger(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wire.guard(optimizer)
    void = []
    for step in range(12):
        inputs, targets = batch(step, rank, 0 if rank == world - 1 and step % 4 == 3 else 16)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), targets, reduction=reduction) / (
            16 if reduction == "sum" else 1
        )
        loss.backward()
        void.append(wire.skipped_last_step)
        ledger.close_step()
        optimizer.step()
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    residuals = [value for key, value in wire.state_dict().items() if ".residual." in key]
    assert all(bool(torch.isfinite(residual).all()) for residual in residuals)
    return digest(ddp), void, ledger.balance(wire)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_an_empty_batch(reduction: str) -> None:
    results = run(3, _empty, reduction)
    assert results[0] == results[1] == results[2]
    _, void, balance = results[0]
    # The mean over no samples is NaN, but its gradient is not: no row adds anything to it.
    assert not any(void)
    assert balance <= 1e-6
