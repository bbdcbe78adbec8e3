"""Mixed precision around a wire: scalers, autocast, 16-bit parameters, gradient clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from tests.engine.test_nonfinite import Bad, Spoiler, residuals, same
from tests.models import batch, digest, mlp, wrapped
from tests.ranks import run
from thinwire.errors import AttachError

CODECS = ["micro(density=0.05, values='fp32')", "topk(density=0.05)", "randomblock(ratio=8)"]
NAN = float("nan")


def _loss(ddp: nn.Module, step: int, rank: int | None = None) -> Tensor:
    inputs, targets = batch(step, dist.get_rank() if rank is None else rank)
    kind = next(ddp.parameters()).dtype
    return nn.functional.cross_entropy(ddp(inputs.to(kind)).float(), targets)


# -- scaled_by ---------------------------------------------------------------------------------------------------------


def _scaled(codec: str, how: str) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    ddp = wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    wire = thinwire.attach(ddp, codec, scaler=scaler if how == "attach" else None, min_elements=100)
    if how == "before":
        wire.scaled_by(scaler)
    spoiler = Spoiler(ddp.module, {4: Bad("2.weight", NAN, (1,)), 7: Bad("0.weight", float("inf"), (0,))})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        spoiler.step = step
        if how == "later" and step == 3:
            wire.scaled_by(scaler)
        optimizer.zero_grad()
        scaled = how != "later" or step >= 3
        before = residuals(wire)
        if scaled:
            scaler.scale(_loss(ddp, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            _loss(ddp, step).backward()
            optimizer.step()
        if step in spoiler.events:
            assert same(residuals(wire), before)
    state = wire.state_dict()
    return digest(ddp), residuals(wire), {key: value for key, value in state.items() if "thinwire" in key}


def _scaled_by(codec: str) -> None:
    first = _scaled(codec, "attach")
    assert same(_scaled(codec, "before"), first)
    assert same(_scaled(codec, "later"), first), "a power of two as scale changes nothing, whenever it comes"
    wire = thinwire.attach(wrapped(), codec, min_elements=100)
    with pytest.raises(AttachError, match=r"needs a torch.amp.GradScaler, not float|rank 1 refuses"):
        wire.scaled_by(2.0 if dist.get_rank() else torch.amp.GradScaler("cpu"))  # type: ignore[arg-type]
    with pytest.raises(AttachError, match="the ranks disagree: scaler"):
        wire.scaled_by(torch.amp.GradScaler("cpu", enabled=dist.get_rank() == 0))
    wire.scaled_by(torch.amp.GradScaler("cpu", enabled=False))
    assert not wire.session.safety.protected


@pytest.mark.parametrize("codec", CODECS)
def test_a_scaler_that_is_named_later(codec: str) -> None:
    run(2, _scaled_by, codec)


def test_an_exchange_with_a_scaler() -> None:
    """Without DDP: the scale is looked at when the first tensor of a step is given."""
    results = []
    for scale in (1.0, 2.0**10):
        exchange = thinwire.Exchange({"w": torch.zeros(5000)}, "topk(density=0.02)", thinwire.LocalWorld(2))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        exchange.scaled_by(scaler)
        scaler.scale(torch.zeros(()))  # it makes its scale when it is first used
        for step in range(6):
            dice = torch.Generator().manual_seed(step)
            ranks = [{"w": scaler.get_scale() * torch.randn(5000, generator=dice)} for _ in range(2)]
            before = exchange.state_dict()
            if step == 3:
                ranks[1]["w"][77] = NAN
            exchange.reduce_(ranks)
            assert exchange.skipped_last_step == (step == 3)
            if step == 3:
                keys = [key for key in before if ".residual." in key]
                assert all(torch.equal(exchange.state_dict()[key], before[key]) for key in keys)
                scaler.update(scaler.get_scale() / 2)
                continue
            results.append(ranks[0]["w"] / scaler.get_scale())
    assert all(torch.equal(a, b) for a, b in zip(results[:5], results[5:], strict=True))


# -- dtypes ------------------------------------------------------------------------------------------------------------


def _learns(codec: str, kind: str) -> tuple[list[str], float, float]:
    """Autocast to bf16 with float32 parameters, or parameters of 16 bits: replicas are equal and residuals float32."""
    model = mlp() if kind == "autocast" else mlp().to(getattr(torch, kind))
    ddp = wrapped(model)
    wire = thinwire.attach(ddp, codec, min_elements=100)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    digests, losses = [], []
    for step in range(60):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = _loss(ddp, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        digests.append(digest(ddp))
    left = residuals(wire)
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in left.values())
    assert any(bool((value != value.bfloat16()).any()) for value in left.values()), "residuals have more than 16 bits"
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in ddp.parameters())
    return digests, sum(losses[:10]), sum(losses[-10:])


@pytest.mark.parametrize("kind", ["autocast", "bfloat16", "float16"])
def test_narrow_training(kind: str) -> None:
    for codec in CODECS[:2]:
        results = run(2, _learns, codec, kind)
        assert results[0][0] == results[1][0]
        assert results[0][2] < 0.9 * results[0][1], "it learns"


def _too_large(codec: str) -> list[str]:
    """fp16 parameters, no scaler: a residual that fp16 cannot hold leaves in pieces, and no step is void."""
    ddp = wrapped(mlp().half())
    wire = thinwire.attach(ddp, codec, min_elements=100)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    wire.guard(optimizer)
    digests = []
    for step in range(24):
        if step == 3:
            state = wire.state_dict()
            for key, value in state.items():
                if key.endswith(".residual.2.weight"):
                    value.view(-1)[5] = 3.5 * 65504
                    value.view(-1)[9] = -1.25 * 65504
            wire.load_state_dict(state)
        optimizer.zero_grad()
        before = residuals(wire).get("2.weight", torch.zeros(64, 96)).double()
        _loss(ddp, step).backward()
        optimizer.step()
        assert not wire.skipped_last_step
        gradient = ddp.module[2].weight.grad
        assert gradient.isfinite().all()
        if step >= 3:
            sent = before.view(-1)[[5, 9]] - residuals(wire)["2.weight"].view(-1)[[5, 9]]
            assert torch.allclose(gradient.view(-1)[[5, 9]].double(), sent, atol=64.0), "conserved, to fp16's rounding"
        digests.append(digest(ddp))
    left = residuals(wire)["2.weight"].view(-1)[[5, 9]]
    assert left.abs().max() < 65504
    return digests


@pytest.mark.parametrize("codec", ["topk(density=1.0)", "micro(density=1.0)", "strided", "topk(density=1.0) via K"])
def test_a_mean_that_fp16_cannot_hold_does_not_stop_training(codec: str) -> None:
    results = run(2, _too_large, codec)
    assert results[0] == results[1]


# -- clipping ----------------------------------------------------------------------------------------------------------


def _norm(gradients: list[Tensor]) -> float:
    return float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())


def _clipped(codec: str, scale: float | None) -> None:
    """After backward, as always: what is clipped is the mean that all ranks share, and the residuals do not know of it."""
    ends: list[tuple[str, dict[str, Tensor]]] = []
    for clip in (False, True):
        ddp = wrapped()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None, growth_interval=4)
        wire = thinwire.attach(ddp, codec, scaler=scaler, min_elements=100)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        spoiler = Spoiler(ddp.module, {5: Bad("2.weight", NAN, (1,))} if scale else {})
        for step in range(9):
            spoiler.step = step
            optimizer.zero_grad()
            scaler.scale(_loss(ddp, step)).backward()
            if clip:
                scaler.unscale_(optimizer)
                norm = float(nn.utils.clip_grad_norm_(ddp.parameters(), 0.05))
                gradients = [p.grad for p in ddp.parameters() if p.grad is not None]
                if step in spoiler.events:
                    assert norm != norm, "a void step has gradients that are not finite, clipped or not"
                else:
                    assert norm > 0.05
                    assert abs(_norm(gradients) - 0.05) < 1e-4
                everyone: list[Any] = [None, None]
                dist.all_gather_object(everyone, [norm, digest_of(gradients)])
                assert str(everyone[0]) == str(everyone[1]), "all ranks clip alike"
            scaler.step(optimizer)
            scaler.update()
        ends.append((digest(ddp), residuals(wire)))
    assert same(ends[0], ends[1])


def digest_of(tensors: list[Tensor]) -> str:
    return digest(nn.ParameterList([nn.Parameter(tensor.clone()) for tensor in tensors]))


def _clipped_before(codec: str, limit: float, scaler: torch.amp.GradScaler | None) -> None:
    """Each rank's own gradient, by hooks on the parameters, before it is exchanged: the clipped gradients are conserved."""
    ddp = wrapped()
    wire = thinwire.attach(ddp, codec, scaler=scaler, min_elements=100)
    total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in ddp.module.named_parameters()}
    sent = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in ddp.module.named_parameters()}
    scale = scaler.get_scale if scaler is not None else lambda: 1.0

    def clip(name: str) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            most = limit * scale()  # the gradient still has the scale of the loss
            gradient = gradient * (most / gradient.norm().clamp(min=most))
            total[name] += gradient.double() / scale()
            assert gradient.norm() <= 1.0001 * most
            return gradient

        return hook

    for name, parameter in ddp.module.named_parameters():
        parameter.register_hook(clip(name))
    for step in range(8):
        ddp.zero_grad()
        loss = _loss(ddp, step)
        (scaler.scale(loss) if scaler is not None else loss).backward()
        for name, parameter in ddp.module.named_parameters():
            assert parameter.grad is not None
            sent[name] += parameter.grad.double() / scale()
    left = residuals(wire)
    for name, whole in total.items():
        mine = whole - left[name].double() if name in left else whole
        dist.all_reduce(mine)
        assert torch.allclose(mine / dist.get_world_size(), sent[name], rtol=0, atol=1e-6)


def _clip_all(codec: str) -> None:
    _clipped(codec, None)
    _clipped(codec, 2.0**6)
    _clipped_before(codec, 0.02, None)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    scaler.scale(torch.zeros(()))
    _clipped_before(codec, 0.02, scaler)


@pytest.mark.parametrize("codec", CODECS)
def test_clipping_before_and_after(codec: str) -> None:
    run(2, _clip_all, codec)
