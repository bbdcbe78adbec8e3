"""A gradient that is not finite, somewhere: the step is void everywhere, and nothing is lost or poisoned."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import thinwire
from tests.models import batch, digest, wrapped
from tests.ranks import run
from tests.support.profiles import tries
from thinwire.codecs import CODECS, Codec, CodecState, Estimate, GroupInfo, Sum, parse, register
from thinwire.codecs.base import Steps
from thinwire.engine.executor import Executor
from thinwire.engine.layout import TensorInfo, build
from thinwire.engine.rank_state import Safety
from thinwire.kernels.cpu.basic import TILE

NAN, INF = float("nan"), float("inf")
EPSILON = float(torch.finfo(torch.float32).eps)


@dataclass
class StridedState(CodecState):
    taken: Tensor = field(default_factory=lambda: torch.zeros(0))
    place: int = 0
    last_place: int = -1
    visits: Tensor = field(default_factory=lambda: torch.zeros(0))

    saved: ClassVar[tuple[str, ...]] = ("last_place", "visits")
    elementwise: ClassVar[tuple[str, ...]] = ("visits",)


@dataclass(frozen=True)
class Strided(Codec):
    """Every fourth element, summed, with a tail for small tensors; remembers where it was, and how often."""

    rides: ClassVar[bool] = True

    def start(self, group: GroupInfo, rank: int, world: int) -> StridedState:
        return StridedState(group, rank, world, visits=torch.zeros(group.elements))

    def exchange(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Steps:
        from thinwire.kernels.cpu import basic

        assert isinstance(state, StridedState)
        finite = basic.accumulate(residual.numpy(), gradient.numpy())
        state.place = (state.last_place + 1) % 4
        state.taken = residual[state.place :: 4].clone()
        residual[state.place :: 4] = 0
        buffer = torch.cat([state.taken, torch.zeros(state.group.tail)])
        yield Sum(buffer, tail=True, finite=finite)
        gradient.zero_()
        gradient[state.place :: 4] = buffer[: -state.group.tail] / state.world

    def undo(self, residual: Tensor, state: CodecState) -> None:
        assert isinstance(state, StridedState)
        residual[state.place :: 4] += state.taken

    def commit(self, states: Sequence[CodecState]) -> None:
        for state in states:
            assert isinstance(state, StridedState)
            state.last_place = state.place
            for parameter in state.group.parameters:
                places = torch.arange(parameter.offset, parameter.offset + parameter.elements)
                state.visits[places[places % 4 == state.place]] += 1

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        return Estimate(summed=group.elements + 4 * group.tail)


register("strided", Strided)

OWN = [name for name, kind in CODECS.items() if kind.__module__.startswith("thinwire.")]
VARIANTS = [
    *OWN,
    "topk(values='fp16')",
    "topk(values='bf16')",
    "cast(dtype='fp16')",
    "micro(values='fp16')",
    "strided",
]


# -- real processes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    """One value of a parameter's gradient, on some ranks, is replaced."""

    parameter: str
    value: float
    ranks: tuple[int, ...]


def schedule(codec: str, world: int) -> dict[int, Bad]:
    """Which steps are spoilt, and how: two dense ones, two in a row, others at random distances."""
    dice = random.Random(codec)
    bad = [
        Bad("4.weight", NAN, (dice.randrange(world),)),  # gradients of the last layer are the first to travel
        Bad("2.weight", INF, (dice.randrange(world),)),
        Bad("0.weight", -INF, (dice.randrange(world),)),
        Bad("2.bias", NAN, (dice.randrange(world),)),
        Bad("0.bias", INF, tuple(range(1, world))),
        Bad("0.weight", NAN, tuple(range(world))),
    ]
    dice.shuffle(bad)
    steps = {0: Bad("2.weight", NAN, (1,)), 1: Bad("0.bias", INF, (0,))}
    at = 3
    for number, event in enumerate(bad):
        steps[at] = event
        at += 1 if number == 2 else dice.choice((2, 3))
    return steps


class Spoiler:
    """Puts bad values into local gradients before DDP sees them, and remembers the gradients."""

    def __init__(self, module: nn.Module, events: dict[int, Bad]) -> None:
        self.events, self.step = events, 0
        self.local: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            parameter.register_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def spoil(gradient: Tensor) -> Tensor:
            event = self.events.get(self.step)
            if event is not None and event.parameter == name and dist.get_rank() in event.ranks:
                gradient = gradient.clone()
                gradient.view(-1)[7] = event.value
            self.local[name] = gradient.clone()
            return gradient

        return spoil


def residuals(wire: thinwire.Wire) -> dict[str, Tensor]:
    """Copies, by parameter, of this rank's."""
    return {key.split(".", 2)[2]: value for key, value in wire.state_dict().items() if ".residual." in key}


def neighbours(wire: thinwire.Wire, name: str) -> set[str]:
    """The compressed tensors in the group of this one."""
    assert wire.executor is not None
    groups = [{slot.name for slot in group.slots if slot.role == "coded"} for group in wire.executor.layout.groups]
    return next(group for group in groups if name in group)


def same(left: Any, right: Any) -> bool:
    """Equal bit for bit, through dictionaries and lists."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def near(found: Tensor, expected: Tensor) -> Tensor:
    """Where two residuals differ by roundings at most."""
    finite = torch.where(expected.isfinite(), expected, 0)
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return (found - expected).abs() <= 2 * EPSILON * largest


def _guarded(codec: str) -> tuple[list[str], int]:
    ddp = wrapped()
    wire = thinwire.attach(ddp, codec, min_elements=100)
    events = schedule(codec, dist.get_world_size())
    spoiler = Spoiler(ddp.module, events)
    named = dict(ddp.module.named_parameters())
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD([p for name, p in named.items() if name.startswith("0.")], lr=0.05, momentum=0.9),
        torch.optim.Adam([p for name, p in named.items() if not name.startswith("0.")], lr=0.01),
    ]
    for optimizer in optimizers:
        wire.guard(optimizer)
    digests, skipped = [], 0
    for step in range(max(events) + 4):
        spoiler.step = step
        inputs, targets = batch(step, dist.get_rank())
        for optimizer in optimizers:
            optimizer.zero_grad()
        before = digest(ddp), residuals(wire), copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
        loss = nn.functional.cross_entropy(ddp(inputs), targets)
        assert torch.isfinite(loss)
        loss.backward()
        event = events.get(step)
        if event is not None:
            gradient = named[event.parameter].grad
            assert gradient is not None
            assert not gradient.isfinite().all(), "whoever looks at the gradients sees it, on every rank"
        for optimizer in optimizers:
            optimizer.step()
        after = digest(ddp), residuals(wire), [optimizer.state_dict() for optimizer in optimizers]
        assert all(value.isfinite().all() for value in after[1].values())
        assert wire.skipped_last_step == (event is not None), step
        if event is None:
            assert after[0] != before[0], "training goes on"
        else:
            skipped += 1
            assert after[0] == before[0]
            assert same(after[2], before[2]), "momentum and step counts do not move"
            for name, residual in after[1].items():
                expected = before[1][name] + (spoiler.local[name] if step >= 2 else 0)
                kept = near(residual, expected)
                if step >= 2 and dist.get_rank() in event.ranks and event.parameter in neighbours(wire, name):
                    assert (kept | (residual == before[1][name])).all()
                else:
                    assert kept.all(), f"the finite gradient of {name} waits in the residual"
        assert wire.stats()["skipped"] == skipped
        digests.append(after[0])
    return digests, skipped


@pytest.mark.parametrize("codec", VARIANTS)
def test_guard_skips_the_step_everywhere(codec: str) -> None:
    results = run(3, _guarded, codec)
    assert results[0] == results[1] == results[2]
    assert results[0][1] == 8


def _guarded_through_changes() -> list[str]:
    """Every way that a step can take, one after the other: dense, a codec, what it left over, dense again, a codec again."""
    ddp = wrapped()
    wire = thinwire.attach(ddp, "topk(density=0.05)", min_elements=100)
    bad = {step: Bad("2.weight", NAN, (step % dist.get_world_size(),)) for step in (1, 4, 7, 9, 12, 16)}
    spoiler = Spoiler(ddp.module, bad)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    wire.guard(optimizer)
    digests = []
    for step in range(18):
        if step in (6, 14):
            wire.change("dense" if step == 6 else "micro(density=0.05)")
        spoiler.step = step
        inputs, targets = batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), targets).backward()
        assert wire.skipped_last_step == (step in bad), step
        optimizer.step()
        assert all(p.isfinite().all() for p in ddp.parameters()), step
        digests.append(digest(ddp))
    return digests


def test_guard_holds_through_changes_of_the_codec() -> None:
    results = run(3, _guarded_through_changes)
    assert results[0] == results[1] == results[2]


def _unguarded() -> None:
    """Without scaler and guard the means are not finite, as with DDP alone, and the residuals are safe all the same."""
    ddp = wrapped()
    wire = thinwire.attach(ddp, "topk(density=0.05)", min_elements=100)
    spoiler = Spoiler(ddp.module, {1: Bad("2.weight", NAN, (0,)), 4: Bad("2.weight", NAN, (1,))})
    for step in range(6):
        spoiler.step = step
        inputs, targets = batch(step, dist.get_rank())
        ddp.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), targets).backward()
        bad = step in spoiler.events
        assert wire.skipped_last_step == bad
        gradients = [p.grad for p in ddp.parameters()]
        assert bad == (not all(g is not None and g.isfinite().all() for g in gradients))
        assert all(value.isfinite().all() for value in residuals(wire).values())
    assert wire.stats()["skipped"] == 2


def test_without_a_guard() -> None:
    run(3, _unguarded)


def _saturate(codec: str) -> list[float]:
    """One value of 1e6 on rank 1 leaves in pieces that fit the coding."""
    exchange = thinwire.Exchange({"weight": torch.zeros(2000)}, codec, min_elements=1)
    arrived = []
    for step in range(20):
        gradient = torch.zeros(2000)
        if step == 0 and dist.get_rank() == 1:
            gradient[1234] = 1e6
        exchange.reduce_({"weight": gradient})
        assert not exchange.skipped_last_step
        assert gradient[:1234].abs().sum() == gradient[1235:].abs().sum() == 0
        arrived.append(float(gradient[1234]))
        residual = residuals(exchange)["weight"]
        left = 1e6 - 2 * sum(arrived) if dist.get_rank() == 1 else 0.0
        assert float(residual[1234]) == left
    return arrived


def test_sixteen_bit_values_saturate_and_the_rest_waits() -> None:
    results = run(2, _saturate, "topk(density=0.001, values='fp16')")
    assert results[0] == results[1]
    assert results[0][:15] == [65504 / 2] * 15
    assert 2 * sum(results[0]) == 1e6


# -- all ranks in this process -----------------------------------------------------------------------------------------

WORLD = 3
SHAPES = [[("a", (90, 60)), ("bias", (30,))], [("b", (9500,))], [("c", (10, 8, 5, 5)), ("norm", (20,))]]


class Local:
    """Steps of a small model, ranks in lock-step."""

    def __init__(self, codec: str, *, protected: bool, dtype: str = "float32") -> None:
        kinds = {1: "vector", 2: "dense", 4: "conv"}
        buckets = [[TensorInfo(name, shape, dtype, kinds[len(shape)]) for name, shape in bucket] for bucket in SHAPES]
        self.layout = build(buckets, parse(codec), min_elements=64)
        world = thinwire.LocalWorld(WORLD)
        self.executor = Executor(world, self.layout, safety=Safety(protected=protected, tests_results=True))
        self.buckets = buckets
        self.dtype = getattr(torch, dtype)

    def gradients(self, generator: torch.Generator, size: float = 1.0) -> list[dict[str, Tensor]]:
        return [
            {
                tensor.name: (size * torch.randn(tensor.elements, generator=generator)).to(self.dtype)
                for bucket in self.buckets
                for tensor in bucket
            }
            for _ in range(WORLD)
        ]

    def step(self, gradients: Sequence[dict[str, Tensor]], scale: float = 1.0) -> list[dict[str, Tensor]]:
        """The means, by rank and tensor."""
        for rank_state in self.executor.rank_states:
            rank_state.scale = scale
        results: list[dict[str, Tensor]] = [{} for _ in range(WORLD)]
        errors: list[BaseException | None] = []
        for bucket in self.buckets:
            names = tuple(tensor.name for tensor in bucket)
            buffers = [torch.cat([mine[name] for name in names]) for mine in gradients]
            self.executor.submit(names, buffers, errors.append)
            for result, buffer in zip(results, buffers, strict=True):
                result |= dict(zip(names, buffer.split([tensor.elements for tensor in bucket]), strict=True))
        assert errors == [None] * len(self.buckets)
        for rank in range(1, WORLD):
            for name, mean in results[0].items():
                assert torch.equal(mean.view(torch.uint8), results[rank][name].view(torch.uint8)), "replicas are equal"
        return results

    def residuals(self) -> list[dict[str, Tensor]]:
        return [
            {name: residual.reshape(-1).clone() for name, residual in rank_state.residuals.named()}
            for rank_state in self.executor.rank_states
        ]

    def learnt(self) -> list[Any]:
        """What a step that counts may move: what codecs save, capacities."""
        return [
            (
                {name: copy.deepcopy(_tensor(getattr(group.way.state, name))) for name in group.way.state.saved},
                group.way.capacity.value if group.way.capacity else 0,
                list(group.way.capacity.recent) if group.way.capacity else [],
            )
            for rank_state in self.executor.rank_states
            for group in rank_state.groups
        ]

    @property
    def skipped_last_step(self) -> bool:
        (off,) = {rank_state.last_void for rank_state in self.executor.rank_states}
        return off

    def places(self) -> Iterator[tuple[str, str, int]]:
        """Compressed tensors: name, group, offset in it."""
        for group in self.layout.groups:
            for slot in group.slots:
                if slot.role == "coded" and group.codec != "dense":
                    yield slot.name, group.name, slot.offset


def _tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


spoils = st.lists(
    st.tuples(
        st.integers(0, WORLD - 1),
        st.sampled_from([name for bucket in SHAPES for name, _ in bucket]),
        st.floats(0, 1, exclude_max=True),
        st.sampled_from([NAN, INF, -INF]),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("protected", [False, True])
@pytest.mark.parametrize("codec", VARIANTS)
@settings(max_examples=tries(8), suppress_health_check=[HealthCheck.too_slow])
@given(spoil=spoils, seed=st.integers(0, 2**32), warm=st.integers(0, 4), again=st.booleans())
def test_a_void_step_leaves_nothing_behind(
    codec: str, protected: bool, spoil: list[tuple[int, str, float, float]], seed: int, warm: int, again: bool
) -> None:
    local = Local(codec, protected=protected)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(warm):
        local.step(local.gradients(generator))
        assert not local.skipped_last_step
    for _ in range(2 if again else 1):
        gradients = local.gradients(generator)
        bad: dict[tuple[int, str], list[int]] = {}
        homes = {name: (group, offset) for name, group, offset in local.places()}
        for rank, name, where, value in spoil:
            index = int(where * gradients[rank][name].numel())
            gradients[rank][name][index] = value
            if name in homes:
                bad.setdefault((rank, homes[name][0]), []).append(homes[name][1] + index)
        before, learnt = local.residuals(), local.learnt()
        results = local.step(gradients)
        after = local.residuals()
        assert local.skipped_last_step
        for _, name, _, _ in spoil:
            assert not results[0][name].isfinite().all()
        assert same(local.learnt(), learnt)
        if protected:
            assert same(after, before)
            continue
        for rank in range(WORLD):
            for name, residual in after[rank].items():
                assert residual.isfinite().all()
                group, offset = homes[name]
                places = offset + torch.arange(residual.numel())
                far = torch.ones(residual.numel(), dtype=torch.bool)
                for index in bad.get((rank, group), []):
                    far &= (places - index).abs() >= TILE
                kept = near(residual, before[rank][name] + gradients[rank][name])
                assert kept[far].all(), "finite tiles are added"
                assert (kept | (residual == before[rank][name]))[~far].all(), "others are added or left alone"
    local.step(local.gradients(generator))
    assert not local.skipped_last_step


@pytest.mark.parametrize("codec", VARIANTS)
@settings(max_examples=tries(6), suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    share=st.sampled_from([1e-4, 0.01, 1.0]),
    ranks=st.sets(st.integers(0, WORLD - 1), min_size=1),
    protected=st.booleans(),
    scale=st.sampled_from([1.0, 2.0**10]),
)
@example(seed=1, share=1.0, ranks={0, 1, 2}, protected=True, scale=2.0**10)
@example(seed=1, share=1.0, ranks={2}, protected=False, scale=2.0**10)
def test_huge_values_overflow_in_no_residual(
    codec: str, seed: int, share: float, ranks: set[int], protected: bool, scale: float
) -> None:
    """Finite gradients near the end of float32: a step counts if and only if all its means are finite."""
    local = Local(codec, protected=protected)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        gradients = local.gradients(generator)
        for rank in ranks:
            for name in ("a", "b", "c"):  # small ones travel dense, where their sum overflows at once
                gradient = gradients[rank][name]
                gradient[torch.rand(gradient.numel(), generator=generator) < share] = 3e38
        before = local.residuals()
        results = local.step(gradients, scale)
        finite = all(mean.isfinite().all() for mean in results[0].values())
        assert local.skipped_last_step == (not finite)
        after = local.residuals()
        assert all(residual.isfinite().all() for rank in after for residual in rank.values())
        if protected and not finite:
            assert same(after, before)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("codec", VARIANTS)
def test_a_mean_that_does_not_fit_the_dtype_of_its_bucket(codec: str, dtype: str) -> None:
    generator = torch.Generator().manual_seed(5)
    largest = torch.finfo(getattr(torch, dtype)).max
    for protected in (False, True):
        local = Local(codec, protected=protected, dtype=dtype)
        outcomes = []
        for step in range(12):
            gradients = local.gradients(generator)
            if step > 3:  # all ranks alike: where it is not sent at once, more gathers than the dtype holds
                for name, gradient in gradients[0].items():
                    gradient.abs_().mul_(0.5 * largest).clamp_(max=largest)
                    gradient[:] = 0 if name in ("bias", "norm") else gradient  # small ones travel dense
                gradients = [gradients[0]] * WORLD
            before, learnt = local.residuals(), local.learnt()
            results = local.step(gradients)
            finite = all(mean.isfinite().all() for mean in results[0].values())
            assert local.skipped_last_step == (not finite)
            outcomes.append(finite)
            if not finite:
                assert same(local.learnt(), learnt)
                assert all(residual.isfinite().all() for rank in local.residuals() for residual in rank.values())
                if protected:
                    assert same(local.residuals(), before)
        assert all(outcomes[:4])
        if dtype == "float16" and codec in ("dense", "cast", "topk", "randomblock", "strided"):
            assert not all(outcomes), "the values are large enough to see it"
        if dtype == "float16" and codec == "topk(values='fp16')":
            assert all(outcomes), "what is sent saturates, and fits"
