"""What is applied against what came in, on a sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire.engine.watchdog import IN_A_ROW, Verdict, Watchdog

SIZES = {"a": 5000, "b": 7, "c": 3001}
BUCKETS = [("c", "b"), ("a",)]
RANKS = 3


class Job:
    """Ranks that send a tenth of what waits, times `factor`, and forget nothing, unless told otherwise."""

    def __init__(self, factor: float = 1.0, kept: float = 1.0) -> None:
        self.factor, self.kept = factor, kept
        self.dogs = [Watchdog(SIZES) for _ in range(RANKS)]
        self.left = [{name: torch.zeros(size) for name, size in SIZES.items()} for _ in range(RANKS)]
        self.generator = torch.Generator().manual_seed(0)

    def steps(self, count: int, scale: float = 1.0) -> None:
        for _ in range(count):
            for names in BUCKETS:
                sent = []
                for dog, left in zip(self.dogs, self.left, strict=True):
                    gradient = {name: torch.randn(SIZES[name], generator=self.generator) + 0.2 for name in names}
                    dog.came(names, scale * torch.cat([gradient[name] for name in names]), scale)
                    mask = {name: torch.rand(SIZES[name], generator=self.generator) < 0.1 for name in names}
                    waiting = {name: left[name] + gradient[name] for name in names}
                    sent.append(torch.cat([waiting[name] * mask[name] for name in names]))
                    left.update({name: self.kept * waiting[name] * ~mask[name] for name in names})
                mean: Tensor = self.factor * torch.stack(sent).mean(0)
                for dog in self.dogs:
                    dog.went(names, scale * mean, scale)

    def judge(self) -> list[Verdict | None]:
        found = [dog.due(left) for dog, left in zip(self.dogs, self.left, strict=True)]
        applied = [dog.applied() if due is not None else None for dog, due in zip(self.dogs, found, strict=True)]
        for dog, left in zip(self.dogs, self.left, strict=True):
            dog.begin(left)
        parts = [due for due in found if due is not None]
        if not parts:
            return []
        mean = torch.stack(parts).mean(0)
        return [dog.judge(mean, went) for dog, went in zip(self.dogs, applied, strict=True) if went is not None]


def _verdicts(job: Job, windows: int, scale: float = 1.0) -> list[list[Verdict | None]]:
    found = []
    for _ in range(windows):
        job.steps(8, scale)
        found.append(job.judge())
    return found


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_right_exchange_is_left_alone(scale: float) -> None:
    first, *others = _verdicts(Job(), 12, scale)
    assert first == [], "what was left before the first window is not known"
    assert others == [[None] * RANKS] * 11


@pytest.mark.parametrize("factor", [3.0, 0.3, -1.0, 0.0])
def test_what_is_applied_is_not_what_came(factor: float) -> None:
    found = _verdicts(Job(factor), IN_A_ROW + 1)
    assert found[-2] == [None] * RANKS, "once may be a mistake"
    assert all(isinstance(verdict, Verdict) for verdict in found[-1])
    assert len({verdict.reason for verdict in found[-1] if verdict}) == 1, "the same on all ranks"
    assert "times the norm of what came in" in str(found[-1][0])


def test_residuals_that_explode() -> None:
    found = _verdicts(Job(kept=1.6), 6)
    assert any(isinstance(verdict, Verdict) for window in found for verdict in window)


def test_a_window_without_all_buckets_says_nothing() -> None:
    job = Job()
    job.steps(8)
    job.judge()
    job.dogs[0].came(BUCKETS[0], torch.ones(3008))
    assert job.dogs[0].due(job.left[0]) is None


def test_another_codec_begins_anew() -> None:
    job = Job(3.0)
    job.steps(8)
    job.judge()
    job.steps(8)
    job.judge()
    for dog in job.dogs:
        dog.forget()
    job.factor = 1.0
    assert _verdicts(job, 4)[1:] == [[None] * RANKS] * 3
