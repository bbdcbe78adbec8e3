"""Steps on real ranks, and steps that are out of the ordinary: bad gradients, scalers, clipping, accumulation, DDP."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.models import batch, mlp
from tests.ranks import run
from thinwire.errors import AttachError
from thinwire.updates import blocks
from thinwire.updates.blocks import BlockBackend

from .jobs import backward, errors, everything, make, make_here, parameters, settled, shared, train, train_here

CODECS = ["randomblock(ratio=8)", "topk(density=0.1)"]


def wide() -> nn.Module:
    """Large enough for several buckets at a ratio of 2."""
    torch.manual_seed(7)
    layers = [nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 192), nn.Linear(192, 10)]
    return nn.Sequential(*layers)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def _loop(how: str, overlap: bool) -> dict[str, Any]:
    """Ordinary and extraordinary loops; the digest of x after every step."""
    wrap = DistributedDataParallel if how == "ddp" else lambda module: module
    inside = wide()
    model, opt = make_here("randomblock(ratio=2)", model=inside, wrap=wrap, overlap=overlap)
    if how == "ddp around":
        model = DistributedDataParallel(inside)
    backend = opt._backend
    assert isinstance(backend, BlockBackend)
    digests, begun, rank = [], [], dist.get_rank()
    for step in range(8):
        opt.zero_grad()
        for part in range(3 if how == "accumulation" else 1):
            backward([model], 10 * step + part, rank)
        gradient = inside[4].weight.grad  # the first one that is sent
        assert gradient is not None
        if how == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if how == "data":
            gradient.data.mul_(0.5)
        if how == "schedule":
            opt.param_groups[0]["lr"] *= 0.9
        if how == "one rank" and rank == 1:
            gradient[0, 0] += 1.0
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        begun.append([bucket.begun for bucket in backend.buckets])
        opt.step()
        digests.append(_digest(shared(opt)))
    return {
        "shared": digests,
        "point": _digest(parameters(model)),
        "gradient": _digest(gradient),
        "buckets": len(backend.buckets),
        "begun": begun,
        "overlap": backend.overlap,
        "bytes": opt.stats()["bytes_per_step"],
    }


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "how", ["plain", "ddp", "ddp around", "clipping", "accumulation", "data", "schedule", "one rank"]
)
def test_replicas_are_equal_and_sending_early_changes_nothing(how: str, ranks: int) -> None:
    early, late = run(ranks, _loop, how, True), run(ranks, _loop, how, False)
    for results in (early, late):
        assert len({tuple(result["shared"]) for result in results}) == 1
        assert len(set(results[0]["shared"])) == 8
        assert len({result["point"] for result in results}) == ranks, "every rank has its own point"
        assert len({result["gradient"] for result in results}) == ranks, "no DDP has averaged gradients"
    assert early[0]["shared"] == late[0]["shared"]
    assert early[0]["buckets"] == late[0]["buckets"] == 3
    in_vain = how not in ("plain", "ddp", "ddp around")
    assert early[0]["overlap"] is not in_vain, "sending early is given up where it is in vain"
    during, never = [True, True, False], [False, False, False]  # the last bucket is always sent by `step`
    assert early[0]["begun"] == ([during] * blocks.STRIKES + [never] * 5 if in_vain else [during] * 8)
    assert late[0]["begun"] == [never] * 8
    elements = sum(max(1, p.numel() // 2) if p.numel() >= 512 else p.numel() for p in wide().parameters())
    assert late[0]["bytes"] == 4 * elements + 8
    if not in_vain:
        assert early[0]["bytes"] == late[0]["bytes"]


class Twisted(nn.Module):
    """Two layers of one bucket, used in an order that changes once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.one, self.two = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.last = nn.Linear(64, 10)
        self.turned = False

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.two, self.one) if self.turned else (self.one, self.two)
        for layer in (self.first, *layers):
            x = layer(x).relu()
        result: Tensor = self.last(x)
        return result


def _twisted(overlap: bool) -> tuple[list[str], list[int], list[float], bool]:
    """Digests of x, how many gradients are waited for, and whether something was sent in vain, step by step."""
    model, opt = make_here("randomblock(ratio=2)", model=(module := Twisted()), overlap=overlap)
    backend = opt._backend
    assert isinstance(backend, BlockBackend)
    digests, waited, strikes = [], [], []
    for step in range(6):
        module.turned = step >= 3
        train_here(model, opt, range(step, step + 1))
        digests.append(_digest(shared(opt)))
        waited.append(sum(len(bucket.watched) for bucket in backend.buckets))
        strikes.append(backend.strikes)
    return digests, waited, strikes, backend.overlap


def test_gradients_that_come_in_another_order() -> None:
    early, late = run(2, _twisted, True), run(2, _twisted, False)
    assert early[0][0] == early[1][0] == late[0][0]
    _, waited, strikes, overlap = early[0]
    assert waited[:3] == [1, 1, 1], "a hook on the last gradient is enough"
    assert strikes == [0, 0, 0, 1, 0, 0], "the step in which the order is another finds out"
    assert waited[3:] == [6, 6, 6], "from then on weights and biases of three layers are waited for"
    assert overlap


def _poisoned(codec: str, adam: bool, period: int) -> list[str]:
    kind = torch.optim.Adam if adam else torch.optim.SGD
    options = {"lr": 1e-3} if adam else None
    model, opt = make_here(codec, optimizer=kind, options=options, period=period)
    train_here(model, opt, range(3 * period + period - 1))
    digests = []
    for step, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        before = everything(opt, model)
        opt.zero_grad()
        backward([model], 100 + step, dist.get_rank())
        if dist.get_rank() == 1:
            next(iter(model.parameters())).grad.view(-1)[17] = value
        opt.step()
        assert opt.skipped == step + 1
        for old, new in zip(before, everything(opt, model), strict=True):
            assert torch.equal(old, new), "a void step changes nothing on any rank"
    train_here(model, opt, range(200, 200 + 2 * period))
    assert opt.skipped == 3
    digests.append(_digest(shared(opt)))
    return digests


@pytest.mark.parametrize(("codec", "adam"), [(CODECS[0], False), (CODECS[1], False), (CODECS[0], True)])
@pytest.mark.parametrize("period", [1, 2])
def test_a_gradient_that_is_not_finite_changes_nothing_anywhere(codec: str, adam: bool, period: int) -> None:
    results = run(3, _poisoned, codec, adam, period)
    assert results[0] == results[1] == results[2]


def test_in_the_middle_of_a_period_only_the_rank_itself_skips() -> None:
    models, opt = make(2, period=3)
    opt.zero_grad()
    backward(models, 0)
    before = everything(opt, models[1], 1)
    next(models[1].parameters()).grad[0, 0] = float("nan")
    opt.step()
    assert (opt.local_skipped, opt.skipped) == (1, 0)
    assert errors(opt, 0).any()
    for old, new in zip(before, everything(opt, models[1], 1), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("value", [3e38, 2e30])
def test_a_gradient_beyond_all_measure_counts_as_not_finite(value: float) -> None:
    models, opt = make(2)
    train(models, opt, range(2))
    before = shared(opt)
    opt.zero_grad()
    backward(models, 2)
    next(models[0].parameters()).grad[3, 3] = value
    opt.step()
    assert opt.skipped == 1
    assert torch.equal(shared(opt), before)


def _scaled(codec: str) -> tuple[Tensor, list[float], int]:
    model, opt = make_here(codec)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    scales, rank = [], dist.get_rank()
    for step in range(8):
        opt.zero_grad()
        inputs, targets = batch(step, rank)
        loss = functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        if step == 4 and rank == 1:
            next(iter(model.parameters())).grad[0, 0] = float("inf")
        if step % 2:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
    return shared(opt), scales, opt.skipped


@pytest.mark.parametrize("codec", CODECS)
def test_a_scaler_skips_on_all_ranks_and_gradients_are_unscaled(codec: str) -> None:
    results = run(2, _scaled, codec)
    assert torch.equal(results[0][0], results[1][0])
    assert [skipped for _, _, skipped in results] == [1, 1]
    assert results[0][1][-1] == 1024.0
    assert results[1][1][-1] == 512.0, "the scale is the rank's own, as its gradients are"
    models, plain = make(2, codec)
    for step in range(8):
        if step == 4 and isinstance(plain._backend, BlockBackend):
            plain._backend.restart(5)  # a void step moves the draws of blocks
        if step != 4:
            train(models, plain, range(step, step + 1))
    assert torch.allclose(shared(plain), results[0][0], rtol=0, atol=1e-5)


def test_a_parameter_without_a_gradient_goes_on_with_its_momentum() -> None:
    for codec in CODECS:
        models, opt = make(2, codec)
        train(models, opt, range(2))
        weight = next(models[0].parameters())
        before = opt.state[weight]["momentum_buffer"].clone()
        opt.zero_grad()
        backward(models, 2)
        weight.grad = None
        opt.step()
        assert torch.allclose(opt.state[weight]["momentum_buffer"], 0.9 * before)
        assert weight.grad is None
        assert torch.equal(shared(opt, 0), shared(opt, 1))


def test_the_general_path_equals_the_one_pass_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    models, fast = make(3, options={"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3})
    train(models, fast, range(12))
    monkeypatch.setattr(blocks, "fits", lambda replica, codec: False)
    again, slow = make(3, options={"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3})
    assert not isinstance(slow._backend, BlockBackend)
    train(again, slow, range(12))
    assert torch.allclose(shared(fast), shared(slow), rtol=0, atol=1e-5)
    assert torch.allclose(errors(fast), errors(slow), rtol=0, atol=1e-5)


@pytest.mark.parametrize("codec", CODECS)
def test_weights_of_16_bits_have_masters_of_32(codec: str) -> None:
    models, opt = make(2, codec, model=lambda: mlp().to(torch.bfloat16), options={"lr": 1e-4})
    for step in range(5):
        before = settled(opt)
        opt.zero_grad()
        for rank, model in enumerate(models):
            inputs, targets = batch(step, rank)
            functional.cross_entropy(model(inputs.bfloat16()).float(), targets).backward()
        gradients = [torch.cat([p.grad.float().reshape(-1) for p in model.parameters()]) for model in models]
        opt.step()
        expected = before - 1e-4 * torch.stack(gradients).double().mean(0)
        assert torch.allclose(settled(opt), expected, rtol=0, atol=1e-7), (
            "steps far below the weights' own precision count"
        )
    for rank, model in enumerate(models):
        assert torch.equal(parameters(model), (shared(opt, rank) - 0.3 * errors(opt, rank)).bfloat16())


def test_channels_last_takes_the_general_path() -> None:
    def convolution() -> nn.Module:
        torch.manual_seed(1)
        body = nn.Sequential(nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 16, 3), nn.Flatten(), nn.Linear(64, 10))
        return body.to(memory_format=torch.channels_last)

    results = []
    for codec in ("randomblock(ratio=4)", "dense"):
        models, opt = make(2, codec, model=convolution, min_elements=0)
        assert not isinstance(opt._backend, BlockBackend)
        train(models, opt, range(4))
        assert torch.equal(shared(opt, 0), shared(opt, 1))
        results.append(settled(opt))
        assert models[0][1].weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(results[0], results[1], atol=0.05)


def test_period_is_local_steps_then_an_exchange() -> None:
    models, opt = make(2, "randomblock(ratio=1)", period=4, options={"lr": 0.05})
    for step in range(8):
        before = shared(opt)
        train(models, opt, range(step, step + 1))
        assert torch.equal(shared(opt), before) is (step % 4 != 3)
    assert torch.equal(parameters(models[0]), parameters(models[1]))
    assert opt.stats()["exchanges"] == 2


def _refused() -> list[str]:
    texts = []
    rank = dist.get_rank()
    for attempt in range(3):
        model = mlp()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        given: tuple[Any, ...] = (inner, mlp(1) if rank and attempt == 1 else model, "randomblock")
        given += (thinwire.Detached(0.1 * rank if attempt == 0 else 0.3), 0 if attempt == 2 else 1)
        with pytest.raises(AttachError) as caught:
            thinwire.LocalUpdates(*given)
        texts.append(str(caught.value))
    return texts


def test_ranks_that_do_not_fit_are_refused_together() -> None:
    for texts in run(2, _refused):
        assert "the ranks disagree: feedback" in texts[0]
        assert "not in the model" in texts[1]
        assert "the period is a number of steps" in texts[2]


def test_auto_needs_ranks_that_send_the_same_elements() -> None:
    with pytest.raises(AttachError, match="every rank chooses its own"):
        make(2, "topk", feedback=thinwire.Detached("auto"))
    models, opt = make(
        2, "randomblock(ratio=4)", feedback=thinwire.Detached("auto"), optimizer=torch.optim.Adam, options={}
    )
    train(models, opt, range(70))
    assert opt.strength != 0.3
    assert opt.strength == pytest.approx(opt.stats()["best_strength"])


def test_a_wire_and_local_updates_do_not_go_together() -> None:
    assert all(run(2, _attached))


def _attached() -> bool:
    ddp = DistributedDataParallel(mlp())
    thinwire.attach(ddp, "topk")
    with pytest.raises(AttachError, match="a wire with topk is attached"):
        thinwire.LocalUpdates(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp, "randomblock")
    return True
