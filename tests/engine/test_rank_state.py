"""One rank's state of a step: residuals, void steps, what is folded in, numbers of schedules. Driven over `LocalWorld`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import thinwire
from thinwire.codecs import parse
from thinwire.engine.layout import build, describe
from thinwire.engine.rank_state import RankState, Safety

ELEMENTS, RANKS = 64, 2


class Ranks:
    """All ranks of a layout with one group, step by step."""

    def __init__(self, codec: str, *, dtype: str = "float32", safety: Safety = Safety(), size: int = RANKS) -> None:
        tensor = describe("t", torch.empty(ELEMENTS, dtype=getattr(torch, dtype)))
        layout = build([[tensor]], parse(codec), min_elements=0)
        self.world = thinwire.LocalWorld(size)
        self.states = [RankState(layout, rank, size, safety=safety) for rank in range(size)]
        self.tail = layout.groups[0].info().tail

    def step(self, gradients: list[Tensor]) -> list[Tensor]:
        """Exchange copies of these gradients; the means."""
        means = [gradient.clone() for gradient in gradients]
        riders = [torch.zeros(self.tail - 1) for _ in self.states]
        runs = [state.run(0, mean, own) for state, mean, own in zip(self.states, means, riders, strict=True)]
        for number in range(self.states[0].groups[0].way.rounds + 1):
            parts = [part for run in runs if (part := next(run, None)) is not None]
            if not parts:
                break
            self.world.issue(number, parts, lambda: None)
        for state in self.states:
            state.finish()
        return means

    @property
    def residuals(self) -> list[Tensor]:
        return [state.residuals.of(0)[0] for state in self.states]

    @property
    def unsent(self) -> Tensor:
        return torch.stack([state.unsent()["t"] for state in self.states]).sum(0)


def gradients(step: int, size: int = RANKS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(ELEMENTS, generator=generator) for _ in range(size)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_is_not_sent_is_in_the_residuals() -> None:
    ranks, total, sent = Ranks("topk(density=0.25)"), torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    for step in range(5):
        given = gradients(step)
        means = ranks.step(given)
        assert torch.equal(means[0], means[1])
        total += torch.stack(given).sum(0)
        sent += RANKS * means[0]
    assert ranks.unsent.abs().sum() > 0
    assert torch.allclose(sent + ranks.unsent, total, atol=1e-5)


@pytest.mark.parametrize("codec", ["topk(density=0.25)", "micro(density=0.25)", "randomblock(ratio=4)"])
def test_a_protected_void_step_leaves_residuals_as_they_were(codec: str) -> None:
    ranks = Ranks(codec, safety=Safety(protected=True))
    for step in range(3):
        ranks.step(gradients(step))
    before = [residual.clone() for residual in ranks.residuals]
    spoilt = gradients(3)
    spoilt[1][5] = math.inf
    means = ranks.step(spoilt)
    assert all(bool(mean.isnan().all()) for mean in means), "on all ranks"
    assert [(state.last_void, state.skipped, state.step) for state in ranks.states] == [(True, 1, 4)] * RANKS
    assert same(ranks.residuals, before)
    ranks.step(gradients(4))
    assert not any(state.last_void for state in ranks.states)


@pytest.mark.parametrize(("tests", "void"), [(False, False), (True, True)])
def test_a_codec_without_residuals_is_tested_only_if_something_depends_on_it(tests: bool, void: bool) -> None:
    ranks = Ranks("dense", safety=Safety(tests_results=tests))
    spoilt = gradients(0)
    spoilt[0][0] = math.nan
    ranks.step(spoilt)
    assert [state.last_void for state in ranks.states] == [void] * RANKS


def test_protection_is_added_between_steps() -> None:
    ranks = Ranks("topk(density=0.25)")
    ranks.step(gradients(0))
    for state in ranks.states:
        state.protect(Safety(protected=True))
    before = [residual.clone() for residual in ranks.residuals]
    spoilt = gradients(1)
    spoilt[0][0] = math.nan
    ranks.step(spoilt)
    assert same(ranks.residuals, before)


def test_a_mean_that_its_bucket_cannot_hold_is_cut_and_the_rest_kept() -> None:
    ranks = Ranks("topk(density=1.0)", dtype="float16", safety=Safety(saturates=True))
    large = [torch.full((ELEMENTS,), 70000.0) for _ in range(RANKS)]
    means = ranks.step(large)
    assert means[0].max() == torch.finfo(torch.float16).max
    assert torch.equal(RANKS * means[0] + ranks.unsent, torch.stack(large).sum(0))
    halting = Ranks("topk(density=1.0)", dtype="float16")
    halting.step(large)
    assert all(state.last_void for state in halting.states)


def test_gradients_of_a_scaler_are_accumulated_unscaled() -> None:
    plain, scaled = Ranks("topk(density=0.25)"), Ranks("topk(density=0.25)")
    for state in scaled.states:
        state.scale = 1024.0
    for step in range(3):
        given = gradients(step)
        mean, other = plain.step(given)[0], scaled.step([1024.0 * gradient for gradient in given])[0]
        assert torch.equal(other, 1024.0 * mean)
    assert same(plain.residuals, scaled.residuals)


def test_what_another_chain_left_goes_into_the_residual() -> None:
    ranks = Ranks("topk(density=0.25)")
    for rank, state in enumerate(ranks.states):
        state.fold({"t": torch.full((ELEMENTS,), rank + 1.0), "unknown": torch.ones(3)})
        assert not state.inherits
    assert torch.equal(ranks.unsent, torch.full((ELEMENTS,), 3.0))


def test_without_a_residual_it_waits_for_the_next_step_that_counts() -> None:
    ranks = Ranks("dense", safety=Safety(tests_results=True))
    for rank, state in enumerate(ranks.states):
        state.fold({"t": torch.full((ELEMENTS,), rank + 1.0)})
        assert state.inherits
    spoilt = gradients(0)
    spoilt[1][3] = math.nan
    ranks.step(spoilt)
    assert all(state.inherits for state in ranks.states), "a void step keeps it"
    assert torch.equal(ranks.unsent, torch.full((ELEMENTS,), 3.0))
    given = gradients(1)
    means = ranks.step(given)
    assert torch.allclose(means[0], torch.stack(given).mean(0) + 1.5)
    assert not any(state.inherits for state in ranks.states)


def test_numbers_follow_their_schedule_and_what_is_set() -> None:
    ranks = Ranks("topk(density=warmup(0.01, steps=4))")
    seen = []
    for step in range(5):
        seen.append(ranks.states[0].groups[0].way.now.density)
        ranks.step(gradients(step))
        assert ranks.states[0].groups[0].used.density == seen[-1], "what the last step used"
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == pytest.approx(0.01)
    ranks.states[0].adjust({"density": 0.5})
    ranks.states[0].begin(9)
    assert ranks.states[0].groups[0].way.now.density == 0.5
