"""`attach(ddp)`: what it decides, what it keeps, and what it gives up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.ddp.reference import Ledger
from tests.models import digest, mlp, train, wrapped
from tests.plans import plan_of
from tests.ranks import RankError, run
from thinwire.auto.job import CHECKED
from thinwire.auto.meter import Meter
from thinwire.auto.monitor import PERIOD
from thinwire.auto.profiling import WATCHED
from thinwire.auto.trial import CONTROLS, SETTLE, WINDOW
from thinwire.codecs import CodecState, TopK, register
from thinwire.comm.world import TorchWorld
from thinwire.ddp.wire import DDPWire
from thinwire.engine.lifecycle import Phase
from thinwire.profiler.watch import Compute

TRIED = WATCHED + SETTLE + WINDOW + len(CONTROLS)
"""Steps until a saved plan has been tried."""

SHAPES = {name: tuple(parameter.shape) for name, parameter in mlp().named_parameters()}


class Tripled(TopK):
    """Applies three times what it takes out of the residual."""

    def decode(self, messages_: Sequence[Tensor], out: Tensor, scale: float, state: CodecState) -> None:
        super().decode(messages_, out, 3 * scale, state)


class Overdrawn(TopK):
    """Leaves minus three times what it was given: a residual that grows for ever."""

    def encode(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Any:
        message = super().encode(gradient, residual, state)
        residual.mul_(-3.0)
        return message


register("tripled", Tripled)
register("overdrawn", Overdrawn)


class Steady(Meter):
    """Every step takes a second, a dense one `native` seconds, every message a hundredth of one."""

    def __init__(self, wire: DDPWire, native: float) -> None:
        assert wire.tuner is not None
        assert isinstance(wire.world, TorchWorld)
        super().__init__(wire.tuner.job.profiling, wire.world)
        self._wire, self._native = wire, native

    def step(self) -> float:
        dense = self._wire.strategy.direct or self._wire.session.lifecycle.phase in (Phase.NATIVE, Phase.CONTROL)
        return self._native if dense else 1.0

    def compute(self) -> Compute:
        return Compute(0.1, 0.1, 0.1, self._native, {})

    def clock(self) -> float:
        return 0.0

    def stretched(self) -> float:
        return 0.0

    def message(self, size: int) -> float:
        return 0.01


def _attached(ddp: DistributedDataParallel, plan_file: str, native: float = 1.1, **options: Any) -> DDPWire:
    wire = thinwire.attach(ddp, plan_file=plan_file, **options)
    assert isinstance(wire, DDPWire)
    assert wire.tuner is not None
    if wire.tuner.job.watched:
        wire.tuner.job.meter = Steady(wire, native)
    return wire


def _plan(folder: Path, codec: str, ranks: int = 2, dense_seconds: float = 1.1, **changes: Any) -> str:
    """A saved plan, as an earlier run would have left it."""
    plan = plan_of(SHAPES, [(list(SHAPES), codec)], ranks, each=ranks)
    path = folder / "plan.json"
    msgspec.structs.replace(plan, quality="high", dense_seconds=dense_seconds, **changes).save(path)
    return str(path)


def _auto(plan_file: str, steps: int, native: float = 1.1, **options: Any) -> tuple[str, bool, str, float]:
    ddp = wrapped()
    wire = _attached(ddp, plan_file, native, **options)
    ledger = Ledger(ddp)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), range(steps), each=lambda step: ledger.close_step())
    return wire.explain(), wire.hooked, digest(ddp), ledger.balance(wire)


def test_one_rank_has_nobody_to_exchange_with() -> None:
    ((words, hooked, _, _),) = run(1, _auto, "", 3)
    assert not hooked
    assert "world size is 1" in words
    assert words.endswith("now: DDP alone, no hook")


def test_a_saved_plan_that_holds_what_it_promises_is_kept(tmp_path: Path) -> None:
    words, hooked, _, lost = run(2, _auto, _plan(tmp_path, "topk(density=0.1)"), TRIED + 2)[0]
    assert hooked
    assert ": kept" in words
    assert "now: plan: topk(density=0.1)" in words
    assert lost <= 1e-5


def test_a_plan_that_is_not_faster_is_given_up_and_nothing_is_lost(tmp_path: Path) -> None:
    results = run(2, _auto, _plan(tmp_path, "topk(density=0.1)", dense_seconds=0.9), TRIED + 4, 0.9)
    words, hooked, _, lost = results[0]
    assert results[0][2] == results[1][2]
    assert hooked
    assert "not faster; gradients travel dense" in words
    assert words.endswith("now: dense")
    assert lost <= 1e-5


def _beside_plain(plan_file: str, native: float, promised: float) -> tuple[str, str, float]:
    """A plan, and a plain one that promises to take so many seconds."""
    ddp, steps = wrapped(), 2 * TRIED + CHECKED + 4
    wire = _attached(ddp, plan_file, native)
    tuner, plain = wire.tuner, plan_of(SHAPES, [(list(SHAPES), "topk(density=0.2)")], 2, each=2)
    assert tuner is not None
    ledger = Ledger(ddp)

    def each(step: int) -> None:
        ledger.close_step()
        if step == WATCHED:  # the first plan is on trial
            tuner.in_use.trial.plain = msgspec.structs.replace(plain, predicted_seconds=promised)

    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), range(steps), each=each)
    return wire.explain(), digest(ddp), ledger.balance(wire)


@pytest.mark.parametrize(
    ("dense_seconds", "promised", "is_tried"),
    [
        (1.2, 1.04, True),
        (1.2, 1.06, False),  # faster than dense steps, but not than the first plan
        (0.9, 0.8, True),
        (0.9, 0.86, False),  # too little faster than dense steps
    ],
)
def test_a_plan_is_compared_with_a_plain_one_that_may_be_faster(
    dense_seconds: float, promised: float, is_tried: bool, tmp_path: Path
) -> None:
    saved = _plan(tmp_path, "topk(density=0.1)", dense_seconds=dense_seconds, predicted_seconds=0.8 * dense_seconds)
    (words, mine, lost), (_, other, _) = run(2, _beside_plain, saved, dense_seconds, promised)
    assert mine == other
    assert lost <= 1e-5
    tried = [line for line in words.splitlines() if "one codec for everything is predicted at" in line]
    if not is_tried:
        assert not tried
        assert words.endswith("now: dense" if dense_seconds < 1.0 else "now: plan: topk(density=0.1)")
        return
    assert "switching to plan: topk(density=0.2)" in tried[0]
    last = next(line for line in reversed(words.splitlines()) if line.startswith("step"))
    back = "gradients travel dense" if dense_seconds < 1.0 else "back to plan: topk(density=0.1)"
    assert f"not faster; {back}" in last


@pytest.mark.parametrize(
    ("codec", "reason"),
    [("tripled(density=0.1)", "times the norm of what came in"), ("overdrawn(density=0.1)", "given up")],
)
def test_a_wrong_codec_is_found_and_given_up(codec: str, reason: str, tmp_path: Path) -> None:
    results = run(2, _auto, _plan(tmp_path, codec), 70)
    words = results[0][0]
    assert results[0][2] == results[1][2]
    (line,) = [line for line in words.splitlines() if "given up" in line]
    assert reason in line
    assert int(line.split(":")[0].removeprefix("step ")) <= WATCHED + 4 * PERIOD + 3 + len(CONTROLS)
    assert words.endswith("now: dense")


def test_plans_of_other_jobs_are_not_used(tmp_path: Path) -> None:
    other = _plan(tmp_path, "topk(density=0.1)", ranks=3)
    assert "is not used: the job has 2 ranks, the plan is for 3" in run(2, _auto, other, 1)[0][0]
    Path(other).write_text("{")
    assert "is not used" in run(2, _auto, other, 1)[0][0]
    fast = _plan(tmp_path, "topk(density=0.1)")
    assert "made for quality 'high'" in run(2, _fast, fast)[0]


def _fast(plan_file: str) -> str:
    return _auto(plan_file, 1, quality="fast")[0]


def _guarded(plan_file: str) -> tuple[bool, str]:
    """A gradient that is not finite, while DDP is alone."""
    model = mlp()
    ddp = wrapped(model)
    wire = thinwire.attach(ddp, plan_file=plan_file)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    wire.guard(optimizer)
    before = digest(ddp)

    def spoil(step: int) -> None:
        if dist.get_rank() == 1:
            model[0].weight.register_hook(lambda gradient: gradient * float("nan"))

    train(ddp, optimizer, range(1), spoil=spoil)
    return digest(ddp) == before, digest(ddp)


def test_guard_works_without_a_hook() -> None:
    results = run(2, _guarded, "")
    assert results[0] == results[1]
    assert results[0][0], "the step is skipped"


def _resumed(plan_file: str, cut: int, steps: int) -> tuple[str, str, bool]:
    """A run that is saved in between, and one that goes on from there: without a plan file, all is in the state."""

    def job(file: str) -> tuple[Any, Any, Any]:
        ddp = wrapped(mlp())
        return ddp, _attached(ddp, file), torch.optim.SGD(ddp.parameters(), lr=0.05)

    ddp, wire, optimizer = job(plan_file)
    train(ddp, optimizer, range(cut))
    saved = {"model": ddp.module.state_dict(), "wire": wire.state_dict()}
    saved = {
        key: {name: torch.clone(v) if isinstance(v, Tensor) else v for name, v in s.items()}
        for key, s in saved.items()
    }
    train(ddp, optimizer, range(cut, steps))
    other, again, optimizer = job("")
    other.module.load_state_dict(saved["model"])
    again.load_state_dict(saved["wire"])
    train(other, optimizer, range(cut, steps))
    return digest(ddp), digest(other), again.hooked


@pytest.mark.parametrize(("cut", "steps"), [(4, 8), (min(CONTROLS), min(CONTROLS) + 2)])
def test_a_state_brings_its_plan_and_its_control_step_with_it(cut: int, steps: int, tmp_path: Path) -> None:
    file = _plan(tmp_path, "micro(density=0.1)")
    for whole, resumed, hooked in run(2, _resumed, file, WATCHED + cut, WATCHED + steps):
        assert hooked
        assert whole == resumed


def _refused(options: dict[str, Any]) -> None:
    thinwire.attach(wrapped(), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"quality": "best"}, "quality is one of lossless, high, fast"), ({"chain": "B"}, "auto chooses the chains")],
)
def test_what_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RankError, match=words):
        run(2, _refused, options)


def _by_hand() -> tuple[str, str, float]:
    """Whoever holds an auto wire may still choose: also before there is a hook."""
    ddp = wrapped()
    wire = thinwire.attach(ddp, plan_file="")
    assert wire.tuner is not None
    optimizer, ledger = torch.optim.SGD(ddp.parameters(), lr=0.05), Ledger(ddp)
    train(ddp, optimizer, range(3), each=lambda step: ledger.close_step())
    wire.change("topk(density=0.1)")
    train(ddp, optimizer, range(3, 20), each=lambda step: ledger.close_step())
    return wire.explain(), digest(ddp), ledger.balance(wire)


def test_a_change_by_hand_is_not_decided_away() -> None:
    first, second = run(2, _by_hand)
    assert first[1] == second[1]
    assert "changed by hand to topk(density=0.1)" in first[0]
    assert first[0].endswith("now: topk(density=0.1)")
    assert first[2] <= 1e-5
