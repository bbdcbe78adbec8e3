"""The baselines keep what each of them promises beyond the laws that hold for all codecs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import thinwire
from thinwire.codecs import Codec, GroupInfo, ParameterInfo, Sum, parse, register
from thinwire.codecs import draws as draws_module
from thinwire.codecs.blockwise import BlockwiseCodec
from thinwire.codecs.dgc import DGC, DGCState
from thinwire.codecs.int8 import Int8
from thinwire.codecs.lowrank import LowRank, LowRankState
from thinwire.codecs.randomk import RandomK
from thinwire.codecs.sidco import SIDCo, SIDCoState
from thinwire.codecs.sign import Sign
from thinwire.errors import MessageCoding, MessageCount, MessageError, MessageLength, MessageTruncated, MessageVersion
from thinwire.messages import HEADER_BYTES

for _name, _kind in {
    "randomk": RandomK,
    "dgc": DGC,
    "sidco": SIDCo,
    "int8": Int8,
    "sign": Sign,
    "lowrank": LowRank,
}.items():
    register(_name, _kind)

NAN, INF = float("nan"), float("inf")
EPSILON = float(torch.finfo(torch.float32).eps)
# Beside the defaults of every codec, which the laws, `engine/test_nonfinite.py` and `engine/test_state.py` go through.
TEXTS = ["dgc(density=0.02, values='fp16')", "int8(block=100)", "sign(block=100)", "lowrank(rank=1)"]
# The bias lies between tensors that are compressed: it leaves a place that must stay zero.
SHAPES = {"a": (90, 60), "bias": (30,), "b": (9500,), "c": (10, 8, 5, 5), "norm": (20,)}
COMPRESSED = ("a", "b", "c")


class Job:
    """An exchange over ranks in this process, with random gradients."""

    def __init__(self, codec: str, world: int = 3, shapes: dict[str, tuple[int, ...]] = SHAPES, seed: int = 0) -> None:
        self.names = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.world = world
        self.exchange = thinwire.Exchange(self.names, codec, thinwire.LocalWorld(world), min_elements=64)
        self.generator = torch.Generator().manual_seed(seed)
        assert self.exchange.executor is not None
        self.rank_states = self.exchange.executor.rank_states

    def gradients(self) -> list[dict[str, Tensor]]:
        return [
            {name: torch.randn(tensor.shape, generator=self.generator) for name, tensor in self.names.items()}
            for _ in range(self.world)
        ]

    def reduce(self, gradients: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        results = copy.deepcopy(gradients)
        self.exchange.reduce_(results)
        return results

    def residuals(self) -> list[dict[str, Tensor]]:
        return [
            {name: value.clone() for name, value in rank_state.residuals.named()} for rank_state in self.rank_states
        ]

    def saved(self) -> list[Any]:
        return [
            [copy.deepcopy(getattr(state, field)) for field in state.saved]
            for rank_state in self.exchange.executor.rank_states  # type: ignore[union-attr]
            for run in rank_state.groups
            for state in run.way.states
        ]


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return torch.equal(left, right) if isinstance(left, Tensor) else bool(np.array_equal(left, right))


def group_of(*shapes: tuple[int, ...], gap: int = 0) -> GroupInfo:
    """Parameters of these shapes, with a gap of zeros before each."""
    parameters, at = [], 0
    for i, shape in enumerate(shapes):
        at += gap
        elements = int(np.prod(shape))
        parameters.append(ParameterInfo(f"p{i}", at, elements, shape, "dense"))
        at += elements
    return GroupInfo("group", at, tuple(parameters))


# -- void steps and resume, on groups with holes ----------------------------------------------------------------------

MOMENTUM = [f"{name}(density=0.02, momentum=0.9)" for name in ("dgc", "topk", "laplace", "sidco", "micro")]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("codec", [*TEXTS, *MOMENTUM])
def test_a_void_step(codec: str, value: float) -> None:
    job = Job(codec)
    for _ in range(6):
        job.reduce(job.gradients())
    for name, place in (("a", 17), ("b", 9000), ("c", 0), ("bias", 3)):
        gradients, before, saved = job.gradients(), job.residuals(), job.saved()
        gradients[1][name].view(-1)[place] = value
        results = job.reduce(gradients)
        assert job.exchange.skipped_last_step
        assert not results[0][name].isfinite().all()
        assert equal(job.saved(), saved), "what steers the codec is as before"
        for rank, residuals in enumerate(job.residuals()):
            for key, residual in residuals.items():
                assert residual.isfinite().all()
                if "momentum" in codec:
                    continue
                whole = before[rank][key] + gradients[rank][key]
                largest = float(torch.nan_to_num(whole, posinf=0.0, neginf=0.0).abs().max())
                near = (residual - whole).abs() <= 2 * EPSILON * largest
                assert (near | (residual == before[rank][key])).all()
                if rank != 1 or name == "bias":
                    assert near.all()
        job.reduce(job.gradients())
        assert not job.exchange.skipped_last_step


@pytest.mark.parametrize("codec", [*TEXTS, *MOMENTUM])
def test_resume_gives_the_same_bits(codec: str) -> None:
    job = Job(codec)
    for _ in range(8):
        job.reduce(job.gradients())
    other = Job(codec, seed=1)
    for _ in range(3):
        other.reduce(other.gradients())
    other.exchange.load_state_dict(job.exchange.state_dict())
    for _ in range(8):
        gradients = job.gradients()
        results, expected = other.reduce(gradients), job.reduce(gradients)
        for name in SHAPES:
            assert torch.equal(results[0][name], expected[0][name])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("codec", ["randomk", "dgc", "dgc(momentum=0.5)", "sidco", "int8", "sign", "lowrank"])
def test_small_groups(codec: str, world: int) -> None:
    """One element, nothing at all, nothing but zeros; elements are coded whatever their number."""
    for elements in (0, 1, 2, 9):
        group = group_of((elements,))
        one = parse(codec)
        ranks = [(one.start(group, rank, world), torch.zeros(elements)) for rank in range(world)]
        for step in range(7):
            gradients = [torch.full((elements,), float(rank + 1) if step % 2 else 0.0) for rank in range(world)]
            _lockstep(one, gradients, ranks, step)
            assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
            assert all(residual.isfinite().all() for _, residual in ranks)
            if elements == 1 and step == 1:
                assert float(gradients[0]) == pytest.approx((world + 1) / 2)


def _lockstep(codec: Codec, gradients: list[Tensor], ranks: list[tuple[Any, Tensor]], step: int) -> None:
    """One exchange of one group, without the engine."""
    generators = []
    for gradient, (state, residual) in zip(gradients, ranks, strict=True):
        state.step = step
        size = max(codec.estimate(state.group, len(ranks)).gathered * 4, codec.smallest_capacity(state.group))
        state.outgoing = torch.zeros(size, dtype=torch.uint8)
        generators.append(codec.exchange(gradient, residual, state))
    requests = [next(generator, None) for generator in generators]
    while requests[0] is not None:
        answers: list[Any]
        if isinstance(requests[0], Sum):
            for request in requests:
                if request.tail:  # type: ignore[union-attr]
                    request.values[-1] = 0.0 if request.finite else NAN  # type: ignore[union-attr]
            total = torch.stack([request.values for request in requests]).sum(0)  # type: ignore[union-attr]
            for request in requests:
                request.values.copy_(total)  # type: ignore[union-attr]
            answers = [request.values for request in requests]  # type: ignore[union-attr]
        else:
            answers = [[state.outgoing for state, _ in ranks]] * len(ranks)
        following = []
        for generator, answer in zip(generators, answers, strict=True):
            try:
                following.append(generator.send(answer))
            except StopIteration:
                following.append(None)
        requests = following
    codec.commit([state for state, _ in ranks])


@pytest.mark.parametrize("codec", ["randomk", "dgc", "int8", "int8(block=100)", "sign", "lowrank", "lowrank(rank=2)"])
def test_estimates_are_right(codec: str) -> None:
    """Bytes of messages without padding, and of sums, to 10 %, on gradients of Laplace's distribution."""
    shapes = {"a": (300, 400), "b": (100, 3, 20, 20), "c": (50_000,)}
    job = Job(f"{codec} via J" if codec.startswith("int8") else codec, 2, shapes)
    expected = sum(
        run.codec.estimate(run.info, 2).gathered + run.codec.estimate(run.info, 2).summed
        for run in job.rank_states[0].groups
    )
    sizes = []
    for step in range(12):
        gradients = job.gradients()
        random = np.random.default_rng(step)
        for gradient in gradients:
            for values in gradient.values():
                values.copy_(torch.from_numpy(random.laplace(size=values.shape)))
        job.reduce(gradients)
        sizes.append(sum(run.way.wanted if run.way.capacity else run.way.bytes for run in job.rank_states[0].groups))
    assert np.mean(sizes[2:]) == pytest.approx(expected, rel=0.1)


def test_arguments_are_checked() -> None:
    for text in (
        "randomk(density=0.0)",
        "dgc(sample=0)",
        "dgc(momentum=1.0)",
        "sidco(stages_max=0)",
        "sidco(density=1.5)",
        "int8(block=0)",
        "sign(block=-1)",
        "lowrank(rank=0)",
    ):
        with pytest.raises(thinwire.ThinwireError, match=text.split("(")[1].split("=")[0]):
            parse(text)
    for text in ("sidco(stages_max=3)", "dgc(momentum=0.9)", "lowrank(rank=2, seed=1)", "int8(block=64)"):
        assert str(parse(text)) == text


# -- RandomK ------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 3000), st.floats(0.0, 1.0), st.integers(0, 2**40))
def test_subsets_are_distinct_ascending_and_complete(elements: int, share: float, seed: int) -> None:
    count = round(share * elements)
    chosen = draws_module.subset(draws_module.generator(seed), elements, count)
    assert chosen.dtype == np.int32
    assert chosen.size == count
    assert (np.diff(chosen) > 0).all()
    assert not count or (chosen[0] >= 0 and chosen[-1] < elements)


@pytest.mark.parametrize("count", [5, 30, 45])
def test_subsets_are_uniform(count: int) -> None:
    hits = np.zeros(50)
    for seed in range(4000):
        hits[draws_module.subset(draws_module.generator("uniform", seed), 50, count)] += 1
    share = count / 50
    assert np.abs(hits / 4000 - share).max() < 5 * (share * (1 - share) / 4000) ** 0.5


def test_draws_do_not_change() -> None:
    """Old checkpoints, and ranks with another NumPy, must draw the same."""
    assert draws_module.subset(draws_module.generator(0, 1, "group 0"), 1000, 6).tolist() == [
        64,
        135,
        702,
        735,
        946,
        956,
    ]


def test_random_k_reaches_every_place_and_sends_nothing_twice() -> None:
    """A constant gradient: after many steps everything has been sent but what waited since its last turn."""
    group = group_of((400,), (300,), gap=50)
    codec = RandomK(density=0.1)
    state, residual = codec.start(group, 0, 1), torch.zeros(group.elements)
    ones = torch.zeros(group.elements)
    for parameter in group.parameters:
        ones[parameter.offset : parameter.offset + parameter.elements] = 1.0
    total, seen = torch.zeros(group.elements), torch.zeros(group.elements, dtype=torch.bool)
    for step in range(150):
        gradient = ones.clone()
        _lockstep(codec, [gradient], [(state, residual)], step)
        assert int((gradient != 0).sum()) == 70
        seen |= gradient != 0
        total += gradient
        assert torch.equal(total + residual, (step + 1) * ones)
    assert torch.equal(seen, ones != 0)


def test_random_k_draws_alike_on_all_ranks_and_anew_in_each_step() -> None:
    group = group_of((1000,))
    one, two = RandomK(seed=1), RandomK(seed=2)
    places = {tuple(codec._draw(group, step)) for codec in (one, two) for step in range(20)}
    assert len(places) == 40
    assert tuple(one._draw(group, 3)) == tuple(RandomK(seed=1)._draw(group, 3))


# -- DGC and SIDCo --------------------------------------------------------------------------------------------------------

DATA: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "laplace": lambda random, n: random.laplace(size=n),
    "gauss": lambda random, n: random.standard_normal(n),
    "student t3": lambda random, n: random.standard_t(3, n),
    "gauss cubed": lambda random, n: random.standard_normal(n) ** 3,
    "uniform": lambda random, n: random.uniform(-1, 1, n),
    "90 % zeros": lambda random, n: random.laplace(size=n) * (random.random(n) < 0.1),
    "99.5 % zeros": lambda random, n: random.laplace(size=n) * (random.random(n) < 0.005),
    "one outlier": lambda random, n: np.where(np.arange(n) == n // 2, 1e6, random.laplace(size=n)),
    "constant": lambda random, n: np.full(n, -0.5),
    "zeros": lambda random, n: np.zeros(n),
    "rows": lambda random, n: random.laplace(size=n) * np.tile(np.logspace(0, -4, 200), n // 200),
}
N = 200_000


def picked(codec: DGC | SIDCo, state: Any, x: np.ndarray, step: int = 0) -> tuple[int, Tensor]:
    """How many are picked out of x, and what stays."""
    state.step = step
    residual = torch.zeros(N)
    gradient = torch.from_numpy(x.astype(np.float32))
    finite, indices, values = codec.pick(gradient, residual, state)
    assert finite
    assert (values != 0).all()
    assert torch.equal(torch.from_numpy(values.copy()), gradient[indices.astype(np.int64)])
    assert not residual[indices.astype(np.int64)].any()
    if indices.size and residual.any():
        assert np.abs(values).min() >= float(residual.abs().max()), "they are the largest"
    return indices.size, residual


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("name", DATA)
def test_dgc_counts(name: str, density: float) -> None:
    x = DATA[name](np.random.default_rng(0), N)
    codec, k = DGC(density=density), round(density * N)
    state = codec.start(group_of((N,)), 0, 1)
    for step in range(5):
        count, _ = picked(codec, state, x, step)
        nonzero = int(np.count_nonzero(x.astype(np.float32)))
        assert state.rounds <= 10
        if nonzero < 0.8 * k:
            assert count == nonzero
        else:
            assert min(0.8 * k, nonzero) <= count <= 1.3 * k


@pytest.mark.parametrize("name", ["dgc", "topk", "laplace", "sidco", "micro"])
def test_velocity_accumulates_until_it_is_sent(name: str) -> None:
    """Momentum correction with factor masking, against the same in four lines."""
    group = group_of((1000,))
    exact = ", values='fp32', balance=False" if name == "micro" else ""
    codec = parse(f"{name}(density=0.1, momentum=0.9{exact})")
    state, residual = codec.start(group, 0, 1), torch.zeros(1000)
    velocity, waiting = torch.zeros(1000), torch.zeros(1000)
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        gradient = torch.randn(1000, generator=generator)
        velocity = 0.9 * velocity + gradient
        waiting = waiting + velocity
        _lockstep(codec, [gradient], [(state, residual)], step)
        sent = gradient != 0
        assert 0 < int(sent.sum()) < 1000 or (name == "micro" and step == 0)
        torch.testing.assert_close(gradient[sent], waiting[sent])
        waiting[sent] = velocity[sent] = 0.0
        torch.testing.assert_close(residual, waiting)
        torch.testing.assert_close(state.velocity, velocity)


def test_dgc_keeps_the_velocity_of_what_did_not_fit() -> None:
    group = group_of((5000,))
    codec = DGC(density=0.1, momentum=0.9)
    state = codec.start(group, 0, 1)
    state.outgoing = torch.zeros(400, dtype=torch.uint8)
    gradient, residual = torch.randn(5000, generator=torch.Generator().manual_seed(0)), torch.zeros(5000)
    codec.encode(gradient.clone(), residual, state)
    masked = state.coming == 0
    assert 0 < int(masked.sum()) < 100
    assert torch.equal(residual == 0, masked)
    codec.undo(residual, state)
    assert torch.equal(residual, gradient)
    assert not state.velocity.any()


SETTLES = ["laplace", "gauss", "student t3", "gauss cubed", "rows"]


@pytest.mark.parametrize("name", DATA)
def test_sidco_terminates_and_sends_something(name: str) -> None:
    x = DATA[name](np.random.default_rng(0), N)
    codec, counts = SIDCo(density=0.01), []
    state = codec.start(group_of((N,)), 0, 1)
    for step in range(60):
        count, _ = picked(codec, state, x, step)
        codec.commit([state])
        counts.append(count)
        assert 1 <= state.stages <= 7
        assert count >= 1 or not x.any()
    if name in SETTLES:
        assert all(0.5 <= count / (0.01 * N) <= 1.6 for count in counts[-10:]), counts[::5]


def test_sidco_on_laplace_is_right_at_once_and_at_any_stage() -> None:
    x = DATA["laplace"](np.random.default_rng(0), N)
    for stages in range(1, 8):
        codec = SIDCo(density=0.01)
        state = codec.start(group_of((N,)), 0, 1)
        state.stages = stages
        count, _ = picked(codec, state, x)
        assert 0.85 <= count / (0.01 * N) <= 1.15


@pytest.mark.parametrize("name", ["laplace", "gauss", "student t3"])
def test_sidco_and_dgc_follow_error_feedback(name: str) -> None:
    """The residual has a short tail: a single fit selects next to nothing there, stages adapt."""
    random = np.random.default_rng(0)
    for codec, low, high in ((SIDCo(density=0.01), 0.4, 2.0), (DGC(density=0.01), 0.8, 1.3)):
        state, residual = codec.start(group_of((N,)), 0, 1), torch.zeros(N)
        counts = []
        for step in range(80):
            state.step = step
            _, indices, _ = codec.pick(torch.from_numpy(DATA[name](random, N).astype(np.float32)), residual, state)
            codec.commit([state])
            counts.append(indices.size / (0.01 * N))
        assert low <= np.mean(counts[40:]) <= high, counts
        assert isinstance(state, SIDCoState | DGCState)


def test_sidco_keeps_one_state_a_group_and_one_stage_above_a_quarter() -> None:
    group = group_of((N,))
    codec = SIDCo(density=0.3)
    assert codec.most_stages() == 1
    assert SIDCo(density=0.01).most_stages() == 7
    assert SIDCo(density=0.01, stages_max=3).most_stages() == 3
    assert codec.start(group, 0, 1) is not codec.start(group, 0, 1)
    state = codec.start(group, 0, 1)
    for step in range(20):
        picked(codec, state, DATA["gauss"](np.random.default_rng(0), N), step)
        codec.commit([state])
    assert state.stages == 1


# -- Int8 and Sign ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Int8(), Int8(block=100), Sign(), Sign(block=100)])
def test_message_sizes_are_fixed(codec: BlockwiseCodec) -> None:
    group = group_of((90, 60), (3001,), (7,), gap=11)
    state = codec.start(group, 0, 1)
    state.outgoing = torch.zeros(codec.smallest_capacity(group), dtype=torch.uint8)
    blocks = sum(-(-parameter.elements // codec.block) for parameter in group.parameters)
    for gradient in (torch.zeros(group.elements), torch.randn(group.elements)):
        message = codec.encode(gradient, torch.zeros(group.elements), state)
        assert message.size == state.outgoing.numel() == codec.estimate(group, 1).gathered
    if isinstance(codec, Int8):
        assert message.size == HEADER_BYTES + 8408 + 4 * blocks
    else:
        assert 8408 / 8 <= message.size - HEADER_BYTES - 4 * blocks <= 8408 / 8 + blocks


def test_int8_error_is_half_a_level() -> None:
    job = Job("int8", 1)
    gradients = job.gradients()
    results = job.reduce(gradients)
    for name in COMPRESSED:
        levels = float(gradients[0][name].abs().max()) / 127
        assert float((results[0][name] - gradients[0][name]).abs().max()) <= 0.5001 * levels


def test_sign_contracts_and_keeps_zero_blocks() -> None:
    group = group_of((4096,), (4096,), (4096,))
    codec = Sign()
    state, residual = codec.start(group, 0, 1), torch.zeros(group.elements)
    gradient = torch.randn(group.elements, generator=torch.Generator().manual_seed(0))
    gradient[4096:8192] = 0.0
    given_ = gradient.clone()
    _lockstep(codec, [gradient], [(state, residual)], 0)
    assert not gradient[4096:8192].any()
    assert not residual[4096:8192].any()
    for start in (0, 8192):
        block = slice(start, start + 4096)
        assert gradient[block].abs().unique().numel() == 1
        assert torch.equal(torch.signbit(gradient[block]), torch.signbit(given_[block]))
        # |x - sent|^2 = (1 - (mean |x|)^2 / mean x^2) |x|^2 = (1 - 2 / pi) |x|^2 for Gauss
        assert float(residual[block].square().sum() / given_[block].square().sum()) == pytest.approx(0.363, abs=0.03)


def test_sign_residual_stays_bounded() -> None:
    job = Job("sign", 2)
    norms = []
    for _ in range(60):
        job.reduce(job.gradients())
        norms.append(job.exchange.stats()["residual_norm"])
    assert max(norms[30:]) < 1.5 * max(norms[:30])


@pytest.mark.parametrize("codec", [Int8(), Sign()])
def test_hostile_messages(codec: BlockwiseCodec) -> None:
    group = group_of((3000,))
    state = codec.start(group, 0, 1)
    state.outgoing = torch.zeros(codec.smallest_capacity(group) + 64, dtype=torch.uint8)
    codec.encode(torch.ones(3000), torch.zeros(3000), state)
    good, out = state.outgoing.clone(), torch.zeros(3000)

    def spoilt(**fields: int) -> Tensor:
        message = good.clone()
        for field, value in fields.items():
            at, size = {"version": (0, 1), "coding": (1, 1), "flags": (2, 2), "entries": (4, 4), "payload": (12, 4)}[
                field
            ]
            message[at : at + size] = torch.frombuffer(bytearray(value.to_bytes(size, "little")), dtype=torch.uint8)
        return message

    size = codec.estimate(group, 1).gathered
    for message, error in (
        (good[:15], MessageTruncated),
        (good[: size - 1], MessageTruncated),
        (spoilt(version=9), MessageVersion),
        (spoilt(flags=8), MessageVersion),
        (spoilt(coding=2), MessageCoding),
        (spoilt(coding=16), MessageCoding),
        (spoilt(coding=15), MessageCoding),
        (spoilt(entries=2999), MessageCount),
        (spoilt(entries=2**32 - 1), MessageCount),
        (spoilt(entries=0), MessageLength),
        (spoilt(payload=size - HEADER_BYTES - 1), MessageLength),
        (spoilt(payload=size - HEADER_BYTES + 1), MessageLength),
        (spoilt(payload=0), MessageLength),
    ):
        with pytest.raises(error):
            codec.decode([good, message], out, 1.0, state)
        assert not out.any(), "all messages are checked before one is added"
    codec.decode([good], out, 1.0, state)
    assert float((out - 1.0).abs().max()) < 1e-6


@settings(deadline=None)
@given(st.binary(max_size=700), st.sampled_from([Int8(block=64), Sign(block=64)]))
def test_any_bytes_are_refused_or_read(data: bytes, codec: BlockwiseCodec) -> None:
    group = group_of((500,))
    state, out = codec.start(group, 0, 1), torch.zeros(500)
    message = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    try:
        codec.decode([message], out, 1.0, state)
    except MessageError:
        assert not out.any()


# -- LowRank ------------------------------------------------------------------------------------------------------------


def matrix_of_rank(rank: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator)
    return left @ right


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_low_rank_is_exact_on_low_rank(rank: int, scale: float) -> None:
    """Also where the gradient has a lower rank than the codec, or is tiny, or huge."""
    shapes = {"matrix": (60, 80), "kernel": (40, 8, 3, 3), "vector": (500,)}
    job = Job("lowrank", 2, shapes)
    for step in range(3):
        gradients = [
            {
                "matrix": scale * matrix_of_rank(rank, 60, 80),
                "kernel": scale * matrix_of_rank(rank, 40, 72, 1).view(40, 8, 3, 3),
                "vector": scale * torch.arange(500.0),
            }
            for _ in range(2)
        ]
        results = job.reduce(gradients)
        for name, result in results[0].items():
            worst = float((result.double() - gradients[0][name].double()).norm() / gradients[0][name].double().norm())
            assert worst < (2e-5 if step else 2e-3), (name, step)


def test_low_rank_sends_the_mean_of_different_ranks_and_the_rest_later() -> None:
    """Two ranks whose matrices have rank 4 each: their mean has rank 8, and arrives in the mean over steps."""
    job = Job("lowrank", 2, {"matrix": (60, 80)})
    gradients = [{"matrix": matrix_of_rank(4, 60, 80, seed)} for seed in range(2)]
    mean = (gradients[0]["matrix"] + gradients[1]["matrix"]) / 2
    total = torch.zeros(60, 80)
    for _ in range(40):
        total += job.reduce(gradients)[0]["matrix"]
    assert float((total / 40 - mean).norm() / mean.norm()) < 0.1


def test_low_rank_recovers_from_zero() -> None:
    """A step without gradient must not kill the basis: zero times anything would stay zero."""
    job = Job("lowrank", 2, {"matrix": (60, 80)})
    for step in range(8):
        matrix = torch.zeros(60, 80) if step < 3 else matrix_of_rank(3, 60, 80)
        results = job.reduce([{"matrix": matrix}, {"matrix": matrix}])
        if step < 3:
            assert not results[0]["matrix"].any()
        if step > 3:
            torch.testing.assert_close(results[0]["matrix"], matrix, rtol=1e-4, atol=1e-4)
        for rank_state in job.rank_states:
            state = rank_state.groups[0].way.state
            assert isinstance(state, LowRankState)
            assert (state.basis.view(4, 80).abs().amax(1) > 0).all()
            assert torch.equal(state.basis, job.rank_states[0].groups[0].way.state.basis)  # type: ignore[attr-defined]


def test_low_rank_compresses_where_it_pays() -> None:
    codec = LowRank(rank=4)
    group = group_of((100, 100), (4, 4), (1000,), (5, 1000), (1, 500), (3, 0))
    state = codec.start(group, 0, 1)
    assert [(matrix.rows, matrix.columns) for matrix in state.matrices] == [(100, 100), (5, 1000)]
    assert state.kept.numel() == 16 + 1000 + 500
    assert codec.estimate(group, 1).summed == 4 * (800 + 4020 + 1516 + 1)


def test_low_rank_residual_of_a_rank_does_not_grow_with_its_difference_from_the_mean() -> None:
    job = Job("lowrank", 3, {"matrix": (60, 80)})
    norms = []
    for _ in range(100):
        job.reduce(job.gradients())
        norms.append(job.exchange.stats()["residual_norm"])
    assert max(norms[50:]) < 1.3 * max(norms[:50])
