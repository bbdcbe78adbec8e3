"""Ranks that have loaded states of different steps are told so before anything is sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import thinwire
from tests.models import train, wrapped
from tests.ranks import run
from tests.updates.jobs import make_here, train_here
from thinwire.errors import ExchangeError


def _tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return {"weight": torch.randn(3000, generator=generator)}


def _exchange(codec: str) -> str:
    exchange = thinwire.Exchange(_tensors(0), codec)
    states = []
    for step in range(3):
        exchange.reduce_(_tensors(step))
        states.append(exchange.state_dict())
    exchange.load_state_dict(states[1])
    exchange.reduce_(_tensors(2))  # all ranks the same: goes on
    exchange.load_state_dict(states[dist.get_rank()])
    with pytest.raises(ExchangeError) as caught:
        exchange.reduce_(_tensors(2))
    with pytest.raises(ExchangeError, match="closed"):
        exchange.reduce_(_tensors(2))
    return str(caught.value)


@pytest.mark.parametrize("codec", ["topk(density=0.05)", "randomblock(ratio=4)"])
def test_an_exchange_with_states_of_different_steps(codec: str) -> None:
    for rank, text in enumerate(run(2, _exchange, codec)):
        assert f"at step {rank + 1}, rank {rank}: the ranks disagree: step: rank 0 has 1, rank 1 has 2" in text


def _attached() -> str:
    ddp = wrapped()
    wire = thinwire.attach(ddp, "randomblock(ratio=4)", min_elements=100)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    states = []
    for step in range(2):
        train(ddp, optimizer, range(4 * step, 4 * step + 4))
        states.append(wire.state_dict())
    wire.load_state_dict(states[dist.get_rank()])
    with pytest.raises(RuntimeError) as caught:
        train(ddp, optimizer, range(1))
    return str(caught.value)


def test_a_job_with_states_of_different_steps() -> None:
    for text in run(2, _attached):
        assert "the ranks disagree: step: rank 0 has 2, rank 1 has 6" in text


def _updates() -> str:
    model, opt = make_here()
    states = []
    for step in range(2):
        train_here(model, opt, range(2 * step, 2 * step + 2))
        states.append(opt.state_dict())
    opt.load_state_dict(states[1])
    train_here(model, opt, range(1))
    opt.load_state_dict(states[dist.get_rank()])
    with pytest.raises(ExchangeError) as caught:
        train_here(model, opt, range(1))
    return str(caught.value)


def test_local_updates_with_states_of_different_steps() -> None:
    for text in run(2, _updates):
        assert "the ranks disagree: step: rank 0 has 2, rank 1 has 4" in text
