"""Watching a training loop: every gradient is seen, in its order, and the loop is not changed."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import batch, digest, mlp, wrapped
from tests.ranks import run
from thinwire.profiler.links import Beside
from thinwire.profiler.watch import Compute, Watch, unsteadiness


def _loop(model: nn.Module, steps: int, watch: Watch | None = None) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        inputs, targets = batch(step, 0)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_every_gradient_in_order() -> None:
    model, plain = mlp(0), mlp(0)
    ended = []
    ticks = itertools.count()  # a clock that moves on whenever it is read
    watch = Watch(
        model,
        dict(model.named_parameters()),
        keep=range(2, 4),
        on_step=lambda: ended.append(1),
        clock=lambda: float(next(ticks)),
        thread_clock=lambda: float(next(ticks)),
    )
    watched = _loop(model, 5)
    assert all(torch.equal(a, b) for a, b in zip(watched, _loop(plain, 5), strict=True))
    assert len(watch.steps) == len(ended) == 5
    found = watch.compute()
    assert list(found.ready)[:2] in (["4.bias", "4.weight"], ["4.weight", "4.bias"])
    assert list(found.ready)[-2:] in (["0.bias", "0.weight"], ["0.weight", "0.bias"])
    assert list(found.ready.values()) == sorted(found.ready.values())
    assert found.backward == max(found.ready.values())
    assert 0 < found.forward < found.wall
    assert 0 < found.optimizer < found.wall
    assert [set(kept) for kept in watch.gradients] == [set(found.ready)] * 2
    watch.close()
    _loop(model, 2)
    assert len(watch.steps) == 5


class Clock:
    """Two clocks that stand still unless a module says what it takes: in all, and of its thread."""

    wall = thread = 0.0

    def pass_(self, wall: float, thread: float) -> None:
        self.wall += wall
        self.thread += thread


class Timed(nn.Module):
    """A layer of which forward takes so long, of which its thread works so long; its backward takes 0.5 s of both."""

    def __init__(self, clock: Clock, wall: float, thread: float) -> None:
        super().__init__()
        self.layer, self.clock, self.times = nn.Linear(32, 32), clock, (wall, thread)

    def forward(self, x: Tensor) -> Tensor:
        self.clock.pass_(*self.times)
        y: Tensor = self.layer(x)
        y.register_hook(lambda gradient: self.clock.pass_(0.5, 0.5))
        return y


def test_what_a_step_takes_and_that_a_crowd_is_noticed() -> None:
    """Threads that others keep from their core wait for most of a forward."""
    clock = Clock()
    model = nn.Sequential(Timed(clock, 3.0, 1.0), Timed(clock, 1.0, 0.5), nn.Linear(32, 10))
    watch = Watch(model, dict(model.named_parameters()), clock=lambda: clock.wall, thread_clock=lambda: clock.thread)
    _loop(model, 3)
    found = watch.compute()
    assert found.crowd == pytest.approx(4.0 / 1.5)
    assert found.forward == 4.0
    assert found.ready == pytest.approx(
        {"2.bias": 0.0, "2.weight": 0.0, "1.layer.bias": 0.5, "1.layer.weight": 0.5}
        | {"0.layer.bias": 1.0, "0.layer.weight": 1.0}
    )
    assert found.backward == 1.0
    assert found.wall == 5.0
    assert found.steps == (5.0, 5.0)


class Odd(nn.Module):
    """Returns a dictionary, uses a parameter twice, and has one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.idle = nn.Linear(32, 32), nn.Linear(4, 4)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": [self.head(self.shared(self.shared(x)))], "note": "text"}


def test_outputs_of_any_form() -> None:
    model = Odd()
    watch = Watch(model, dict(model.named_parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(step, 0)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs)["logits"][0], targets).backward()
        optimizer.step()
    found = watch.compute()
    assert set(found.ready) == {"shared.weight", "shared.bias", "head.weight", "head.bias"}
    assert found.forward > 0


def test_a_loop_without_an_optimizer_of_torch() -> None:
    model = mlp(0)
    watch = Watch(model, dict(model.named_parameters()))
    for step in range(4):
        inputs, targets = batch(step, 0)
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
            model(inputs)  # an evaluation is not a step
    assert len(watch.steps) == 3  # the last one has not ended yet
    with pytest.raises(ValueError, match="no step was seen"):
        Watch(mlp(0), {}).compute()


def _accumulated() -> tuple[int, int, str]:
    """Gradients are kept before DDP averages them; passes without an exchange do not count."""
    rank = dist.get_rank()
    ddp, alone = wrapped(mlp(0)), mlp(0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    watch = Watch(ddp, dict(ddp.module.named_parameters()), keep=range(1))
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            with ddp.no_sync() if part == 0 else contextlib.nullcontext():
                inputs, targets = batch(10 * step + part, rank)
                nn.functional.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()
        if step == 0:
            for part in range(2):
                inputs, targets = batch(part, rank)
                nn.functional.cross_entropy(alone(inputs), targets).backward()
            for name, parameter in alone.named_parameters():
                assert torch.allclose(watch.gradients[0][name], parameter.grad, atol=1e-6), name
    return len(watch.steps), len(watch.gradients), digest(ddp)


def test_own_gradients_of_passes_that_are_exchanged() -> None:
    first, second = run(2, _accumulated)
    assert first[:2] == (3, 1)
    assert first[2] == second[2]


def test_what_collectives_added_is_taken_off() -> None:
    # 1 s of backward, then a bucket of which the collective takes a second: the thread works at half its speed and is
    # charged for a tenth more than it does.
    seen = Compute(0.1, 2.2, 0.1, 3.0, {"c": 1.0, "b": 1.55, "a": 2.2})
    sizes = {"a": 8, "b": 8, "c": 8}
    found = seen.undisturbed(sizes, [8, 16], lambda size: size / 8, Beside(0.5, 0.0, 1.1))
    assert found.ready == pytest.approx({"c": 1.0, "b": 1.5, "a": 2.15})  # "b" is ready when the collective ends
    assert found.backward == pytest.approx(2.15)
    assert seen.undisturbed(sizes, [], lambda size: size, Beside(0.5, 0.0, 1.1)) == seen


def test_unsteadiness_is_of_most_steps() -> None:
    assert unsteadiness([0.25, 0.25, 0.25, 0.9]) == 0.0
    assert unsteadiness([0.2, 0.3, 0.2, 0.3]) == pytest.approx(0.4)
    assert unsteadiness([1.0]) == 0.0
