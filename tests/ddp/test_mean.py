"""The gradients that DDP hands to the optimizer are the mean over ranks, equal to a reference without DDP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from tests.ddp.reference import distance, local_gradients, loss_of, mean_gradients
from tests.models import digest, mlp, wrapped
from tests.ranks import run

# The largest distance from the mean, relative to its norm: the rounding of float32, or of the 16 bits on the wire.
EXACT, BF16, FP16 = 1e-6, 8e-3, 1e-3
CODECS = {
    "dense": EXACT,
    "cast(dtype='bf16')": BF16,
    "cast(dtype='fp16')": FP16,
    "topk(density=1.0)": EXACT,
}


def _follow(
    ddp: nn.Module, model: nn.Module, steps: int, tolerance: float, *, accumulate: int = 1, toggle: bool
) -> None:
    """Train, and compare the gradients of each step with the mean of what the ranks compute alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    world = dist.get_world_size()
    for step in range(steps):
        parts = [step * accumulate + part for part in range(accumulate)]
        expected = mean_gradients(model, world, parts)
        optimizer.zero_grad()
        for part in parts[:-1]:
            if toggle:
                ddp.require_backward_grad_sync = False
                loss_of(ddp, part, dist.get_rank()).backward()
                ddp.require_backward_grad_sync = True
            else:
                with ddp.no_sync():
                    loss_of(ddp, part, dist.get_rank()).backward()
        loss_of(ddp, parts[-1], dist.get_rank()).backward()
        off = distance([p.grad for p in model.parameters()], expected)
        assert off <= tolerance, f"step {step}: {off} away from the mean"
        optimizer.step()


def _right(view: bool, accumulate: int, toggle: bool) -> list[str]:
    digests = []
    for codec, tolerance in CODECS.items():
        model = mlp()
        ddp = wrapped(model, gradient_as_bucket_view=view)
        wire = thinwire.attach(ddp, codec, min_elements=100)
        _follow(ddp, model, 6, tolerance, accumulate=accumulate, toggle=toggle)
        if codec != "dense":
            assert wire.stats()["steps"] == 4, "two dense steps, then this codec"
        digests.append(digest(model))
    return digests


@pytest.mark.parametrize(
    ("view", "accumulate", "toggle"),
    [(False, 1, False), (True, 1, False), (False, 3, False), (True, 3, True)],
    ids=["plain", "bucket view", "no_sync", "bucket view, toggle"],
)
def test_mean(view: bool, accumulate: int, toggle: bool) -> None:
    results = run(3, _right, view, accumulate, toggle)
    assert results[0] == results[1] == results[2]


class Mixed(nn.Module):
    """Layers of three dtypes; one is large enough to be compressed in each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(32, 40)
        self.second = nn.Linear(40, 40).to(torch.bfloat16)
        self.third = nn.Linear(40, 10).to(torch.float16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = self.second(x.to(torch.bfloat16)).relu()
        return self.third(x.to(torch.float16))


def _narrow(dtype: str, view: bool) -> list[str]:
    """bf16 and fp16 parameters: the result is the mean, rounded once (dense: by the sum in that dtype as well)."""
    digests = []
    for codec in ("dense", "topk(density=1.0)", "cast(dtype='bf16')", "topk(density=0.05)"):
        model = Mixed() if dtype == "mixed" else mlp().to(getattr(torch, dtype))
        ddp = wrapped(model, gradient_as_bucket_view=view)
        wire = thinwire.attach(ddp, codec, min_elements=100)
        if "0.05" in codec:
            _follow(ddp, model, 6, 2.0, toggle=False)
            residuals = [value for key, value in wire.state_dict().items() if ".residual." in key]
            assert all(value.dtype == torch.float32 and bool(value.any()) for value in residuals)
            assert len(residuals) == 3
        else:
            _follow(ddp, model, 5, BF16, toggle=False)
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
        digests.append(digest(model))
    return digests


@pytest.mark.parametrize(
    ("dtype", "view"), [("bfloat16", False), ("float16", True), ("mixed", False), ("mixed", True)]
)
def test_narrow_parameters(dtype: str, view: bool) -> None:
    results = run(3, _narrow, dtype, view)
    assert results[0] == results[1] == results[2]


def _late() -> None:
    """Attach to a job that has trained already; what follows is what it would have been."""
    model = mlp()
    ddp = wrapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
    wire = thinwire.attach(ddp, "topk(density=1.0)", min_elements=100)
    _follow(ddp, model, 4, EXACT, toggle=False)
    assert (wire.stats()["dense_steps"], wire.stats()["steps"]) == (1, 3)


def test_attach_after_training_has_begun() -> None:
    run(2, _late)


def _static(view: bool, idle: bool) -> str:
    model = nn.ModuleDict({"used": mlp(), "unused": nn.Linear(20, 20)}) if idle else nn.ModuleDict({"used": mlp()})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    ddp = wrapped(model, static_graph=True, gradient_as_bucket_view=view)
    wire = thinwire.attach(ddp, "topk(density=1.0)", min_elements=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        expected = mean_gradients(model["used"], dist.get_world_size(), [step])
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        assert distance([p.grad for p in model["used"].parameters()], expected) <= EXACT
        if idle:
            assert all(p.grad is None for p in model["unused"].parameters())
        optimizer.step()
    assert (wire.stats()["dense_steps"], wire.stats()["steps"]) == (3, 3)
    return digest(model)


@pytest.mark.parametrize(("view", "idle"), [(False, False), (True, True), (False, True)])
def test_static_graph(view: bool, idle: bool) -> None:
    assert len(set(run(2, _static, view, idle))) == 1


class Empty(nn.Module):
    """A parameter without elements among others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.nothing = nn.Parameter(torch.zeros(0, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.nothing.sum()


def _zero_size(options: dict[str, Any]) -> list[tuple[int, ...] | None]:
    model = Empty()
    ddp = wrapped(model)
    thinwire.attach(ddp, "topk(density=1.0)", **options)
    _follow(ddp, model, 4, EXACT, toggle=False)
    return [tuple(p.grad.shape) if p.grad is not None else None for p in model.parameters()]


@pytest.mark.parametrize(
    "options", [{"min_elements": 100}, {"min_elements": 0}, {"exclude": ["nothing"], "min_elements": 0}]
)
def test_zero_size_parameter(options: dict[str, Any]) -> None:
    assert (0, 7) in run(2, _zero_size, options)[0]


def _several() -> tuple[str, str]:
    """Two DDP instances with wires of their own in one backward; the third has none."""
    models = [mlp(0), mlp(1), mlp(2)]
    modules = [wrapped(model) for model in models]
    wires = [
        thinwire.attach(modules[0], "topk(density=1.0)", min_elements=100),
        thinwire.attach(modules[1], "topk(density=0.1)", min_elements=100),
    ]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.05)
    for step in range(6):
        expected = [mean_gradients(models[i], dist.get_world_size(), [step]) for i in (0, 2)]
        optimizer.zero_grad()
        torch.stack([loss_of(ddp, step, dist.get_rank()) for ddp in modules]).sum().backward()
        for i, mean in zip((0, 2), expected, strict=True):
            assert distance([p.grad for p in models[i].parameters()], mean) <= EXACT
        optimizer.step()
    assert [wire.stats()["steps"] for wire in wires] == [4, 4]
    return digest(modules[0]), digest(modules[1])


def test_several_instances() -> None:
    results = run(2, _several)
    assert results[0] == results[1]


def _alone() -> float:
    model = mlp()
    before = copy.deepcopy(model)
    ddp = wrapped(model)
    wire = thinwire.attach(ddp, "topk(density=0.05)", min_elements=100)
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    sent = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for step in range(10):
        for t, g in zip(total, local_gradients(before, 0, [step]), strict=True):
            t += g.double()
        model.zero_grad()
        loss_of(ddp, step, 0).backward()
        for s, p in zip(sent, model.parameters(), strict=True):
            assert p.grad is not None
            s += p.grad.double()
    state = wire.state_dict()
    for (name, _), s in zip(model.named_parameters(), sent, strict=True):
        s += state.get(f"rank0.residual.{name}", torch.zeros(()))
    assert wire.stats()["residual_norm"] > 0
    return distance(sent, total)


def test_one_rank_alone() -> None:
    assert run(1, _alone)[0] <= 1e-6


def _as_native(view: bool) -> tuple[str, str]:
    digests = []
    for attached in (False, True):
        model = mlp()
        ddp = wrapped(model, gradient_as_bucket_view=view)
        if attached:
            thinwire.attach(ddp, "dense")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(8):
            optimizer.zero_grad()
            loss_of(ddp, step, dist.get_rank()).backward()
            optimizer.step()
        digests.append(digest(model))
    return digests[0], digests[1]


@pytest.mark.parametrize("view", [False, True])
def test_dense_gives_the_bits_of_ddp(view: bool) -> None:
    for native, dense in run(3, _as_native, view):
        assert native == dense
