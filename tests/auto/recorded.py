"""Jobs with `auto` whose measurements are data: what it decides then depends on no clock and no load of this machine.

`recorded.json` comes from a job of two ranks over a shaped link, on a machine that was busy with other work: its profile, what
its steps took relative to what they take in the median, and the same of messages between them. Its tensors have a sixteenth
of their elements, each of which takes sixteen times the seconds of links and codecs, so that a step here is short.
"""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.ddp.reference import Ledger
from tests.models import digest
from thinwire.auto.meter import Meter
from thinwire.auto.monitor import PERIOD
from thinwire.auto.profiling import WATCHED
from thinwire.ddp.wire import DDPWire
from thinwire.engine.lifecycle import Phase
from thinwire.planner.drift import scaled
from thinwire.planner.plan import PlanGroup
from thinwire.planner.predict import predict
from thinwire.planner.profile import Link, Profile
from thinwire.planner.search import as_ddp
from thinwire.profiler.slices import Work, finish
from thinwire.profiler.watch import Compute

DATA = json.loads((Path(__file__).parent / "recorded.json").read_text())
PROFILE = msgspec.convert(DATA["profile"], Profile)
NOISE: list[list[float]] = DATA["noise"]
MESSAGES: list[float] = DATA["messages"]


@dataclass(frozen=True)
class Machine:
    """What a job runs on.

    links    how many times the recorded seconds its links need for a byte, from each step on
    hook     how many times the seconds that are predicted its steps take with a hook
    native   the same of DDP alone
    crowd    threads for each core
    waiting  seconds of each step that the thread has no core, from each step on; steps take so much longer
    """

    links: Mapping[int, float]
    hook: float = 1.0
    native: float = 1.0
    crowd: float = 1.0
    waiting: Mapping[int, float] = field(default_factory=lambda: {0: 0.0})


class Recorded(Meter):
    """Steps take what is predicted for the machine as it is, times the noise that was recorded."""

    def __init__(self, wire: DDPWire, machine: Machine) -> None:
        self._wire, self._machine = wire, machine
        self._known: dict[Any, float] = {}
        self._messages = 0

    def _at(self, values: Mapping[int, float]) -> float:
        return [value for since, value in values.items() if since <= self._wire.steps][-1]

    def _now(self) -> Profile:
        return scaled(PROFILE, self._at(self._machine.links))

    def _noisy(self, seconds: float) -> float:
        noise = NOISE[dist.get_rank()]
        return seconds * noise[self._wire.steps % len(noise)] + self._at(self._machine.waiting)

    def _predicted(self, profile: Profile, groups: Sequence[PlanGroup]) -> float:
        key = (profile.links, tuple(groups))
        if key not in self._known:
            self._known[key] = predict(profile, groups).seconds
        return self._known[key]

    def step(self) -> float:
        now, plan = self._now(), self._wire.plan
        alone = self._wire.session.lifecycle.phase in (Phase.NATIVE, Phase.CONTROL)
        if plan is not None and not alone:
            return self._noisy(self._machine.hook * self._predicted(now, plan.groups))
        return self._noisy(self._native(now))

    def _native(self, now: Profile) -> float:
        tuner = self._wire.tuner
        assert tuner is not None
        groups = as_ddp(now, borders=tuner.job.profiling.borders(now))
        return self._machine.native * self._predicted(now, groups)

    def clock(self) -> float:
        return 0.0

    def stretched(self) -> float:
        return 0.0

    def load(self) -> tuple[float, float]:
        return PERIOD * self._at(self._machine.waiting), 0.0

    def compute(self) -> Compute:
        now = self._now()
        ready = {tensor.name: tensor.ready for tensor in now.tensors}
        noise = statistics.median(NOISE[dist.get_rank()][:WATCHED])
        wall = noise * self._native(now)
        return Compute(now.forward, now.backward, now.optimizer, wall, ready, self._machine.crowd)

    def measuring(self, candidates: Sequence[str], budget: float) -> Work[Profile]:
        yield
        return self._now()

    def slice(self, work: Work[Profile]) -> Profile | None:
        return finish(work)

    def link(self, budget: float) -> Link:
        return self._now().link("all_gather", "flat")

    def message(self, size: int) -> float:
        self._messages += 1
        return self.link(0.0).seconds(size) * MESSAGES[self._messages % len(MESSAGES)]


def directions() -> nn.Module:
    """The parameters of the recorded job, each with a gradient of its own on every rank, and next to no computation."""
    model, terms = nn.Module(), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for tensor in reversed(PROFILE.tensors):
        *path, name = tensor.name.split(".")
        place = model
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        parameter = nn.Parameter(torch.zeros(tensor.shape))
        place.register_parameter(name, parameter)
        terms.append((parameter, torch.randn(tensor.shape, generator=generator)))

    def forward(factor: Tensor) -> Tensor:
        return factor * torch.stack([(parameter * direction).sum() for parameter, direction in terms]).sum()

    model.forward = forward  # type: ignore[method-assign]
    return model


@dataclass(frozen=True)
class Ended:
    """What became of a job on one rank."""

    decisions: list[tuple[int, str]]
    words: str
    hooked: bool
    digest: str
    lost: float


def job(machine: Machine, steps: int, plan_file: str = "") -> Ended:
    """Train by `auto` on such a machine. A search for another plan ends within the step in which it began."""
    ddp = DistributedDataParallel(directions())
    wire = thinwire.attach(ddp, plan_file=plan_file)
    assert isinstance(wire, DDPWire)
    assert wire.tuner is not None
    wire.tuner.job.meter = Recorded(wire, machine)
    ledger = Ledger(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(torch.tensor(1.0 + 0.5 * (step % 3))).backward()
        ledger.close_step()
        optimizer.step()
        for thread in threading.enumerate():
            if thread.name == "thinwire-planner":
                thread.join()
    decisions = [(decision.step, decision.text) for decision in wire.decisions]
    return Ended(decisions, wire.explain(), wire.hooked, digest(ddp), ledger.balance(wire))
