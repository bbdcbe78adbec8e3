"""What local updates promise of every step, in memory: conservation, the settled path, limits, blocks, stability."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import thinwire
from thinwire.updates.blocks import BlockBackend

from .jobs import backward, errors, make, momentum, parameters, settled, shared, train

K = 3


class Vector(nn.Module):
    """One tensor."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values.clone())


def _blocks(opt: thinwire.LocalUpdates) -> Tensor:
    """Which elements of all parameters the next exchange sends."""
    backend = opt._backend
    assert isinstance(backend, BlockBackend)
    slots = backend.replicas[0].slots
    masks = [torch.zeros(slot.info.elements, dtype=torch.bool) for slot in slots]
    for bucket in backend.buckets:
        for slot, _, length, start in bucket.places.tolist():
            masks[slot][(start + torch.arange(length)) % slots[slot].info.elements] = True
    return torch.cat(masks)


@pytest.mark.parametrize("nesterov", [False, True])
def test_what_is_sent_and_what_is_kept_are_what_there_was(nesterov: bool) -> None:
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": nesterov}
    models, opt = make(K, options=options, min_elements=100)
    for step in range(12):
        opt.zero_grad()
        backward(models, step)
        block, x = _blocks(opt), shared(opt)
        before = [errors(opt, r) for r in range(K)]
        directions = [torch.cat([p.grad.reshape(-1) for p in m.parameters()]) + 1e-3 * parameters(m) for m in models]
        old = [momentum(opt, r) for r in range(K)]
        opt.step()
        sent = []
        for rank in range(K):
            m = momentum(opt, rank)
            assert torch.equal(m, 0.9 * old[rank] + directions[rank])
            update = 0.05 * (directions[rank] + 0.9 * m if nesterov else m)
            assert torch.equal(errors(opt, rank)[~block], (before[rank] + update)[~block])
            assert not errors(opt, rank)[block].any()
            sent.append((before[rank] + update)[block])
        mean = torch.stack(sent).mean(0)
        assert torch.equal(shared(opt)[~block], x[~block])
        assert torch.allclose(shared(opt)[block], x[block] - mean, rtol=0, atol=1e-6)
        for rank, model in enumerate(models):
            assert torch.equal(shared(opt, rank), shared(opt))
            assert torch.equal(parameters(model), shared(opt) - 0.3 * errors(opt, rank))


@pytest.mark.parametrize("ratio", [1, 8, 1000])
@pytest.mark.parametrize(
    "feedback", [thinwire.Plain(), thinwire.Detached(0.3), thinwire.Detached(1), thinwire.Detached("auto")]
)
def test_the_settled_model_moves_by_the_mean_momentum(ratio: int, feedback: thinwire.Detached) -> None:
    models, opt = make(K, f"randomblock(ratio={ratio})", feedback=feedback, min_elements=20)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    for step in range(60 if feedback.automatic else 8):
        before, lr = settled(opt), opt.param_groups[0]["lr"]
        train(models, opt, range(step, step + 1))
        mean = torch.stack([momentum(opt, r).double() for r in range(K)]).mean(0)
        assert torch.allclose(
            settled(opt), before - lr * mean, rtol=0, atol=2e-7 + 1e-6 * lr * float(mean.abs().max())
        )
        schedule.step()


@pytest.mark.parametrize("codec", ["topk(density=0.1)", "int8", "randomk(density=0.1)", "lowrank(rank=1)", "dense"])
@pytest.mark.parametrize("period", [1, 3])
def test_the_settled_model_moves_by_the_mean_update_with_any_codec(codec: str, period: int) -> None:
    models, opt = make(K, codec, period=period, min_elements=100)
    for step in range(7):
        before, lr = settled(opt), opt.param_groups[0]["lr"]
        train(models, opt, range(step, step + 1))
        mean = torch.stack([momentum(opt, r).double() for r in range(K)]).mean(0)
        assert torch.allclose(settled(opt), before - lr * mean, rtol=0, atol=2e-6)
        for rank in range(K):
            assert torch.equal(shared(opt, rank), shared(opt))
    assert opt.stats()["exchanges"] == 7 // period


def _sgd(ranks: int, steps: int) -> Tensor:
    """SGD on the mean gradient of all ranks."""
    from tests.models import mlp

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            backward([model], step, rank)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= ranks
        optimizer.step()
    return parameters(model)


def test_ratio_one_is_sgd() -> None:
    models, opt = make(K, "randomblock(ratio=1)")
    train(models, opt, range(10))
    assert not errors(opt).any()
    assert torch.allclose(shared(opt), _sgd(K, 10), rtol=0, atol=1e-5)


def test_one_rank_at_strength_one_settles_on_the_path_of_sgd() -> None:
    models, opt = make(1, "randomblock(ratio=16)", feedback=thinwire.Detached(1))
    train(models, opt, range(10))
    assert errors(opt).any()
    assert torch.allclose(settled(opt).float(), _sgd(1, 10), rtol=0, atol=1e-5)


def test_strength_zero_is_error_feedback_and_one_is_psync() -> None:
    """Both written out anew, from the blocks that are drawn."""
    for strength in (0.0, 1.0):
        models, opt = make(K, feedback=thinwire.Detached(strength), min_elements=0)
        x = shared(opt).double()
        e = [torch.zeros_like(x) for _ in range(K)]
        own = [x.clone() for _ in range(K)]
        m = [torch.zeros_like(x) for _ in range(K)]
        for step in range(15):
            opt.zero_grad()
            backward(models, step)
            block = _blocks(opt)
            gradients = [torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double() for model in models]
            opt.step()
            m = [0.9 * m[r] + gradients[r] for r in range(K)]
            if strength == 0.0:
                total = [e[r] + 0.05 * m[r] for r in range(K)]
                x = torch.where(block, x - torch.stack(total).mean(0), x)
                e = [torch.where(block, 0.0, t) for t in total]
                expected = [x] * K
            else:
                # Every rank takes its whole step; then the block is averaged.
                own = [own[r] - 0.05 * m[r] for r in range(K)]
                mean = torch.stack(own).mean(0)
                own = [torch.where(block, mean, p) for p in own]
                expected = own
            for rank, model in enumerate(models):
                assert torch.allclose(parameters(model).double(), expected[rank], rtol=0, atol=1e-5)


def test_on_average_the_shared_model_is_a_moving_average_of_the_settled_one() -> None:
    size, delta, steps, seeds = 32, 1 / 8, 12, 300
    begin = torch.linspace(-1, 1, size)
    target = torch.linspace(2, -1, size)
    total = torch.zeros(steps, size, dtype=torch.float64)
    path: list[Tensor] = []
    for seed in range(seeds):
        models, opt = make(
            1, f"randomblock(ratio=8, seed={seed})", model=lambda: Vector(begin), options={"lr": 0.1, "momentum": 0.5},
            feedback=thinwire.Detached(1), min_elements=0,
        )  # fmt: skip
        for step in range(steps):
            models[0].weight.grad = models[0].weight.detach() - target
            opt.step()
            total[step] += shared(opt).double()
            if seed == 0:
                path.append(settled(opt))
    expected = begin.double()
    for step in range(steps):
        expected = (1 - delta) * expected + delta * path[step]
        spread = float((path[step] - begin.double()).abs().max())
        # The standard error of a mean over seeds is below spread / 2 / sqrt(seeds); five of them.
        assert float((total[step] / seeds - expected).abs().max()) <= 5 * spread / 2 / math.sqrt(seeds)


def test_every_element_is_sent_equally_often_and_blocks_wrap() -> None:
    _, opt = make(1, "randomblock(ratio=8)", model=lambda: Vector(torch.zeros(40)), min_elements=0)
    counts, wrapped, rounds = torch.zeros(40), 0, 4000
    backend = opt._backend
    assert isinstance(backend, BlockBackend)
    for number in range(rounds):
        backend.restart(number)
        block = _blocks(opt)
        counts += block
        wrapped += bool(block[0] and block[-1])
    expected = rounds * 5 / 40
    # A block moves five neighbours together, which makes the sum of squares five times as large as for single elements.
    chi_square = float(((counts - expected) ** 2 / expected).sum()) / 5
    assert chi_square < 75, chi_square  # 39 degrees of freedom: beyond it 1 in 2000
    assert wrapped == pytest.approx(rounds * 4 / 40, rel=0.25)


def test_small_and_excluded_tensors_are_sent_whole() -> None:
    models, opt = make(K, min_elements=100, exclude=["4.weight"])
    train(models, opt, range(3))
    for slot, error in zip(opt._replicas[0].slots, opt._backend.residuals[0], strict=True):
        assert error is not None
        whole = slot.info.elements < 100 or slot.name == "4.weight"
        assert bool(error.any()) is not whole, slot.name


def test_a_step_hands_over_the_blocks_and_two_floats() -> None:
    models, opt = make(2, "randomblock(ratio=64)", model=lambda: Vector(torch.zeros(6400, 10)))
    for _ in range(3):
        for model in models:
            model.weight.grad = torch.ones(6400, 10)
        opt.step()
    assert opt.stats()["bytes_per_step"] == 4 * 64000 / 64 + 8


def test_a_recorded_path() -> None:
    """Two coordinates with curvatures 1 and 4, two ranks with different slopes: a change of numerics shows here."""
    models, opt = make(
        2, "randomblock(ratio=2)", model=lambda: Vector(torch.tensor([1.0, -2.0])), options={"lr": 0.1, "momentum": 0.5},
        feedback=thinwire.Detached(0.3), min_elements=0,
    )  # fmt: skip
    path = []
    for _ in range(8):
        for rank, model in enumerate(models):
            model.weight.grad = torch.tensor([1.0, 4.0]) * model.weight.detach() + (0.1 if rank else -0.3)
        opt.step()
        path.append(shared(opt).tolist())
    assert torch.allclose(torch.tensor(path), torch.tensor(RECORDED), rtol=0, atol=1e-6), path


RECORDED = [
    [1.0, -1.1899999],
    [0.7777, -1.1899999],
    [0.64378, -1.1899999],
    [0.64378, 1.2180003],
    [0.64378, 1.0870104],
    [0.64378, 0.5967113],
    [0.64378, 0.1228772],
    [0.64378, -0.1531907],
]


@pytest.mark.parametrize("strength", [0.0, 0.3])
def test_the_law_of_stability(strength: float) -> None:
    """On a quadratic the mean square shrinks below lr * curvature = delta / (1 - 2 * strength) and grows above it.

    From one visit of an element to the next, its error being 0 in between, x is multiplied by a factor that depends on how
    long it waits. What decides is the mean of its square.
    """
    delta, size, steps = 1 / 32, 3200, 600
    means = {}
    for factor in (0.8, 1.25):
        squares = []
        for seed in range(4):
            models, opt = make(
                1, f"randomblock(ratio=32, seed={seed})", model=lambda: Vector(torch.ones(size)),
                options={"lr": factor * delta / (1 - 2 * strength)}, feedback=thinwire.Detached(strength),
            )  # fmt: skip
            waiting = torch.ones(size, dtype=torch.bool)
            for _ in range(steps):
                visited = _blocks(opt) & waiting
                models[0].weight.grad = models[0].weight.detach().clone()
                opt.step()
                squares.append(shared(opt)[visited].double().square())
                waiting &= ~visited
            assert not waiting.any()
        means[factor] = float(torch.cat(squares).mean())
    assert means[0.8] < 0.9, means
    assert means[1.25] > 1.1, means
