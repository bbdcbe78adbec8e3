"""How long messages may be: all ranks agree without asking, bursts wait in the residual, and nobody can ask for all memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import thinwire
from tests.ranks import run
from thinwire.codecs import CodecState, Message, register
from thinwire.codecs.driver import GRAIN, WINDOW, Capacity
from thinwire.codecs.sparse import SparseCodec, SparseState
from thinwire.errors import ExchangeError
from thinwire.messages import HEADER_BYTES, Flag, read_header

ELEMENTS = 20_000


@dataclass(frozen=True)
class Scripted(SparseCodec):
    """Sends as many of its largest elements as a script says: one number a step, the last one for ever; -1 is all."""

    script: tuple[int, ...] = (100,)
    density: float = 0.005

    def pick(
        self, gradient: Tensor, residual: Tensor, state: SparseState
    ) -> tuple[bool, NDArray[np.int32], NDArray[np.float32]]:
        from thinwire.kernels.cpu import basic

        flat = residual.numpy()
        finite = basic.accumulate(flat, gradient.numpy())
        count = self.script[min(state.step, len(self.script) - 1)]
        order = np.argsort(-np.abs(flat), kind="stable")[: residual.numel() if count < 0 else count]
        indices = np.sort(order[flat[order] != 0]).astype(np.int32) if finite else np.empty(0, np.int32)
        state.room(indices.size)
        basic.take(flat, indices, state.values[: indices.size])
        return finite, indices, state.values[: indices.size]


@dataclass(frozen=True)
class Greedy(Scripted):
    """Says on one rank that it wanted all that a header can say."""

    rank: int = 1

    def encode(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Message:
        message = super().encode(gradient, residual, state)
        if state.rank == self.rank:
            state.outgoing.numpy()[8:12].view("<u4")[0] = 2**32 - 1
        return message


@dataclass(frozen=True)
class Overlong(Scripted):
    def encode(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Message:
        return Message(super().encode(gradient, residual, state).size + 10**6)


register("scripted", Scripted)
register("greedy", Greedy)
register("overlong", Overlong)


def _gradients(step: int, world: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [{"weight": torch.randn(ELEMENTS, generator=generator)} for _ in range(world)]


class Local:
    """Ranks in lock-step, with an account of what came in and what went out."""

    def __init__(self, codec: thinwire.Codec, world: int = 3) -> None:
        self.exchange = thinwire.Exchange({"weight": torch.zeros(ELEMENTS)}, codec, thinwire.LocalWorld(world))
        self.world, self.steps = world, 0
        self.given, self.arrived = torch.zeros(ELEMENTS).double(), torch.zeros(ELEMENTS).double()

    def step(self, gradients: list[dict[str, Tensor]] | None = None) -> None:
        gradients = _gradients(self.steps, self.world) if gradients is None else gradients
        self.given += sum(mine["weight"].double() for mine in gradients)
        self.exchange.reduce_(gradients)
        self.arrived += self.world * gradients[0]["weight"].double()
        self.steps += 1
        assert len({tuple(self.sizes(rank)) for rank in range(self.world)}) == 1, "all ranks agree"
        kept = sum(residual.double() for residual in self.residuals())
        assert torch.allclose(self.arrived + kept, self.given, rtol=0, atol=1e-4 * self.steps)

    def zero(self) -> list[dict[str, Tensor]]:
        return [{"weight": torch.zeros(ELEMENTS)} for _ in range(self.world)]

    def residuals(self) -> list[Tensor]:
        state = self.exchange.state_dict()
        return [state[f"rank{rank}.residual.weight"] for rank in range(self.world)]

    def sizes(self, rank: int = 0) -> list[int]:
        assert self.exchange.executor is not None
        return [
            group.way.capacity.value for group in self.exchange.executor.rank_states[rank].groups if group.way.capacity
        ]

    def sent(self, rank: int = 0) -> tuple[int, int, Flag]:
        """Entries, bytes wanted and flags of the last message."""
        assert self.exchange.executor is not None
        header = read_header(self.exchange.executor.rank_states[rank].groups[0].way.state.outgoing.numpy())
        return header.entries, header.wanted, header.flags


def test_a_burst_is_cut_waits_and_is_sent() -> None:
    local = Local(Scripted(script=(100,) * 6 + (6000, 6000, 6000) + (100,) * 20 + (-1,)))
    for _ in range(6):
        local.step()
        assert local.sent()[0] == 100
    calm = local.sizes()[0]
    assert calm < 1000
    local.step()
    entries, wanted, flags = local.sent()
    assert flags == Flag.CUT
    assert 0 < entries < 300, "what the agreed size holds"
    assert wanted > 6000 * 4
    assert local.sizes()[0] >= wanted, "the next step has room"
    local.step()
    assert local.sent()[0] == 6000
    assert local.sent()[2] == Flag(0)
    local.step()
    for _ in range(WINDOW + 1):
        local.step()
    assert local.sizes()[0] <= 1.3 * calm, "and gives it back"
    while local.steps < 29:
        local.step()
    while any(residual.any() for residual in local.residuals()):  # all that waits leaves, however often it is cut
        local.step(local.zero())
        assert local.steps < 40
    assert torch.allclose(local.arrived, local.given, rtol=0, atol=1e-3)


def test_from_nothing_to_everything() -> None:
    local = Local(Scripted(script=(0,) * 5 + (-1,)), world=2)
    for _ in range(5):
        local.step()
        assert local.sent() == (0, HEADER_BYTES, Flag(0))
    local.step()
    assert local.sent()[0] > 0, "the smallest capacity makes progress"
    local.step()
    assert local.sent() == (ELEMENTS, HEADER_BYTES + 4 * ELEMENTS, Flag(0))
    assert not any(residual.any() for residual in local.residuals())


def test_a_void_step_does_not_move_it() -> None:
    local = Local(Scripted(script=(100, 100, 6000, 100)), world=2)
    local.step()
    local.step()
    before = local.sizes()
    gradients = _gradients(2, 2)
    gradients[1]["weight"][3] = float("nan")
    local.exchange.reduce_(gradients)
    assert local.exchange.skipped_last_step
    assert local.sizes() == before


def _on_gloo(steps: int) -> list[tuple[int, bytes, bytes]]:
    codec = Scripted(script=(100, 100, 6000, 0, 0, 50, 9000, -1))
    exchange = thinwire.Exchange({"weight": torch.zeros(ELEMENTS)}, codec)
    assert exchange.executor is not None
    (rank_state,) = exchange.executor.rank_states
    (group,) = rank_state.groups
    seen = []
    for step in range(steps):
        gradient = _gradients(step, dist.get_world_size())[dist.get_rank()]
        exchange.reduce_(gradient)
        assert group.way.capacity is not None
        residual = exchange.state_dict()[f"rank{dist.get_rank()}.residual.weight"]
        seen.append((group.way.capacity.value, gradient["weight"].numpy().tobytes(), residual.numpy().tobytes()))
    return seen


def test_gloo_and_memory_have_the_same_bits() -> None:
    results = run(3, _on_gloo, 9)
    local = Local(Scripted(script=(100, 100, 6000, 0, 0, 50, 9000, -1)))
    for step in range(9):
        gradients = _gradients(step, 3)
        local.step(gradients)
        for rank in range(3):
            size, mean, residual = results[rank][step]
            assert size == local.sizes()[0]
            assert mean == gradients[0]["weight"].numpy().tobytes()
            assert residual == local.residuals()[rank].numpy().tobytes()


# -- requests that cannot be meant -------------------------------------------------------------------------------------


def test_a_hostile_request_does_not_take_the_memory() -> None:
    local = Local(Greedy(script=(100,)))
    for _ in range(4):
        local.step()
        assert local.sizes()[0] <= HEADER_BYTES + 8 * ELEMENTS + GRAIN
    assert local.exchange.stats()["memory_bytes"] < 4 * ELEMENTS + 4 * (8 * ELEMENTS + 200) + 100_000


def _greedy_peer() -> int:
    exchange = thinwire.Exchange({"weight": torch.zeros(ELEMENTS)}, Greedy(script=(100,)))
    for step in range(4):
        exchange.reduce_(_gradients(step, dist.get_world_size())[dist.get_rank()])
    return int(exchange.stats()["memory_bytes"])


def test_a_hostile_peer() -> None:
    assert max(run(2, _greedy_peer)) < 10 * 8 * ELEMENTS


def test_a_message_that_is_longer_than_agreed() -> None:
    with pytest.raises(ExchangeError, match=r"overlong.* wrote a message of \d+ bytes where \d+ were agreed"):
        Local(Overlong()).step()


# -- the rule itself ---------------------------------------------------------------------------------------------------

sizes = st.integers(0, 2**32 - 1)


@given(st.lists(sizes, max_size=3 * WINDOW), sizes, st.integers(0, 10**6), st.integers(0, 2**34))
def test_the_rule(wanted: list[int], expected: int, smallest: int, largest: int) -> None:
    left, right = (Capacity(expected, smallest, largest) for _ in range(2))
    first = left.value
    assert first >= max(smallest, expected)
    for size in wanted:
        left.observe(size)
    for size in wanted[-WINDOW:]:
        right.observe(size)
    assert left.value == right.value, "a function of the recent past alone"
    assert left.value % GRAIN == 0
    assert smallest <= left.value <= max(first, largest + GRAIN)
    if wanted:
        most = max(wanted[-WINDOW:])
        assert left.value >= min(most, largest)
        assert left.value <= max(smallest, most + most // 4) + GRAIN


@given(sizes)
def test_what_is_always_the_same_wastes_little(size: int) -> None:
    capacity = Capacity(100, 80, 2**34)
    for _ in range(3):
        capacity.observe(size)
    assert capacity.value <= max(80, size * 1.02) + GRAIN
