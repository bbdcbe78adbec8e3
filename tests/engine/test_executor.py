"""The executor of one layout: buckets in, means out, and what happens after an error. Over `LocalWorld`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from thinwire.codecs import parse
from thinwire.engine.executor import ExchangeThread, Executor
from thinwire.engine.layout import build, describe
from thinwire.engine.lifecycle import Lifecycle, Phase
from thinwire.engine.rank_state import Safety
from thinwire.engine.recorder import Progress, Recorder
from thinwire.errors import ExchangeError, WireClosed

PATIENCE = 60.0
RANKS, SHAPES = 2, {"a": (40,), "b": (8, 5)}


def make(codec: str = "dense", **options: Any) -> Executor:
    layout = build(
        [[describe(name, torch.empty(shape))] for name, shape in SHAPES.items()], parse(codec), min_elements=0
    )
    return Executor(thinwire.LocalWorld(RANKS), layout, **options)


def buffers(value: float) -> list[Tensor]:
    return [torch.full((40,), value + rank) for rank in range(RANKS)]


class Ended(list[BaseException | None]):
    """What `done` was called with."""

    _waiting: tuple[int, threading.Event] | None = None

    def __call__(self, error: BaseException | None) -> None:
        self.append(error)
        if self._waiting is not None and len(self) >= self._waiting[0]:
            self._waiting[1].set()

    def all_of(self, count: int) -> threading.Event:
        """Is set once there were so many calls."""
        event = threading.Event()
        self._waiting = count, event
        if len(self) >= count:
            event.set()
        return event


def test_a_bucket_is_done_once_when_its_group_is() -> None:
    executor, first, second = make(), Ended(), Ended()
    later, sooner = buffers(5.0), buffers(1.0)
    executor.submit(("b",), later, second)
    assert executor.busy
    assert not second, "group 0 comes first on every rank"
    executor.submit(("a",), sooner, first)
    assert (first, second) == ([None], [None])
    assert not executor.busy
    for given, mean in ((sooner, 1.5), (later, 5.5)):
        assert all(torch.equal(buffer, torch.full((40,), mean)) for buffer in given)
    assert executor.step_number == 1


def test_in_a_thread_it_does_the_same() -> None:
    executor, thread, ended = make("topk(density=0.5)"), ExchangeThread(), Ended()
    alone, expected = make("topk(density=0.5)"), Ended()
    executor.run_in(thread)
    for step in range(3):
        mine, theirs = [buffers(step), buffers(-step)], [buffers(step), buffers(-step)]
        for name, own, other in zip(SHAPES, mine, theirs, strict=True):
            executor.submit((name,), own, ended)
            alone.submit((name,), other, expected)
        assert ended.all_of(2 * (step + 1)).wait(PATIENCE)
        assert all(
            torch.equal(a, b) for own, other in zip(mine, theirs, strict=True) for a, b in zip(own, other, strict=True)
        )
    executor.stop()
    thread.close()
    assert not thread.thread.is_alive()
    assert ended == expected == [None] * 6


def test_an_error_closes_it_and_reaches_all_who_wait() -> None:
    lifecycle, first = Lifecycle(), Ended()
    executor = make(lifecycle=lifecycle)
    executor.submit(("b",), buffers(1.0), first)
    with pytest.raises(ExchangeError, match="a bucket has 7 elements where its tensors have 40"):
        executor.submit(("a",), [torch.zeros(7) for _ in range(RANKS)], Ended())
    assert first == [executor.error]
    assert lifecycle.phase is Phase.CLOSED
    assert lifecycle.error is executor.error
    with pytest.raises(WireClosed, match="a bucket has 7 elements"):
        executor.submit(("b",), buffers(1.0), Ended())


def test_one_that_is_stopped_leaves_the_wire_open() -> None:
    lifecycle = Lifecycle()
    executor = make(lifecycle=lifecycle)
    executor.stop()
    assert lifecycle.error is None
    with pytest.raises(WireClosed, match="it was stopped"):
        executor.submit(("a",), buffers(1.0), Ended())


def test_only_who_waits_is_interrupted() -> None:
    executor, ended = make(), Ended()
    executor.interrupt()
    assert executor.error is None
    executor.submit(("a",), buffers(1.0), Ended())
    executor.submit(("b",), buffers(1.0), Ended())
    executor.submit(("b",), buffers(1.0), ended)
    executor.interrupt()
    (error,) = ended
    assert "interrupted while waiting: step 1, before any collective" in str(error)


def test_the_recorder_hears_of_each_step_when_it_is_over() -> None:
    lines: list[Any] = []
    recorder, progress = Recorder(0, RANKS, None), Progress(dense_steps=10)
    recorder.active = True
    recorder.add(lines.append, "topk")
    executor = make("topk(density=0.5)", recorder=recorder, progress=progress, safety=Safety(tests_results=True))
    for step in range(3):
        given = buffers(1.0)
        if step == 1:
            given[0][0] = float("nan")
        executor.submit(("a",), given, Ended())
        executor.submit(("b",), buffers(2.0), Ended())
    steps = [line for line in lines if type(line).__name__ == "Step"]
    assert [(line.step, line.skipped) for line in steps] == [(11, False), (12, True), (13, False)]
    assert steps[0].seconds is None, "there is no step before it"
    assert all(line.bytes == sum(group.bytes for group in line.groups) > 0 for line in steps)
    statistics = executor.statistics.to_dict()
    assert (statistics["steps"], statistics["skipped"]) == (3, 1)
    assert statistics["bytes_per_step"] == sum(line.bytes for line in steps) / 3


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ((Phase.DENSE, Phase.COMPRESSED, Phase.DIRECT, Phase.COMPRESSED, Phase.CLOSED), True),
        ((Phase.DENSE, Phase.HOLDING, Phase.COMPRESSED), True),
        ((Phase.COMPRESSED, Phase.DENSE), False),
        ((Phase.DENSE, Phase.NATIVE), False),
        ((Phase.CLOSED, Phase.DENSE), False),
    ],
)
def test_phases_of_a_wire_follow_each_other(path: tuple[Phase, ...], allowed: bool) -> None:
    lifecycle = Lifecycle()
    for phase in path[:-1]:
        lifecycle.enter(phase)
    if allowed:
        lifecycle.enter(path[-1])
        assert lifecycle.phase is path[-1]
    else:
        with pytest.raises(ExchangeError, match="cannot become"):
            lifecycle.enter(path[-1])
