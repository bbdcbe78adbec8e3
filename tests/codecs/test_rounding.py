"""What 16-bit sums lose: every addition rounds, so the bound of `docs/guarantees.md` grows with the number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from tests import ranks

from .laws import ROUNDING, SMALLEST, WIRE_ROUNDING, gradients, steps_of

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SHAPES = {"matrix": (120, 100)}


def bound(additions: int, unit: float) -> float:
    """Largest error of a sum, relative to the sum of magnitudes, when each addition rounds to nearest, in any order."""
    return float((1.0 + unit) ** additions - 1.0)


def _narrow(world: int, wire: str) -> Tensor:
    values = [gradients(SHAPES, 1, "normal", seed)[0]["matrix"].flatten() for seed in range(world)]
    return torch.stack(values).to(DTYPES[wire])


def _excess(total: Tensor, parts: Tensor) -> tuple[float, float]:
    """The largest error of a sum relative to the sum of magnitudes, and relative to the exact sum."""
    exact, size = parts.double().sum(0), parts.double().abs().sum(0)
    off = (total.double() - exact).abs()
    return float((off / size).max()), float((off / exact.abs().clamp_min(1e-30)).max())


@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("world", [2, 4, 16])
def test_a_sum_in_memory(wire: str, world: int) -> None:
    parts, unit = _narrow(world, wire), WIRE_ROUNDING[wire]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    off, of_sum = _excess(total, parts)
    assert off <= bound(world - 1, unit)
    assert (of_sum <= unit) == (world == 2), "one rounding of the sum is enough for two ranks only"


def _sum_on_gloo(wire: str) -> tuple[float, float]:
    parts = _narrow(dist.get_world_size(), wire)
    total = parts[dist.get_rank()].clone()
    dist.all_reduce(total)
    return _excess(total, parts)


@pytest.mark.parametrize("wire", DTYPES)
def test_a_sum_on_gloo(wire: str) -> None:
    for off, of_sum in ranks.run(4, _sum_on_gloo, wire):
        assert off <= bound(3, WIRE_ROUNDING[wire])
        assert of_sum > WIRE_ROUNDING[wire]


@pytest.mark.parametrize(
    ("text", "wire"),
    [
        ("cast", "bf16"),
        ("cast(dtype='fp16')", "fp16"),
        ("micro(density=0.05)", "bf16"),
        ("micro(density=0.05, values='fp16')", "fp16"),
    ],
)
@pytest.mark.parametrize("world", [2, 4, 16])
def test_a_mean_of_what_was_sent(text: str, wire: str, world: int) -> None:
    """Of codecs that sum 16-bit values: n - 1 additions, and for `cast`, without a residual, the rounding of the value."""
    exchange = thinwire.Exchange(
        {name: torch.empty(shape) for name, shape in SHAPES.items()}, text, thinwire.LocalWorld(world)
    )
    for step in steps_of(exchange, [gradients(SHAPES, world, "normal", seed) for seed in range(4)]):
        sent = []
        for given, before, after in zip(step.given, step.before, step.after, strict=True):
            kept = "matrix" in after
            total = before["matrix"] + given["matrix"] if kept else given["matrix"]
            sent.append(total.double() - (after["matrix"].double() if kept else 0.0))
        stack = torch.stack(sent)
        off = (stack.mean(0) - step.results[0]["matrix"].double()).abs()
        size = stack.abs().mean(0)
        allowed = size * (bound(world, WIRE_ROUNDING[wire]) + 8 * ROUNDING) + 8 * SMALLEST[wire]
        assert bool((off <= allowed).all())
