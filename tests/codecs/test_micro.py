"""MiCRO with its defaults: what is kept is the largest, what was wanted is known, and every step is the oracle's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import thinwire
from thinwire.codecs.micro import _largest
from thinwire.codecs.micro_state import MicroState

from .laws import check_conservation, check_replicas, residuals, steps_of
from .micro_oracle import Oracle


def exchange_of(codec: thinwire.MiCRO, elements: int, ranks: int) -> thinwire.Exchange:
    return thinwire.Exchange({"weight": torch.zeros(elements)}, codec, thinwire.LocalWorld(ranks), min_elements=1)


def state_of(exchange: thinwire.Exchange, rank: int = 0) -> MicroState:
    assert exchange.executor is not None
    state = exchange.executor.rank_states[rank].groups[0].way.state
    assert isinstance(state, MicroState)
    return state


class Gradients:
    """Magnitudes that differ from block to block, from rank to rank and from step to step, with a part in common."""

    def __init__(self, elements: int, ranks: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.elements, self.ranks = elements, ranks
        self.scales = np.exp(2.0 * np.sin(np.arange(elements) * (6.0 / elements))).astype(np.float32)

    def draw(self, burst: float = 1.0) -> list[NDArray[np.float32]]:
        random = self.random
        common = random.standard_normal(self.elements)
        rows = []
        for _ in range(self.ranks):
            own = np.exp(0.5 * random.standard_normal()) * (common + random.standard_normal(self.elements))
            rows.append((burst * self.scales * own).astype(np.float32))
        return rows


def check_largest(exchange: thinwire.Exchange, given_: list[NDArray[np.float32]]) -> tuple[int, int]:
    """Exchange; whatever a rank selected and did not send is no larger than what it sent. (wanted, known of it)."""
    before = [left["weight"].numpy() for left in residuals(exchange)]
    state = state_of(exchange)
    borders, threshold = state.borders.copy(), np.float32(state.thresholds[0])
    step, wanted = state.step + 1, 0
    exchange.reduce_([{"weight": torch.from_numpy(gradient.copy())} for gradient in given_])
    for rank, (left, gradient) in enumerate(zip(before, given_, strict=True)):
        part = (step + rank) % len(given_)
        magnitudes = np.abs(left + gradient)
        inside = np.zeros(magnitudes.size, bool)
        inside[borders[part] : borders[part + 1]] = True
        sent = np.zeros(magnitudes.size, bool)
        sent[state.support[: state.count]] = True
        selected = inside & (magnitudes >= threshold) & (magnitudes > 0)
        wanted += int(selected.sum())
        dropped, kept = magnitudes[selected & ~sent], magnitudes[selected & sent]
        assert not (inside & sent & ~selected).any()
        if dropped.size and kept.size:
            assert dropped.max() <= kept.min(), f"step {step}, rank {rank}: a larger one stays"
        assert kept.size or not dropped.size
    return wanted, int(state.wanted)


def _many(seed: int) -> list[int]:
    """More scores than are looked at one by one, some of them equal."""
    return np.random.default_rng(seed).integers(0, 10 + 10 * seed, 9000).tolist()


@settings(deadline=None, max_examples=30)
@given(
    ranks=st.integers(1, 6),
    elements=st.sampled_from([1500, 20_000, 40_011, 70_000]),
    density=st.sampled_from([0.003, 0.01, 0.05]),
    balance=st.booleans(),
    burst=st.sampled_from([1.0, 3.0, 100.0]),
    seed=st.integers(0, 2**32 - 1),
)
@example(ranks=2, elements=40_011, density=0.01, balance=True, burst=100.0, seed=0)  # more than are listed
@example(ranks=2, elements=40_011, density=0.01, balance=False, burst=100.0, seed=0)
@example(ranks=4, elements=70_000, density=0.05, balance=True, burst=3.0, seed=0)
def test_what_is_kept_is_the_largest(
    ranks: int, elements: int, density: float, balance: bool, burst: float, seed: int
) -> None:
    exchange = exchange_of(thinwire.MiCRO(density, balance=balance), elements, ranks)
    gradients = Gradients(elements, ranks, seed)
    exchange.reduce_([{"weight": torch.from_numpy(gradient)} for gradient in gradients.draw()])
    for step in range(8):
        wanted, known = check_largest(exchange, gradients.draw(burst if step == 5 else 1.0))
        assert known == wanted, "what did not fit is counted"


@given(st.lists(st.integers(0, 5), max_size=40) | st.integers(0, 99).map(_many), st.integers(0, 9000))
def test_of_equal_ones_the_first_are_kept(scores: list[int], count: int) -> None:
    indices = np.arange(0, 2 * len(scores), 2, dtype=np.int32)
    found = _largest(indices, np.array(scores, np.float32), count)
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:count]
    assert found.tolist() == [2 * place for place in sorted(order)]


@pytest.mark.parametrize(
    ("ranks", "elements", "density", "steps"),
    [(4, 60_000, 0.01, 80), (3, 40_013, 0.05, 30), (2, 5000, 0.02, 30), (32, 100_000, 0.01, 20)],
)
def test_every_step_is_the_oracles(ranks: int, elements: int, density: float, steps: int) -> None:
    """With the defaults: balance, bf16, messages of an agreed size. A burst at step 12 is more than they hold."""
    exchange, oracle = exchange_of(thinwire.MiCRO(density), elements, ranks), Oracle(elements, ranks, density)
    gradients, cuts = Gradients(elements, ranks, 7), 0
    for step in range(steps):
        rows = gradients.draw(8.0 if step == 12 else 1.0)
        given_ = [{"weight": torch.from_numpy(row.copy())} for row in rows]
        state = state_of(exchange)
        assert state.borders.tolist() == oracle.borders, f"step {step}"
        exchange.reduce_(given_)
        mean = oracle.exchange(rows)
        if step:
            places = np.concatenate([oracle.sent[part] for part in range(ranks)])
            assert np.array_equal(state.support[: state.count], places), f"step {step}"
            wanted = sum(len(found) for found in oracle.selected.values())
            assert state.wanted == wanted
            cuts += wanted > state.count
        assert state.thresholds[0] == pytest.approx(oracle.threshold, rel=1e-12)
        for left, expected in zip(residuals(exchange), oracle.residuals, strict=True):
            assert left["weight"].numpy().tobytes() == expected.tobytes(), f"step {step}"
        error = np.abs(given_[0]["weight"].numpy() - mean).max()
        assert error <= ranks * 2.0**-8 * np.abs(mean).max()
    assert cuts >= 1


def test_thirty_two_ranks() -> None:
    """Replicas are equal, nothing is lost, what is kept is the largest, and traffic does not grow with the ranks."""
    sizes, densities = {}, {}
    for ranks in (4, 32):
        exchange, gradients = exchange_of(thinwire.MiCRO(0.01), 100_000, ranks), Gradients(100_000, ranks, 3)
        every = [[{"weight": torch.from_numpy(row)} for row in gradients.draw()] for _ in range(120)]
        sent = 0
        for number, step in enumerate(steps_of(exchange, every)):
            check_replicas(step)
            check_conservation(thinwire.MiCRO(0.01), step, may_cancel=False)
            state = state_of(exchange)
            assert all(np.array_equal(state_of(exchange, rank).borders, state.borders) for rank in range(1, ranks))
            sent += state.count if number >= 80 else 0
        check_largest(exchange, gradients.draw())
        assert exchange.executor is not None
        run = exchange.executor.rank_states[0].groups[0].way
        sizes[ranks], densities[ranks] = run.gathered, sent / 40 / 1000
    assert 0.85 <= densities[32] <= 1.1
    assert 0.85 <= densities[4] <= 1.1
    assert sizes[32] == 128, "the smallest message has room for the share of a rank"
