"""Nothing is lost on the way: what was sent plus what is left is what backward computed, on real processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from tests.ddp.reference import Ledger
from tests.models import batch, digest, train, wrapped
from tests.ranks import run


def _long(view: bool) -> tuple[str, float, dict[str, float]]:
    ddp = wrapped(gradient_as_bucket_view=view)
    wire = thinwire.attach(ddp, "topk(density=0.01)", min_elements=100)
    ledger = Ledger(ddp)
    losses = train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(200), each=lambda _: ledger.close_step())
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20]), "it learns"
    return digest(ddp), ledger.balance(wire), {"density": _density(wire), "steps": wire.stats()["steps"]}


def _density(wire: thinwire.Wire) -> float:
    coded = [group for group in wire.stats()["groups"] if group["codec"] != "dense"]
    return sum(group["density"] * group["elements"] for group in coded) / sum(group["elements"] for group in coded)


@pytest.mark.parametrize("view", [False, True])
def test_two_hundred_steps_lose_nothing(view: bool) -> None:
    results = run(3, _long, view)
    assert len({parameters for parameters, _, _ in results}) == 1, "replicas are equal bit for bit"
    for _, balance, stats in results:
        assert balance <= 1e-6
        assert stats["steps"] == 198, "two dense steps come first"
        assert 0.008 < stats["density"] < 0.012


class Branches(nn.Module):
    """A trunk and four branches, of which a step uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(32, 48)
        self.branches = nn.ModuleList(nn.Linear(48, 10) for _ in range(4))

    def forward(self, x: Tensor, branches: tuple[int, ...]) -> Tensor:
        hidden = self.trunk(x).relu()
        return torch.stack([self.branches[i](hidden) for i in branches]).sum(0)


def _choice(step: int, rank: int) -> tuple[int, ...]:
    """Branches of a rank in a step. No rank ever uses the last one in odd steps."""
    generator = torch.Generator().manual_seed(7919 * step + rank)
    branches = [i for i in range(3) if torch.rand((), generator=generator) < 0.5]
    if step % 2 == 0 and rank == step // 2 % 3:
        branches.append(3)
    return tuple(branches or [rank])


def _unused(codec: str, view: bool) -> tuple[str, float, int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    ddp = wrapped(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view)
    wire = thinwire.attach(ddp, codec, min_elements=100)
    ledger = Ledger(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    checked = 0
    for step in range(40):
        used = set().union(*(_choice(step, r) for r in range(world)))
        idle = [f"branches.{i}.{kind}" for i in range(4) if i not in used for kind in ("weight", "bias")]
        before = wire.state_dict()
        inputs, targets = batch(step, rank)
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(ddp(inputs, _choice(step, rank)), targets).backward()
        after = wire.state_dict()
        for name in idle:
            assert ledger.named[name].grad is None, f"{name} was not used anywhere: its gradient is left alone"
            key = f"rank{rank}.residual.{name}"
            if key in before:
                assert torch.equal(before[key].view(torch.int32), after[key].view(torch.int32))
                checked += bool(before[key].any())
        for i in used:
            assert ledger.named[f"branches.{i}.weight"].grad is not None
        ledger.close_step(idle)
        optimizer.step()
    assert wire.stats()["steps"] == 39, "one dense step comes first"
    return digest(ddp), ledger.balance(wire), checked


@pytest.mark.parametrize(("codec", "view"), [("topk(density=0.02)", True), ("topk(density=0.02)", False)])
def test_unused_parameters_that_change_from_rank_to_rank_and_step_to_step(codec: str, view: bool) -> None:
    results = run(3, _unused, codec, view)
    assert len({parameters for parameters, _, _ in results}) == 1
    for _, balance, checked in results:
        assert balance <= 1e-6
        assert checked >= 10, "there was a residual to conserve while nobody used the parameter"
