"""Control steps: single dense steps of a job that compresses. They are exact, and leave no trace in what the layout knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from tests.ddp.reference import Ledger, distance, mean_gradients
from tests.engine.test_nonfinite import same
from tests.models import digest, mlp, train, wrapped
from tests.ranks import RankError, run
from thinwire.engine import journal

CODECS = ["micro(density=0.05)", "adacomp", "laplace(density=0.05)", "dgc", "lowrank", "randomblock(ratio=4)", "int8"]
AGREED, AHEAD, STEPS = (3, 7), 3, 14
"""After these steps it is agreed that a later one is a control step."""


def _job(codec: str, seed: int = 0, **options: Any) -> tuple[Any, torch.optim.Optimizer, thinwire.Wire]:
    ddp = wrapped(mlp(seed), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    return ddp, optimizer, thinwire.attach(ddp, codec, min_elements=100)


def _learnt(wire: thinwire.Wire) -> dict[str, Any]:
    """All that a state says of the layout: not how many steps the job has had, or will compare."""
    state = wire.state_dict()
    (key,) = [key for key in state if key.endswith(".thinwire")]
    meta = json.loads(state.pop(key))
    left = {name: value for name, value in meta.items() if name not in ("dense_steps", "control", "buckets")}
    return {**state, key: json.dumps(left)}


def _exact(codec: str) -> None:
    ddp, optimizer, wire = _job(codec)
    train(ddp, optimizer, range(6))
    before, steps = _learnt(wire), wire.steps
    world = dist.get_world_size()
    expected = mean_gradients(ddp.module, world, [6])
    wire.session.control(1)
    train(ddp, optimizer, range(6, 7))
    assert distance([p.grad for p in ddp.module.parameters()], expected) < 1e-6
    assert same(_learnt(wire), before)
    assert wire.steps == steps + 1, "the job counts it"
    expected = mean_gradients(ddp.module, world, [7])
    train(ddp, optimizer, range(7, 8))
    assert distance([p.grad for p in ddp.module.parameters()], expected) > 1e-4, "the next one is compressed again"


@pytest.mark.parametrize("codec", CODECS)
def test_a_control_step_is_exact_and_leaves_no_trace(codec: str) -> None:
    run(3, _exact, codec)


def _conserved(codec: str, options: dict[str, Any]) -> tuple[float, str]:
    ddp, optimizer, wire = _job(codec, **options)
    ledger = Ledger(ddp)

    def each(step: int) -> None:
        ledger.close_step()
        if step >= 4 and step % 3 == 0:
            wire.session.control(1 + step % 2)

    train(ddp, optimizer, range(40), each=each)
    return ledger.balance(wire), digest(ddp)


@pytest.mark.parametrize("codec", ["micro(density=0.05, values='fp32')", "dgc", "topk(density=0.05)"])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
def test_nothing_is_lost_across_control_steps(codec: str, options: dict[str, Any]) -> None:
    results = run(2, _conserved, codec, options)
    assert max(lost for lost, _ in results) <= 1e-5
    assert len({bits for _, bits in results}) == 1


def _resumed(codec: str, folder: str, saved: list[int]) -> list[str]:
    ddp, optimizer, wire = _job(codec)
    history, states = [], {}

    def train_on(ddp: Any, optimizer: Any, wire: thinwire.Wire, step: int) -> None:
        if step in AGREED:
            wire.session.control(AHEAD)
        train(ddp, optimizer, range(step, step + 1))

    for step in range(STEPS):
        if step in saved:
            parts = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "wire": wire.state_dict()}
            torch.save(parts, Path(folder) / f"{step}.{dist.get_rank()}.pt")
            states[step] = parts["wire"]
        train_on(ddp, optimizer, wire, step)
        history.append((digest(ddp), wire.state_dict()))
    for begin in saved:
        ddp, optimizer, wire = _job(codec, seed=1)
        parts = torch.load(Path(folder) / f"{begin}.{dist.get_rank()}.pt", weights_only=True)
        ddp.module.load_state_dict(parts["model"])
        optimizer.load_state_dict(parts["optimizer"])
        wire.load_state_dict(parts["wire"])
        for step in range(begin, STEPS):
            train_on(ddp, optimizer, wire, step)
            assert digest(ddp) == history[step][0], f"step {step}, resumed at {begin}"
            assert same(wire.state_dict(), history[step][1]), f"step {step}, resumed at {begin}"
    return [history[-1][0], *(str(_pending(states[step])) for step in saved)]


def _pending(state: dict[str, Any]) -> int | None:
    (text,) = [value for key, value in state.items() if key.endswith(".thinwire") and not isinstance(value, Tensor)]
    number: int | None = json.loads(text).get("control")
    return number


@pytest.mark.parametrize("codec", ["micro(density=0.05)", "adacomp", "randomblock(ratio=4)"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_resume_has_the_bits_of_going_on_across_control_steps(codec: str, ranks: int, tmp_path: Path) -> None:
    """Saved while one is agreed on, right before it, right after it, and after all of them."""
    first = AGREED[0] + AHEAD - 1
    saved = [first - 1, first, first + 1, AGREED[1] + AHEAD + 1]
    results = run(ranks, _resumed, codec, str(tmp_path), saved)
    assert len({bits for bits, *_ in results}) == 1
    number = str(first + 1)
    assert all(pending == [number, number, "None", "None"] for _, *pending in results)


def _written(folder: str) -> None:
    ddp, optimizer, wire = _job("micro(density=0.05)")
    wire.log_to(folder)
    train(ddp, optimizer, range(5))
    wire.session.control(2)
    train(ddp, optimizer, range(5, 9))
    wire.close()


def test_its_number_stands_in_the_journal(tmp_path: Path) -> None:
    run(2, _written, str(tmp_path))
    for file in journal.files(tmp_path):
        found = journal.read(file)
        assert [event.step for event in found.events if event.what == "control"] == [7]
        paths = {step.step: step.path for step in found.steps}
        assert [number for number in range(4, 10) if paths[number] != "layout"] == [7]


def _void() -> None:
    ddp, optimizer, wire = _job("micro(density=0.05)")
    wire.guard(optimizer)
    train(ddp, optimizer, range(6))
    before, bits = _learnt(wire), digest(ddp)
    wire.session.control(1)

    def spoil(step: int) -> None:
        if dist.get_rank() == 1:
            next(iter(ddp.parameters())).register_hook(lambda gradient: gradient * float("nan"))

    train(ddp, optimizer, range(6, 7), spoil=spoil)
    assert wire.skipped_last_step
    assert digest(ddp) == bits
    assert same(_learnt(wire), before)


def test_a_control_step_that_is_not_finite_is_skipped() -> None:
    run(2, _void)


def _refused() -> None:
    _, _, wire = _job("dense")
    wire.session.control(1)


def test_dense_steps_need_no_comparison() -> None:
    with pytest.raises(RankError, match="nothing to compare"):
        run(2, _refused)
