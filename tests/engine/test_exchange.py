"""`Exchange`: the engine without DDP, in memory and on real processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from tests.codecs.laws import Tensors, check_conservation, check_replicas, gradients, steps_of
from tests.ranks import run
from thinwire import messages
from thinwire.codecs import (
    CODECS,
    Codec,
    CodecState,
    Estimate,
    Gather,
    GatheredCodec,
    GroupInfo,
    Message,
    Sum,
    parse,
    register,
)
from thinwire.codecs.base import Steps
from thinwire.engine.executor import Executor
from thinwire.engine.layout import build, describe
from thinwire.errors import ExchangeError, WireClosed
from thinwire.messages import ValueCoding, read_header

ORDER: list[str] = []


@dataclass
class UnionState(CodecState):
    support: np.ndarray[Any, np.dtype[np.int32]] = field(default_factory=lambda: np.zeros(0, np.int32))
    taken: Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass(frozen=True)
class Union(Codec):
    """Two rounds: gather every rank's largest indices, then sum all values at their union; small tensors ride."""

    density: float = 0.05

    rounds: ClassVar[int] = 2
    rides: ClassVar[bool] = True

    def start(self, group: GroupInfo, rank: int, world: int) -> UnionState:
        return UnionState(group, rank, world)

    def exchange(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Steps:
        assert isinstance(state, UnionState)
        ORDER.append(f"{state.group.name} of rank {state.rank}")
        elements = residual.numel()
        finite = bool(torch.isfinite(gradient).all())
        if finite:
            residual += gradient
        count = max(1, round(self.density * elements)) if elements else 0
        mine = residual.abs().topk(count).indices.sort().values.to(torch.int32).numpy()
        room = state.outgoing.numpy()
        packed = messages.pack(mine, None, elements, room, ValueCoding.NONE, rotation=state.step, finite=finite)
        answers = yield Gather(Message(packed.size))
        chosen = []
        for answer in answers:
            indices = np.empty(read_header(answer.numpy()).entries, np.int32)
            messages.decode_indices(answer.numpy(), elements, indices)
            chosen.append(indices)
        state.support = np.unique(np.concatenate(chosen))
        places = torch.from_numpy(state.support).long()
        state.taken = residual[places]
        residual[places] = 0.0
        buffer = torch.cat([state.taken, torch.zeros(state.group.tail)])
        yield Sum(buffer, tail=True, finite=finite)
        gradient.zero_()
        gradient[places] = buffer[: places.numel()] / state.world

    def undo(self, residual: Tensor, state: CodecState) -> None:
        assert isinstance(state, UnionState)
        residual[torch.from_numpy(state.support).long()] += state.taken

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        count = max(1, round(self.density * group.elements))
        return Estimate(
            gathered=messages.expected(group.elements, count, ValueCoding.NONE),
            summed=4 * (count * world + group.tail),
        )


register("union", Union)

SHAPES = {"a": (30, 40), "b": (40,), "c": (50, 50), "d": (9,), "e": (0, 4), "f": (40, 30), "g": (2000,), "h": (17,)}
OPTIONS: dict[str, Any] = {"min_elements": 100, "group_bytes": 10_000}
STEPS = 20


def _given(step: int, world: int) -> list[Tensors]:
    return gradients(SHAPES, world, "heavy" if step % 4 == 1 else "normal", 100 + step)


def _digest(tensors: Mapping[str, Any]) -> str:
    whole = hashlib.sha256()
    for name in sorted(tensors):
        if isinstance(tensors[name], Tensor):
            whole.update(name.encode() + tensors[name].numpy().tobytes())
    return whole.hexdigest()


def _empty() -> Tensors:
    return {name: torch.empty(shape) for name, shape in SHAPES.items()}


# -- in memory and on gloo -----------------------------------------------------------------------------------------------

GATHERED = [
    name
    for name, kind in CODECS.items()
    if kind.__module__.startswith("thinwire.") and issubclass(kind, GatheredCodec)
] + ["topk(density=0.1, values='fp16')"]


def _on_gloo() -> dict[str, tuple[str, str]]:
    """Digests of all results, and of the residuals at the end, by codec."""
    rank, world = dist.get_rank(), dist.get_world_size()
    digests = {}
    for text in GATHERED:
        exchange = thinwire.Exchange(_empty(), text, **OPTIONS)
        results = []
        for step in range(STEPS):
            given = _given(step, world)[rank]
            exchange.reduce_(given)
            results.append(_digest({name: given[name] for name in SHAPES if exchange_codes(exchange, name)}))
        digests[text] = (" ".join(results), _digest(exchange.state_dict()))
        exchange.close()
    return digests


def exchange_codes(exchange: thinwire.Exchange, name: str) -> bool:
    """Whether a tensor is compressed: gloo adds the others in an order of its own."""
    assert exchange.executor is not None
    return any(name == coded for coded, _ in exchange.executor.rank_states[0].residuals.named())


def test_local_world_gives_the_same_bits_as_gloo() -> None:
    gloo = run(3, _on_gloo)
    for text in GATHERED:
        exchange = thinwire.Exchange(_empty(), text, thinwire.LocalWorld(3), **OPTIONS)
        results: list[list[str]] = [[], [], []]
        for step in range(STEPS):
            given = _given(step, 3)
            exchange.reduce_(given)
            for rank in range(3):
                coded = {name: given[rank][name] for name in SHAPES if exchange_codes(exchange, name)}
                results[rank].append(_digest(coded))
        state = exchange.state_dict()
        for rank in range(3):
            assert gloo[rank][text][0] == " ".join(results[rank]), f"{text}: results of rank {rank}"
            mine = {name: value for name, value in state.items() if name.startswith(f"rank{rank}.")}
            assert gloo[rank][text][1] == _digest(mine), f"{text}: state of rank {rank}"


# -- rounds and order ----------------------------------------------------------------------------------------------------


def _two_rounds() -> tuple[float, str]:
    """Two rounds, several groups, riders; every rank hands its tensors over in an order of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange = thinwire.Exchange(_empty(), "union(density=0.05)", **OPTIONS)
    assert exchange.executor is not None
    groups = exchange.executor.layout.groups
    assert len([group for group in groups if group.codec != "dense"]) >= 3
    assert any(slot.role == "ride" for group in groups for slot in group.slots)
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    results = []
    for step in range(STEPS):
        every = _given(step, world)
        means = {name: torch.stack([given[name].double() for given in every]).mean(0) for name in SHAPES}
        names = list(SHAPES)
        np.random.default_rng(100 * step + rank).shuffle(names)
        exchange._names = tuple(names)  # the order in which it hands them to the engine
        del ORDER[:]
        exchange.reduce_(every[rank])
        assert [f"{group.name} of rank {rank}" for group in groups if group.codec != "dense"] == ORDER
        for name, total in sums.items():
            total += means[name] - every[rank][name].double()
        results.append(_digest(every[rank]))
    for name, residual in exchange.executor.rank_states[0].residuals.named():
        left = residual.double()
        dist.all_reduce(left)
        sums[name] -= left / world
    return max(float(total.abs().max()) for total in sums.values() if total.numel()), " ".join(results)


def test_two_rounds_with_riders_on_gloo() -> None:
    results = run(3, _two_rounds)
    assert len({bits for _, bits in results}) == 1
    for lost, _ in results:
        assert lost <= 1e-3, "of sums up to several thousand"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_two_rounds_with_riders_in_memory(ranks: int) -> None:
    codec = Union(0.05)
    exchange = thinwire.Exchange(_empty(), codec, thinwire.LocalWorld(ranks), **OPTIONS)
    for step in steps_of(exchange, [_given(i, ranks) for i in range(6)]):
        check_replicas(step)
        check_conservation(codec, step, may_cancel=False)


def test_groups_are_encoded_in_layout_order_whatever_comes_first() -> None:
    tensors = [describe(name, tensor) for name, tensor in _empty().items()]
    layout = build([[tensor] for tensor in tensors], Union(0.1), min_elements=100)
    executor = Executor(thinwire.LocalWorld(2), layout)
    expected = [f"{group.name} of rank {rank}" for group in layout.groups if group.codec != "dense" for rank in (0, 1)]
    for order in (list(SHAPES), list(reversed(SHAPES)), sorted(SHAPES, key=lambda name: hash(SHAPES[name]))):
        del ORDER[:]
        given = gradients(SHAPES, 2, "normal", 5)
        ended: list[BaseException | None] = []
        for name in order:
            executor.submit((name,), [tensors[name].view(-1) for tensors in given], ended.append)
        assert ended == [None] * len(SHAPES)
        assert expected == ORDER


@dataclass(frozen=True)
class Hidden(Union):
    """Says that it has one round, and has two."""

    rounds: ClassVar[int] = 1


register("hidden", Hidden)


def test_more_rounds_than_declared_are_refused() -> None:
    exchange = thinwire.Exchange({"a": torch.empty(500)}, Hidden(), thinwire.LocalWorld(2), min_elements=0)
    with pytest.raises(ExchangeError, match=r"group 0, step 0.*declares fewer rounds than it uses"):
        exchange.reduce_(gradients({"a": (500,)}, 2, "normal", 0))
    with pytest.raises(WireClosed, match="closed"):
        exchange.reduce_(gradients({"a": (500,)}, 2, "normal", 0))


# -- memory --------------------------------------------------------------------------------------------------------------


def _addresses(exchange: thinwire.Exchange, codec_state: bool) -> dict[str, int]:
    assert exchange.executor is not None
    places: dict[str, int] = {}
    for rank_state, packer in zip(exchange.executor.rank_states, exchange.executor._packers, strict=True):
        for run_ in rank_state.groups:
            places |= {
                f"{rank_state.rank} {run_.info.name} outgoing": run_.way.outgoing.data_ptr(),
                f"{rank_state.rank} {run_.info.name} incoming": run_.way.incoming.data_ptr(),
            }
            for name, value in vars(run_.way.state).items() if codec_state else ():
                if isinstance(value, np.ndarray):
                    places[f"{rank_state.rank} {run_.info.name} {name}"] = value.ctypes.data
        for kind, tensors in (
            ("residual", rank_state.residuals.flat),
            ("riders", packer.riders),
            ("scratch", list(packer._scratch.values())),
        ):
            places |= {f"{rank_state.rank} {kind} {i}": tensor.data_ptr() for i, tensor in enumerate(tensors)}
    return places


@pytest.mark.parametrize("text", ["topk(density=0.1)", "union(density=0.1)", "cast", "dense"])
def test_buffers_stay_where_they_are(text: str) -> None:
    exchange = thinwire.Exchange(_empty(), text, thinwire.LocalWorld(2), **OPTIONS)
    for step in range(10):
        exchange.reduce_(gradients(SHAPES, 2, "normal", step))
    before = _addresses(exchange, codec_state=text.startswith("topk"))
    assert len(before) > 10
    for step in range(10, 30):
        exchange.reduce_(gradients(SHAPES, 2, "normal", step))
    assert _addresses(exchange, codec_state=text.startswith("topk")) == before


# -- what users do -------------------------------------------------------------------------------------------------------


def test_single_tensors_of_several_dtypes() -> None:
    shapes = {"a": (40, 50), "b": (3,)}
    types = {"a": torch.float64, "b": torch.bfloat16}
    given = [
        {name: tensor.to(types[name]) for name, tensor in tensors.items()}
        for tensors in gradients(shapes, 2, "normal", 0)
    ]
    expected = {name: (given[0][name].double() + given[1][name].double()) / 2 for name in shapes}
    exchange = thinwire.Exchange(given[0], "topk(density=1.0)", thinwire.LocalWorld(2))
    exchange.reduce_(given)
    for tensors in given:
        assert torch.allclose(tensors["a"], expected["a"], rtol=1e-6, atol=1e-7)
        assert torch.allclose(tensors["b"].double(), expected["b"], rtol=8e-3)
        assert {name: tensor.dtype for name, tensor in tensors.items()} == types


def test_nothing_to_exchange() -> None:
    exchange = thinwire.Exchange({}, "topk", thinwire.LocalWorld(2))
    exchange.reduce_([{}, {}])


def test_parameters_that_require_grad() -> None:
    weights = [torch.nn.Parameter(torch.full((2000,), float(rank))) for rank in range(2)]
    exchange = thinwire.Exchange({"w": weights[0]}, "dense", thinwire.LocalWorld(2))
    exchange.reduce_([{"w": weight} for weight in weights])
    assert all(bool((weight == 0.5).all()) for weight in weights)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([{"a": torch.zeros(4, 3)}], "1 sets of tensors were given for 2 ranks"),
        ([{"a": torch.zeros(4, 3)}, {"b": torch.zeros(4, 3)}], "names differ .*first: 'a'"),
        ([{"a": torch.zeros(4, 3)}, {}], "names differ .*first: 'a'"),
        ([{"a": torch.zeros(4, 3)}, {"a": torch.zeros(3, 4)}], r"'a' must be .*shape \(4, 3\)"),
        ([{"a": torch.zeros(4, 3)}, {"a": torch.zeros(3, 4).T}], "'a' must be contiguous"),
        ([{"a": torch.zeros(4, 3)}, {"a": torch.zeros(4, 3, dtype=torch.float64)}], "'a' must be .*float32"),
    ],
)
def test_wrong_tensors_are_refused_and_change_nothing(given: list[Tensors], text: str) -> None:
    exchange = thinwire.Exchange({"a": torch.zeros(4, 3)}, "topk(density=1.0)", thinwire.LocalWorld(2))
    with pytest.raises(ExchangeError, match=text):
        exchange.reduce_(given)
    good = [{"a": torch.full((4, 3), 2.0)}, {"a": torch.full((4, 3), 4.0)}]
    exchange.reduce_(good)
    assert all(bool((tensors["a"] == 3.0).all()) for tensors in good)


def test_statistics_count_what_travels() -> None:
    exchange = thinwire.Exchange(_empty(), "topk(density=0.1)", thinwire.LocalWorld(2), **OPTIONS)
    for step in range(5):
        exchange.reduce_(_given(step, 2))
    stats = exchange.stats()
    assert (stats["steps"], stats["skipped"], stats["world"]) == (5, 0, 2)
    by_codec = {group["codec"]: group for group in stats["groups"]}
    assert by_codec["dense"]["bytes_per_step"] == 4 * (40 + 9 + 17)
    assert stats["bytes_per_step"] == pytest.approx(sum(group["bytes_per_step"] for group in stats["groups"]))
    assert 0.05 < by_codec["topk(density=0.1)"]["density"] < 0.11
    assert stats["residual_norm"] > 0
    assert all(group["encode_seconds"] > 0 for group in stats["groups"])


def test_texts_of_codecs_in_layouts() -> None:
    exchange = thinwire.Exchange(_empty(), parse("topk(density=0.1)"), thinwire.LocalWorld(1), exclude="c", **OPTIONS)
    assert exchange.executor is not None
    codecs = {slot.name: group.codec for group in exchange.executor.layout.groups for slot in group.slots}
    assert codecs["c"] == "dense"
    assert codecs["a"] == "topk(density=0.1)"
