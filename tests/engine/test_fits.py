"""How magnitudes are distributed, as stats, the journal and `explain` tell it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import thinwire
from thinwire.codecs import laplace
from thinwire.engine import fits, journal

SHAPES = {"a": (40, 100), "b": (30, 200)}


def _exchange(codec: str = "laplace(density=0.01)") -> thinwire.Exchange:
    tensors = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    return thinwire.Exchange(tensors, codec, thinwire.LocalWorld(2), group_bytes=1)


def _train(exchange: thinwire.Exchange, steps: range) -> list[dict[str, Tensor]]:
    """Gaussian gradients for one group, heavy tails for the other; the means of all steps."""
    means = []
    for step in steps:
        given = []
        for rank in range(2):
            generator = torch.Generator().manual_seed(2 * step + rank)
            draw = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
            given.append({"a": draw["a"], "b": draw["b"] ** 3})
        exchange.reduce_(given)
        means.append({name: tensor.clone() for name, tensor in given[0].items()})
    return means


def test_each_look_is_in_the_journal_once(tmp_path: Path) -> None:
    exchange = _exchange()
    exchange.log_to(tmp_path / "run.jsonl", every=7)
    _train(exchange, range(12))
    found = journal.read(tmp_path / "run.jsonl").fits
    assert [(fit.step, fit.group) for fit in found] == [(step, f"group {at}") for step in (1, 10) for at in (0, 1)]
    gauss, heavy = found[:2]
    assert (gauss.models[0].name, heavy.models[0].name) == ("gauss", "pareto")
    for fit in found:
        assert len(fit.edges) == len(fit.shares) + 1
        assert {model.name for model in fit.models} == {"laplace", "gauss", "pareto"}
        assert all(len(model.shares) == len(fit.shares) for model in fit.models)
        closest = fit.models[0]
        off = sum(abs(mine - theirs) for mine, theirs in zip(fit.shares, closest.shares, strict=True))
        assert off < 0.6, "the curve of the closest model is near the histogram"
        assert closest.distance == min(model.distance for model in fit.models)


def test_who_asks_later_is_told_the_last_look(tmp_path: Path) -> None:
    exchange = _exchange()
    _train(exchange, range(11))
    exchange.log_to(tmp_path / "run.jsonl")
    assert [fit.step for fit in journal.read(tmp_path / "run.jsonl").fits] == [10, 10]
    groups = exchange.stats()["groups"]
    assert [group["fit"]["step"] for group in groups] == [10, 10]
    for group in groups:
        distances = {name: group["fit"][name] for name in ("laplace", "gauss", "pareto")}
        assert distances[group["fit"]["best"]] == min(distances.values())
    assert exchange.executor is not None
    first, second = fits.explained(exchange.executor.rank_states[0])
    assert first.startswith(f"group 0: magnitudes are closest to {groups[0]['fit']['best']} (")
    assert f"laplace {groups[1]['fit']['laplace']:.3f}" in second


def test_looks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    means = _train(_exchange(), range(12))
    monkeypatch.setattr(laplace, "LOOKED_AT", ())
    for mine, theirs in zip(_train(_exchange(), range(12)), means, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in SHAPES)


def test_a_resumed_job_looks_at_the_same_steps() -> None:
    """What was seen is not saved: a job that resumes looks again when its turn comes."""
    exchange, other = _exchange(), _exchange()
    _train(exchange, range(5))
    other.load_state_dict(exchange.state_dict())
    assert all("fit" not in group for group in other.stats()["groups"])
    for mine, theirs in zip(_train(other, range(5, 12)), _train(exchange, range(5, 12)), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in SHAPES)
    assert [group["fit"] for group in other.stats()["groups"]] == [
        group["fit"] for group in exchange.stats()["groups"]
    ]


def test_the_first_looks_come_close_together_and_later_ones_are_rare() -> None:
    looks = [step + 1 for step in range(3001) if laplace._is_looked_at(step)]
    assert looks == [1, 10, 100, 1000, 2000, 3000]


def test_other_codecs_say_nothing(tmp_path: Path) -> None:
    exchange = _exchange("topk(density=0.01)")
    exchange.log_to(tmp_path / "run.jsonl")
    _train(exchange, range(2))
    assert journal.read(tmp_path / "run.jsonl").fits == []
    assert all("fit" not in group for group in exchange.stats()["groups"])
    assert exchange.executor is not None
    assert fits.explained(exchange.executor.rank_states[0]) == []
