"""Training loops that are not the plain one: compiled models, a closed wire, two rounds."""

from __future__ import annotations

import hashlib
import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from tests.ddp.reference import distance, loss_of, mean_gradients
from tests.models import digest, mlp, train, wrapped
from tests.ranks import outcomes, run


def _compiled(how: str, codec: str) -> tuple[str, float]:
    model = mlp()
    options = {"bucket_cap_mb": 25}  # dynamo splits graphs at buckets, and refuses a first one that is the largest
    if how == "DDP(compile(model))":
        ddp = wrapped(torch.compile(model), **options)
        wire = thinwire.attach(ddp, codec, min_elements=100, exclude=["4.*"])
    elif how == "compile(DDP), then attach":
        ddp = torch.compile(wrapped(model, **options))
        wire = thinwire.attach(ddp, codec, min_elements=100, exclude=["4.*"])
    else:
        plain = wrapped(model, **options)
        wire = thinwire.attach(plain, codec, min_elements=100, exclude=["4.*"])
        ddp = torch.compile(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    worst = 0.0
    for step in range(6):
        expected = mean_gradients(model, dist.get_world_size(), [step])
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        worst = max(worst, distance([p.grad for p in model.parameters()], expected))
        optimizer.step()
    assert wire.stats()["steps"] == 4
    names = sorted(key for key in wire.state_dict() if ".residual." in key)
    rank = dist.get_rank()
    assert names == [f"rank{rank}.residual.0.weight", f"rank{rank}.residual.2.weight"], names
    return digest(model), worst


@pytest.mark.parametrize("how", ["DDP(compile(model))", "compile(DDP), then attach", "attach, then compile(DDP)"])
def test_torch_compile(how: str) -> None:
    results = run(2, _compiled, how, "topk(density=1.0)")
    assert results[0] == results[1]
    assert results[0][1] <= 1e-5, "compiled code rounds differently"


def _closed(steps: int, codec: str) -> tuple[str, str]:
    ddp = wrapped()
    wire = thinwire.attach(ddp, codec, min_elements=100)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    train(ddp, optimizer, range(steps))
    wire.close()
    with pytest.raises(RuntimeError) as caught:
        train(ddp, optimizer, range(1))
    return str(caught.value), str(wire.error)


@pytest.mark.parametrize(("steps", "codec"), [(1, "topk"), (4, "topk"), (4, "dense")])
def test_a_closed_wire_says_so(steps: int, codec: str) -> None:
    for text, error in run(2, _closed, steps, codec):
        assert "this wire is closed: it was closed" in text, text
        assert error == "it was closed"


def _shared(ddp_options: dict[str, bool]) -> tuple[str, str, float]:
    """One weight in two places, and a part that DDP is told to ignore."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.into = nn.Linear(32, 32)
            self.out = nn.Linear(32, 32)
            self.out.weight = self.into.weight
            self.local = nn.Linear(32, 40)
            self.head = nn.Linear(40, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.local(self.out(self.into(x).relu())))

    model = Tied()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["local.weight"])
    ddp = wrapped(model, **ddp_options)
    thinwire.attach(ddp, "topk(density=1.0)", min_elements=100)
    worst = 0.0
    shared = [(name, p) for name, p in model.named_parameters() if name != "local.weight"]
    for step in range(5):
        means = dict(
            zip(dict(model.named_parameters()), mean_gradients(model, dist.get_world_size(), [step]), strict=True)
        )
        model.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        worst = max(worst, distance([p.grad for _, p in shared], [means[name] for name, _ in shared]))
    ignored = model.local.weight.grad
    assert ignored is not None
    gradients = b"".join(p.grad.numpy().tobytes() for _, p in shared if p.grad is not None)
    return hashlib.sha256(gradients).hexdigest(), hashlib.sha256(ignored.numpy().tobytes()).hexdigest(), worst


@pytest.mark.parametrize("options", [{}, {"static_graph": True}])
def test_tied_and_ignored_parameters(options: dict[str, bool]) -> None:
    (same, mine, worst), (same_too, yours, _) = run(2, _shared, options)
    assert same == same_too
    assert mine != yours, "each rank keeps its own gradient of a parameter that DDP ignores"
    assert worst <= 1e-6


def _dense_loses_a_rank() -> None:
    ddp = wrapped()
    wire = thinwire.attach(ddp, "dense")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)

    def die(step: int) -> None:
        if step == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError) as caught:
        train(ddp, optimizer, range(20), spoil=die)
    assert wire.error is not None
    with pytest.raises(RuntimeError) as again:
        train(ddp, optimizer, range(1))
    raise SystemExit(f"{caught.value}\n====\n{again.value}")


def test_a_rank_that_is_killed_while_travelling_dense() -> None:
    ended = outcomes(3, _dense_loses_a_rank)
    assert ended[1] == ("exit", -signal.SIGKILL)
    for rank in (0, 2):
        kind, text = ended[rank]
        assert kind == "error"
        first, then = text.split("\n====\n")
        # Whichever fails first ends all of them.
        assert re.search(rf"bucket \d, dense step 5, all-reduce \(average\), rank {rank}", first), text
        assert re.search(r"this wire is closed: bucket \d, dense step 5", then), text


def _dense_is_counted() -> dict[str, float]:
    ddp = wrapped()
    wire = thinwire.attach(ddp, "dense")
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), range(7))
    return wire.stats()


def test_dense_steps_are_counted() -> None:
    assert run(2, _dense_is_counted)[0]["dense_steps"] == 7
