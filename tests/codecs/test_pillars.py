"""What is special about MiCRO, AdaComp, LaplaceTopK and RandomBlock, in memory; the laws they share are in `test_laws.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import thinwire
from thinwire.codecs import AdaComp, LaplaceTopK, MiCRO, RandomBlock
from thinwire.codecs.adacomp import AdaCompState
from thinwire.codecs.micro import quantile
from thinwire.codecs.micro_state import MicroState
from thinwire.codecs.randomblock import BlockState, draw
from thinwire.errors import MessageError

SHAPES = {"conv": (40, 20, 5, 5), "dense": (300, 200)}


def _exchange(codec: thinwire.Codec, world: int) -> thinwire.Exchange:
    return thinwire.Exchange({n: torch.zeros(s) for n, s in SHAPES.items()}, codec, thinwire.LocalWorld(world))


def _gradients(generator: torch.Generator, world: int, scale: float = 1.0) -> list[dict[str, torch.Tensor]]:
    """Layers of different size, a common part and a part of each rank's own."""
    common = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return [
        {
            name: scale * (10.0 if name == "conv" else 1.0) * (common[name] + torch.randn(shape, generator=generator))
            for name, shape in SHAPES.items()
        }
        for _ in range(world)
    ]


def _states(exchange: thinwire.Exchange, rank: int) -> list[object]:
    assert exchange.executor is not None
    return [run.way.state for run in exchange.executor.rank_states[rank].groups]


@pytest.mark.parametrize("threshold", ["global", "layer"])
@pytest.mark.parametrize("balance", [False, True])
def test_micro_holds_its_target_while_gradients_change(threshold: str, balance: bool) -> None:
    codec = MiCRO(0.01, threshold=threshold, balance=balance)
    exchange, generator = _exchange(codec, 4), torch.Generator().manual_seed(1)
    k = sum(int(0.01 * torch.Size(shape).numel()) for shape in SHAPES.values())
    ratios = []
    for step in range(160):
        exchange.reduce_(_gradients(generator, 4, scale=5.0 if step > 100 else 1.0))
        states = [state for state in _states(exchange, 0) if isinstance(state, MicroState)]
        ratios.append(sum(state.wanted for state in states) / k)
    assert np.mean(ratios[60:100]) == pytest.approx(1.0, abs=0.1)
    assert np.mean(ratios[130:]) == pytest.approx(1.0, abs=0.25), "it follows a jump of the gradients by 5"


def test_micro_ranks_agree_and_take_turns() -> None:
    exchange, generator = _exchange(MiCRO(0.02), 3), torch.Generator().manual_seed(2)
    judged: dict[int, set[int]] = {rank: set() for rank in range(3)}
    for step in range(8):
        exchange.reduce_(_gradients(generator, 3))
        for group, _ in enumerate(_states(exchange, 0)):
            everyone = [_states(exchange, rank)[group] for rank in range(3)]
            first = everyone[0]
            assert isinstance(first, MicroState)
            for other in everyone[1:]:
                assert isinstance(other, MicroState)
                assert np.array_equal(first.thresholds, other.thresholds)
                assert np.array_equal(first.support[: first.count], other.support[: other.count])
            support = first.support[: first.count]
            assert np.all(np.diff(support) > 0), "no place is selected twice"
        for rank in range(3):
            judged[rank].add((step + rank) % 3)
    assert all(parts == {0, 1, 2} for parts in judged.values())


@pytest.mark.parametrize(
    ("controller", "ratio", "factor"),
    [
        ("fixed", 1.1001, 1.005),
        ("fixed", 1.05, 1.00125),
        ("fixed", 1.0, 1.0),
        ("fixed", 0.95, 0.99875),
        ("fixed", 0.9, 0.995),
        ("paper_code", 1.2, 1.005),
        ("paper_code", 0.95, 1.00125),
        ("paper_code", 0.9, 0.995),
        ("proportional", 2.0, 2.0**0.25),
        ("proportional", 100.0, 1.5),
        ("proportional", 0.0, 1 / 1.5),
    ],
)
def test_micro_controllers(controller: str, ratio: float, factor: float) -> None:
    assert MiCRO(0.01, controller=controller)._factor(1000 * ratio, 1000, steps=1) == pytest.approx(factor)


def test_micro_start_quantile() -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(3)).abs()
    counts = torch.bincount(values.view(torch.int32) >> 20, minlength=2048).double().numpy()
    found = quantile(counts, 2000)
    assert (values >= found).sum().item() == pytest.approx(2000, rel=0.1)


def test_micro_with_gradients_of_zero() -> None:
    exchange = _exchange(MiCRO(0.01), 2)
    for _ in range(30):
        tensors = [{name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2)]
        exchange.reduce_(tensors)
        assert all(not tensor.any() for rank in tensors for tensor in rank.values())


def test_adacomp_rates_in_real_messages() -> None:
    """41 times within 5 % for bins of 50, 160 to 190 for bins of 500, after 100 steps of Gaussian gradients."""
    for length, low, high in ((50, 0.95 * 41, 1.05 * 41), (500, 160.0, 190.0)):
        codec = AdaComp(bin_dense=length)
        elements = 100_000
        exchange = thinwire.Exchange({"w": torch.zeros(250, 400)}, codec, thinwire.LocalWorld(1))
        generator, rates = torch.Generator().manual_seed(4), []
        assert exchange.executor is not None
        run = exchange.executor.rank_states[0].groups[0]
        for step in range(140):
            exchange.reduce_({"w": torch.randn(250, 400, generator=generator)})
            if step >= 100:
                rates.append(4 * elements / run.way.wanted)
        assert low <= np.mean(rates) <= high


def test_adacomp_sends_later_what_is_cut() -> None:
    """The first step wants ten times what was expected: the message is cut, and nothing is lost."""
    exchange, generator = _exchange(AdaComp(), 2), torch.Generator().manual_seed(5)
    assert exchange.executor is not None
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(6):
        gradients = _gradients(generator, 2)
        for name in total:
            total[name] += sum(rank[name].double() for rank in gradients) / 2
        exchange.reduce_(gradients)
        for name in total:
            total[name] -= gradients[0][name].double()
        if step == 0:
            run = exchange.executor.rank_states[0].groups[0]
            assert run.way.wanted > run.way.state.outgoing.numel()
    for name in total:
        left = (
            sum(dict(rank_state.residuals.named())[name].double() for rank_state in exchange.executor.rank_states) / 2
        )
        assert torch.allclose(left, total[name], atol=1e-4)


def test_adacomp_refuses_hostile_messages() -> None:
    exchange, generator = _exchange(AdaComp(), 1), torch.Generator().manual_seed(6)
    exchange.reduce_(_gradients(generator, 1))
    state = _states(exchange, 0)[0]
    assert isinstance(state, AdaCompState)
    good, random = state.outgoing.clone(), np.random.default_rng(7)
    outcomes = {"valid": 0, "refused": 0}
    for _ in range(3000):
        bad = good.clone()
        for _ in range(int(random.integers(1, 6))):
            place = int(random.integers(0, min(len(bad), 400)))
            bad[place] = int(random.integers(0, 256))
        if random.random() < 0.2:
            bad = bad[: int(random.integers(0, len(bad)))]
        try:
            AdaComp().decode([bad], torch.zeros(state.group.elements), 1.0, state)
            outcomes["valid"] += 1
        except MessageError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 1000


def test_laplace_counts_within_its_tolerance() -> None:
    exchange, generator = _exchange(LaplaceTopK(0.01, tolerance=0.1), 2), torch.Generator().manual_seed(8)
    assert exchange.executor is not None
    elements = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    for _ in range(40):
        exchange.reduce_(_gradients(generator, 2))
        for rank_state in exchange.executor.rank_states:
            assert sum(run.way.entries for run in rank_state.groups) == pytest.approx(0.01 * elements, rel=0.11)


def test_random_blocks_reach_every_place_and_need_no_agreement() -> None:
    exchange, generator = _exchange(RandomBlock(ratio=8), 2), torch.Generator().manual_seed(9)
    seen = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in SHAPES.items()}
    for _ in range(80):
        gradients = _gradients(generator, 2)
        exchange.reduce_(gradients)
        for name in seen:
            seen[name] |= gradients[0][name] != 0
            assert (gradients[0][name] != 0).sum() <= seen[name].numel() // 8
        first, second = _states(exchange, 0)[0], _states(exchange, 1)[0]
        assert isinstance(first, BlockState)
        assert isinstance(second, BlockState)
        assert np.array_equal(first.starts, second.starts)
    assert all(places.float().mean() > 0.999 for places in seen.values())
    # The place of a block is part of what a resumed or mixed job relies on.
    assert draw(0, 3, "layer.weight", 1000) == draw(0, 3, "layer.weight", 1000)
    assert len({draw(0, step, "layer.weight", 1 << 30) for step in range(100)}) == 100


@pytest.mark.parametrize(
    "text",
    [
        "micro(density=5)",
        "micro(controller='x')",
        "adacomp(bin_conv=0)",
        "laplace(tolerance=1)",
        "randomblock(ratio=0.5)",
    ],
)
def test_bad_arguments_are_refused_with_the_text(text: str) -> None:
    with pytest.raises(thinwire.ThinwireError) as caught:
        thinwire.parse(text)
    assert text in str(caught.value)
