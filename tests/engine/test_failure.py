"""What happens when something breaks, on real gloo processes: nobody hangs, nobody is aborted, everybody is told."""

from __future__ import annotations

import os
import re
import signal
import threading
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from tests.models import batch, digest, train, wrapped
from tests.ranks import outcomes, run
from thinwire.codecs import CodecState, Message, register
from thinwire.engine import scheduler
from thinwire.engine.scheduler import Timing


@dataclass(frozen=True)
class Faulty(thinwire.TopK):
    """A codec with a defect on one rank."""

    rank: int = 1
    step: int = 3

    def encode(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Message:
        if (state.rank, state.step) == (self.rank, self.step) and state.world == 3:
            raise ZeroDivisionError("on purpose")
        return super().encode(gradient, residual, state)


register("faulty", Faulty)


def _codec_fails() -> str:
    ddp = wrapped()
    wire = thinwire.attach(ddp, Faulty(0.05), min_elements=100)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(RuntimeError) as caught:
        train(ddp, optimizer, range(20))
    assert wire.error is not None
    for thread in threading.enumerate():
        if thread.name == "thinwire":
            thread.join(timeout=10)
            assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        train(ddp, optimizer, range(1))
    return str(caught.value)


def test_codec_that_raises_on_one_rank() -> None:
    texts = run(3, _codec_fails)
    assert "ZeroDivisionError: on purpose" in texts[1]
    assert "in encode" in texts[1], "the rank with the defect sees its own traceback"
    for rank in (0, 2):
        assert "group 0, step 3, all-gather of round 1" in texts[rank], texts[rank]
        assert not re.search(r"(?i)time(d )?out", texts[rank]), "they were told, and did not wait for a timeout"


def _lose_a_rank() -> str:
    ddp = wrapped()
    thinwire.attach(ddp, "topk(density=0.05)", min_elements=100)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def die(step: int) -> None:
        if step == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError) as caught:
        train(ddp, optimizer, range(20), spoil=die)
    raise SystemExit(str(caught.value))


def test_a_rank_that_is_killed() -> None:
    ended = outcomes(3, _lose_a_rank)
    assert ended[1] == ("exit", -signal.SIGKILL)
    for rank in (0, 2):
        kind, text = ended[rank]
        assert kind == "error"
        assert "step 3" in text, text  # two dense steps came first
        assert "all-gather" in text


def _two_models() -> tuple[str, str]:
    """One backward through two wires, whose buckets become ready in another order on each rank.

    Each module has a process group of its own, and the order differs only after DDP has rebuilt its buckets: DDP itself
    waits for the other ranks there.
    """
    groups = [dist.new_group(), dist.new_group()]
    modules = [
        wrapped(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 10)), process_group=groups[0]),
        wrapped(process_group=groups[1]),
    ]
    wires = [thinwire.attach(ddp, "topk(density=0.05)", min_elements=100) for ddp in modules]
    optimizer = torch.optim.SGD([p for ddp in modules for p in ddp.parameters()], lr=0.1)
    for step in range(30):
        inputs, targets = batch(step, dist.get_rank())
        optimizer.zero_grad()
        order = modules if step < 3 or (step + dist.get_rank()) % 2 else modules[::-1]
        sum(nn.functional.cross_entropy(ddp(inputs), targets) for ddp in order).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert all(wire.stats()["steps"] == 28 for wire in wires)
    return digest(modules[0]), digest(modules[1])


def test_two_models_that_become_ready_in_different_order() -> None:
    results = run(3, _two_models)
    assert len(set(results)) == 1


def _straggler() -> list[float]:
    """Exchanges on a clock that stands still, and then what it would have shown if rank 1 had come a second late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "perf_counter", lambda: 0.0)
        ddp = wrapped()
        wire = thinwire.attach(ddp, "topk(density=0.05)", min_elements=100)
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(10))
        assert wire.executor is not None
        waited = 0.25 if dist.get_rank() == 1 else 1.25
        timing = Timing(0, 0.0, [("encode", 0.0, 1.0), ("all-gather of round 1", 1.0, 1.0 + waited)])
        wire.executor.statistics.add(wire.executor.rank_states[0], [timing])
        found = wire.stats_of_all_ranks()
        assert [stats["rank"] for stats in found] == [0, 1, 2]
        assert all(stats["steps"] == found[0]["steps"] for stats in found)
        return [stats["wire_seconds"] * stats["steps"] for stats in found]


def test_a_straggler_shows_in_the_waits() -> None:
    assert run(3, _straggler) == [pytest.approx([1.25, 0.25, 1.25])] * 3
