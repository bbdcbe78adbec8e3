"""Numbers that change while training: by a schedule, or by `wire.set`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire
from tests.ranks import run
from thinwire.codecs import parse
from thinwire.errors import CodecTextError, StateError, ThinwireError

ELEMENTS = 20_000


def _exchange(codec: Any, ranks: int = 2) -> thinwire.Exchange:
    return thinwire.Exchange({"a": torch.empty(100, 200)}, codec, thinwire.LocalWorld(ranks))


def _step(exchange: thinwire.Exchange, generator: torch.Generator, ranks: int = 2) -> float:
    """One exchange of random gradients; the share of elements that rank 0 sent."""
    exchange.reduce_([{"a": torch.randn(100, 200, generator=generator)} for _ in range(ranks)])
    assert exchange.executor is not None
    return exchange.executor.rank_states[0].groups[0].way.entries / ELEMENTS


def test_warmup_goes_down_by_the_same_factor() -> None:
    warmup = thinwire.Warmup(0.01, steps=4, start=0.16)
    assert [warmup.at(step) for step in range(6)] == pytest.approx([0.16, 0.08, 0.04, 0.02, 0.01, 0.01])
    assert thinwire.Warmup(0.01, steps=1).at(0) == 0.25


def test_text_and_back() -> None:
    codec = thinwire.TopK(density=thinwire.Warmup(0.01, steps=500))
    assert str(codec) == "topk(density=Warmup(to=0.01, steps=500, start=0.25))"
    assert parse(str(codec)) == codec
    assert parse("micro(density=warmup(0.02, 10))") == thinwire.MiCRO(density=thinwire.Warmup(0.02, 10))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("topk(density=Warmup(5, 10))", "at most 1"),
        ("topk(density=Warmup(0.1, 0))", "from 1 on"),
        ("topk(density=Warmup(0.1))", "steps"),
        ("topk(density=Warmup(0.1, 10, end=3))", "end"),
        ("topk(density=Warmup(0.1, __import__('os')))", "malformed|literal"),
        ("topk(density=Cooldown(0.1, 10))", "or Warmup"),
        ("randomk(density=Warmup(0.1, 10))", "must be a number"),
    ],
)
def test_wrong_schedules(text: str, complaint: str) -> None:
    with pytest.raises(CodecTextError, match=complaint):
        parse(text)


@pytest.mark.parametrize("codec", ["topk", "laplace", "dgc(sample=1.0)"])
def test_density_follows_the_schedule(codec: str) -> None:
    exchange = _exchange(parse(codec).__class__(density=thinwire.Warmup(0.01, steps=8, start=0.2)))
    generator = torch.Generator().manual_seed(0)
    warmup = thinwire.Warmup(0.01, steps=8, start=0.2)
    seen = [_step(exchange, generator) for _ in range(12)]
    assert seen == pytest.approx([warmup.at(step) for step in range(12)], rel=0.35)


def test_micro_follows_the_schedule() -> None:
    exchange = _exchange(thinwire.MiCRO(density=thinwire.Warmup(0.01, steps=60, start=0.1)))
    generator = torch.Generator().manual_seed(0)
    seen = [_step(exchange, generator) for _ in range(160)]
    assert sum(seen[2:8]) / 6 == pytest.approx(0.085, rel=0.5)
    assert sum(seen[120:]) / 40 == pytest.approx(0.01, rel=0.25)


def test_set_changes_the_next_step_and_is_saved() -> None:
    exchange, generator = _exchange("topk(density=0.1)"), torch.Generator().manual_seed(1)
    assert _step(exchange, generator) == pytest.approx(0.1, rel=0.01)
    exchange.set(density=0.02)
    assert exchange.stats()["codec"] == "topk(density=0.02)"
    assert _step(exchange, generator) == pytest.approx(0.02, rel=0.01)
    other = _exchange("topk(density=0.1)")
    other.load_state_dict(exchange.state_dict())
    copy = torch.Generator()
    copy.set_state(generator.get_state())
    assert _step(exchange, generator) == _step(other, copy) == pytest.approx(0.02, rel=0.01)
    assert exchange.executor is not None
    assert other.executor is not None
    mine, theirs = exchange.executor.rank_states[1].residuals, other.executor.rank_states[1].residuals
    assert torch.equal(mine.flat[0], theirs.flat[0])


def test_micro_moves_fast_after_set() -> None:
    exchange, generator = _exchange("micro(density=0.1)"), torch.Generator().manual_seed(2)
    for _ in range(80):
        _step(exchange, generator)
    exchange.set(density=0.01)
    seen = [_step(exchange, generator) for _ in range(120)]
    assert sum(seen[80:]) / 40 == pytest.approx(0.01, rel=0.3)


def test_what_cannot_be_set() -> None:
    exchange = _exchange("topk")
    for settings, complaint in [
        ({"values": 1}, "cannot change 'values' while training; it can: density"),
        ({"density": 5}, "at most 1"),
        ({"density": "much"}, "at most 1"),
    ]:
        with pytest.raises(ThinwireError, match=complaint):
            exchange.set(**settings)
    assert exchange.session.settings == {}
    state = exchange.state_dict()
    state["rank0.thinwire"] = state["rank0.thinwire"].replace('"settings":{}', '"settings":{"density":7.0}')
    with pytest.raises(StateError, match="settings that topk refuses"):
        exchange.load_state_dict(state)


def _ranks_set(same: bool) -> tuple[str, float]:
    rank = dist.get_rank()
    exchange = thinwire.Exchange({"a": torch.empty(100, 200)}, "topk(density=0.1)")
    tensors = {"a": torch.randn(100, 200)}
    exchange.reduce_(tensors)
    said = ""
    try:
        exchange.set(density=0.01 if same or rank else 0.02)
    except ThinwireError as error:
        said = str(error)
    exchange.reduce_(tensors)
    assert exchange.executor is not None
    share = exchange.executor.rank_states[0].groups[0].way.entries / ELEMENTS
    exchange.close()
    return said, share


@pytest.mark.parametrize("same", [True, False])
def test_ranks_agree_on_settings(same: bool) -> None:
    for said, share in run(2, _ranks_set, same):
        assert ("the ranks disagree" in said) is not same
        assert share == pytest.approx(0.01 if same else 0.1, rel=0.01)
