"""Under a GradScaler: a step that overflows leaves no trace, and the scale changes nothing that is sent."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from tests.engine.test_nonfinite import VARIANTS, Bad, Spoiler, residuals, same, schedule
from tests.models import batch, digest, mlp, wrapped
from tests.ranks import run


def _skips(codec: str) -> tuple[list[str], int]:
    ddp = wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    wire = thinwire.attach(ddp, codec, scaler=scaler, min_elements=100)
    events = schedule(codec, dist.get_world_size())
    spoiler = Spoiler(ddp.module, events)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    digests, skipped = [], 0
    for step in range(max(events) + 4):
        spoiler.step = step
        inputs, targets = batch(step, dist.get_rank())
        optimizer.zero_grad()
        before = digest(ddp), residuals(wire), copy.deepcopy(optimizer.state_dict())
        scale = scaler.get_scale()
        loss = nn.functional.cross_entropy(ddp(inputs), targets)
        assert torch.isfinite(loss)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after = digest(ddp), residuals(wire), optimizer.state_dict()
        if step in events:
            skipped += 1
            assert after[0] == before[0]
            assert same(after[1], before[1]), "residuals are as before, bit for bit"
            assert same(after[2], before[2])
            assert scaler.get_scale() == scale / 2
        else:
            assert after[0] != before[0], "training goes on"
            assert scaler.get_scale() == scale
        assert wire.skipped_last_step == (step in events)
        assert wire.stats()["skipped"] == skipped
        digests.append(after[0])
    return digests, skipped


@pytest.mark.parametrize("codec", VARIANTS)
def test_a_bad_step_leaves_no_trace(codec: str) -> None:
    results = run(3, _skips, codec)
    assert results[0] == results[1] == results[2]
    assert results[0][1] == 8


# -- units -------------------------------------------------------------------------------------------------------------


def _trained(codec: str, scaler: torch.amp.GradScaler | None) -> tuple[str, dict[str, Tensor], int]:
    ddp = wrapped()
    wire = thinwire.attach(ddp, codec, scaler=scaler, min_elements=100)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(9):
        inputs, targets = batch(step, dist.get_rank())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), targets)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 6:
                scaler.update(scaler.get_scale() / 8)
    return digest(ddp), residuals(wire), wire.stats()["memory_bytes"]


def _units(codecs: list[str]) -> None:
    for codec in codecs:
        plain = _trained(codec, None)
        growing = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
        for scaler in (growing, torch.amp.GradScaler("cpu", init_scale=2.0**16)):
            assert same(_trained(codec, scaler)[:2], plain[:2]), f"{codec}, scale {scaler.get_scale()}"
        assert growing.get_scale() == 2.0**5, "the scale has grown, and was changed by hand"
        disabled = torch.amp.GradScaler("cpu", enabled=False)
        assert same(_trained(codec, disabled), plain), "it skips nothing, so it needs no second copy of residuals"
        # A factor that is no power of two rounds: equal in size, not in bits.
        odd = _trained(codec, torch.amp.GradScaler("cpu", init_scale=1000.0))[1]
        for name, residual in odd.items():
            norm = float(plain[1][name].norm())
            assert 0.5 * norm <= float(residual.norm()) <= 2.0 * norm


def test_the_scale_changes_nothing_that_is_sent() -> None:
    # Cast to fp16 sends gradients with their scale, so that it can keep them in range; bf16 has the range of fp32.
    codecs = [codec for codec in VARIANTS if codec != "cast(dtype='fp16')"]
    run(2, _units, codecs)


# -- buckets of 16 bits ------------------------------------------------------------------------------------------------


class HalfScaler(torch.amp.GradScaler):
    """The one of torch refuses fp16 gradients unless it is told, as those who have fp16 parameters do."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


def _half(codec: str) -> list[str]:
    """fp16 parameters. A residual comes to hold more than fits the bucket at this scale, but not at half of it."""
    ddp = wrapped(mlp().half())
    scaler = HalfScaler("cpu", init_scale=2.0**6, growth_interval=1000)
    wire = thinwire.attach(ddp, codec, scaler=scaler, min_elements=100)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    digests = []
    for step in range(10):
        if step == 5:
            state = wire.state_dict()
            for key, value in state.items():
                if key.endswith(".residual.2.weight"):
                    value.fill_(1.4 * 65504 / 2.0**6)
            wire.load_state_dict(state)
        inputs, targets = batch(step, dist.get_rank())
        optimizer.zero_grad()
        before, old, scale = digest(ddp), residuals(wire), scaler.get_scale()
        scaler.scale(nn.functional.cross_entropy(ddp(inputs.half()).float(), targets)).backward()
        void = wire.skipped_last_step
        scaler.step(optimizer)
        scaler.update()
        assert void == (step == 5), f"step {step}"
        if void:
            assert digest(ddp) == before
            assert same(residuals(wire), old)
            assert scaler.get_scale() == scale / 2
        digests.append(digest(ddp))
    assert all(p.isfinite().all() for p in ddp.parameters())
    assert wire.stats()["skipped"] == 1
    return digests


@pytest.mark.parametrize("codec", ["topk(density=1.0)", "randomblock", "strided"])
def test_a_residual_that_does_not_fit_the_bucket(codec: str) -> None:
    results = run(3, _half, codec)
    assert results[0] == results[1] == results[2]


def _half_gradient(codec: str) -> None:
    """The largest value of fp16 on all ranks: its mean, rounded to bf16 on the way or summed in fp16, does not fit."""
    ddp = wrapped(mlp().half())
    wire = thinwire.attach(ddp, codec, min_elements=100)
    events = {0: Bad("4.weight", 65504.0, (0, 1, 2)), 4: Bad("0.weight", 65504.0, (0, 1, 2))}
    spoiler = Spoiler(ddp.module, events)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)
    wire.guard(optimizer)
    for step in range(7):
        spoiler.step = step
        inputs, targets = batch(step, dist.get_rank())
        optimizer.zero_grad()
        before = digest(ddp)
        nn.functional.cross_entropy(ddp(inputs.half()).float(), targets).backward()
        optimizer.step()
        assert all(p.isfinite().all() for p in ddp.parameters())
        assert wire.skipped_last_step == (digest(ddp) == before)
        assert wire.skipped_last_step == (step in events)
    assert wire.stats()["skipped"] == 2


def test_a_gradient_that_does_not_fit_the_bucket() -> None:
    run(3, _half_gradient, "cast")
