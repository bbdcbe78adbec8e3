"""The scheduler of one step, on ranks in memory whose collectives end when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import thinwire
from thinwire.codecs import parse
from thinwire.comm.collectives import Collective, Pending
from thinwire.engine.layout import Layout, build, describe
from thinwire.engine.rank_state import RankState, Safety
from thinwire.engine.scheduler import ReadyGroup, Scheduler, Timing
from thinwire.errors import ExchangeError

RANKS, ELEMENTS = 2, 40


class _Late:
    def __init__(self, pending: Pending) -> None:
        self._pending, self.arrived = pending, False

    def done(self) -> bool:
        return self.arrived and self._pending.done()

    def check(self) -> None:
        self._pending.check()


class SlowWorld(thinwire.LocalWorld):
    """Ranks in memory; each collective is carried out at once, and is done when the test lets it arrive."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.issued: list[tuple[int, str]] = []
        self.late: list[_Late] = []

    def issue(self, round_: int, parts: Sequence[Collective], wake: Callable[[], None]) -> Pending:
        late = _Late(super().issue(round_, parts, wake))
        self.issued.append((round_, parts[0].operation))
        self.late.append(late)
        return late


class Step:
    """A scheduler with everything that it needs, and what it reports."""

    def __init__(self, codec: str, groups: int, safety: Safety = Safety()) -> None:
        buckets = [[describe(f"t{i}", torch.empty(ELEMENTS))] for i in range(groups)]
        self.layout: Layout = build(buckets, parse(codec), min_elements=0)
        self.world = SlowWorld(RANKS)
        self.ranks = [RankState(self.layout, rank, RANKS, safety=safety) for rank in range(RANKS)]
        self.ended: list[int] = []
        self.steps: list[list[Timing]] = []
        self.scheduler = Scheduler(
            self.world,
            self.ranks,
            wake=lambda: None,
            on_group=self.ended.append,
            on_step=self.steps.append,
            tracks_unused=safety.tracks_unused,
        )

    def feed(self, index: int, value: float = 1.0) -> list[torch.Tensor]:
        gradients = [torch.full((ELEMENTS,), value + rank) for rank in range(RANKS)]
        riders = [torch.zeros(self.layout.groups[index].info().tail - 1) for _ in range(RANKS)]
        self.scheduler.feed(index, ReadyGroup(gradients, riders, [()] * RANKS))
        return gradients

    def advance(self) -> int:
        """Do all there is to do without waiting; how many pieces of work that were."""
        pieces = 0
        while self.scheduler.advance():
            pieces += 1
        return pieces


def test_collectives_are_issued_in_layout_order_whatever_comes_first() -> None:
    step = Step("dense", 3)
    fed = {index: step.feed(index, index + 1.0) for index in (2, 0)}
    assert step.advance() == 1, "group 1 is missing, so group 2 has to wait"
    fed[1] = step.feed(1, 2.0)
    assert step.advance() == 2
    assert step.world.issued == [(0, "average")] * 3
    for late in reversed(step.world.late):
        late.arrived = True
    step.advance()
    assert step.ended == [0, 1, 2]
    assert step.scheduler.idle
    for index, gradients in fed.items():
        for gradient in gradients:
            assert torch.equal(gradient, torch.full((ELEMENTS,), index + 1.5))


def test_nothing_is_done_while_a_collective_is_on_its_way() -> None:
    step = Step("dense", 1)
    step.feed(0)
    assert step.advance() == 1
    assert step.advance() == 0
    assert not step.ended
    step.world.late[0].arrived = True
    assert step.advance() == 1
    assert step.ended == [0]


def test_a_further_round_goes_before_the_next_group() -> None:
    step = Step("micro(density=0.2)", 2)
    assert max(run.way.rounds for run in step.ranks[0].groups) == 2
    step.feed(0)
    step.advance()
    step.feed(1)
    step.world.late[0].arrived = True
    assert step.scheduler.advance()
    assert [round_ for round_, _ in step.world.issued] == [0, 1]
    assert step.scheduler.advance()
    assert [round_ for round_, _ in step.world.issued] == [0, 1, 0]


def test_a_step_ends_once_with_the_timings_of_all_groups() -> None:
    step = Step("dense", 2)
    for number in range(3):
        for index in range(2):
            step.feed(index)
        step.advance()
        for late in step.world.late:
            late.arrived = True
        step.advance()
        assert len(step.steps) == number + 1
    assert [timing.group for timing in step.steps[-1]] == [0, 1, -1]
    assert [name for name, _, _ in step.steps[-1][0].phases] == ["encode", "all-reduce (average)", "decode"]
    assert all(start <= stop for timing in step.steps[-1] for _, start, stop in timing.phases)
    assert [rank.step for rank in step.ranks] == [3, 3]


def test_unused_parameters_are_asked_for_at_the_end_of_a_step() -> None:
    step = Step("topk(density=0.5)", 1, Safety(tracks_unused=True))
    step.feed(0)
    step.advance()
    step.world.late[0].arrived = True
    step.advance()
    assert [operation for _, operation in step.world.issued] == ["gather", "max"]
    assert not step.steps
    step.world.late[1].arrived = True
    step.advance()
    assert len(step.steps) == 1


def test_a_group_comes_once_in_a_step() -> None:
    step = Step("dense", 2)
    step.feed(0)
    with pytest.raises(ExchangeError, match="group 0 came twice in one step"):
        step.feed(0)
    step.advance()
    with pytest.raises(ExchangeError, match="group 0 came twice in one step"):
        step.feed(0)


def test_what_is_waited_for_has_a_name() -> None:
    step = Step("dense", 1)
    assert step.scheduler.under_way() == "step 0, before any collective"
    step.feed(0)
    step.advance()
    assert step.scheduler.under_way() == "group 0, step 0, all-reduce (average) of round 1, rank 0, 1"
