"""The kernels of local updates against plain torch, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from thinwire.kernels.cpu import updates as compiled
from thinwire.kernels.reference import updates as plain

CASES = [
    pytest.param(mu, decay, scale, nesterov, id=f"mu{mu}-decay{decay}-scale{scale}-{nesterov}")
    for mu, decay, scale, nesterov in [
        (0.9, 0.0, 1.0, 0.0),
        (0.9, 5e-4, 1.0, 0.0),
        (0.9, 5e-4, 1 / 1024, 1.0),
        (0.9, 0.0, 1 / 1024, 1.0),
        (0.0, 0.0, 1.0, 0.0),
        (0.0, 1e-2, 0.5, 0.0),
    ]
]


def _state(mu: float, seed: int, size: int = 5003) -> list[Tensor]:
    """shared, error, momentum (empty without), gradient, point."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(size, generator=generator) for _ in range(5)]
    tensors[1] *= 0.01
    if not mu:
        tensors[2] = torch.empty(0)
    return tensors


def _options(mu: float, decay: float, scale: float, nesterov: float) -> Tensor:
    return torch.tensor([0.03, mu, decay, scale, nesterov])


def _numpy(tensors: list[Tensor]) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in tensors]


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("skipped", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize(("mu", "decay", "scale", "nesterov"), CASES)
def test_a_step_is_the_reference_bit_for_bit(
    mu: float, decay: float, scale: float, nesterov: float, skipped: int, past: bool
) -> None:
    options = _options(mu, decay, scale, nesterov)
    ours, theirs = ([tensor[skipped:] for tensor in _state(mu, 1, 5003 + skipped)] for _ in range(2))
    for step in range(4):
        start, length = (4990, 41) if step % 2 else (100, 78)
        out, expected = torch.zeros(length), torch.zeros(length)
        compiled.pending(*_numpy(ours[1:]), options.numpy(), start, out.numpy())
        plain.pending(*theirs[1:], options, start, expected)
        assert torch.equal(out, expected)
        if step == 1:
            compiled.drift(*_numpy(ours[1:]), options.numpy())
            plain.drift(*theirs[1:], options)
        else:
            assert compiled.advance(*_numpy(ours), options.numpy(), 0.3, past)
            assert plain.advance(*theirs, options, 0.3)
            compiled.settle(*(ours[i].numpy() for i in (0, 1, 4)), start, out.numpy())
            plain.settle(theirs[0], theirs[1], theirs[4], start, expected)
        for mine, yours in zip(ours, theirs, strict=True):
            assert torch.equal(mine, yours)


def test_pending_is_what_advance_leaves() -> None:
    state, options, out = _state(0.9, 2), _options(0.9, 1e-3, 1.0, 0.0), np.zeros(100, np.float32)
    compiled.pending(*_numpy(state[1:]), options.numpy(), 4950, out)
    compiled.advance(*_numpy(state), options.numpy(), 0.3, True)
    places = plain.block(5003, 4950, 100)
    assert torch.equal(state[1][places], torch.from_numpy(out)), "what is sent is exactly what is cleared"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("place", [0, 4095, 5002])
def test_largest_sees_every_place(bad: float, place: int) -> None:
    x = _state(0.9, 3)[0]
    assert compiled.largest(x.numpy()) == plain.largest(x)
    x[place] = bad
    assert not compiled.largest(x.numpy()) <= 1e30
    assert compiled.largest(np.empty(0, np.float32)) == 0.0


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("place", [0, 77, 4991, 5002])
def test_advance_says_when_an_error_is_not_finite(place: int, past: bool) -> None:
    for mu, nesterov, bad in ((0.0, 0.0, "inf"), (0.9, 0.0, "-inf"), (0.9, 1.0, "nan")):
        state, options = _state(mu, 4), _options(mu, 0.0, 1.0, nesterov)
        state[3][place] = float(bad)
        assert not compiled.advance(*_numpy(state), options.numpy(), 0.3, past)


def test_squares_are_summed_in_order() -> None:
    x = _state(0.9, 5)[0]
    for size in (*range(10), x.numel()):
        assert compiled.squares(x[:size].numpy()) == plain.squares(x[:size])


def _table(states: list[list[Tensor]]) -> np.ndarray:
    rows = [[tensor.data_ptr() if tensor.numel() else 0 for tensor in state] + [state[1].numel()] for state in states]
    return np.array(rows, np.int64)


@pytest.mark.parametrize("large", [0, compiled.CACHED], ids=["small", "past the cache"])
@pytest.mark.parametrize(("mu", "decay", "scale", "nesterov"), CASES)
def test_all_parameters_at_once_are_as_one_by_one(
    mu: float, decay: float, scale: float, nesterov: float, large: int
) -> None:
    sizes = (large + 5003, 1, 77, 640)
    ours, theirs = ([_state(mu, size, size) for size in sizes] for _ in range(2))
    single = _options(mu, decay, scale, nesterov)
    rows, options = _table(ours), single.repeat(len(sizes), 1).numpy()
    places = np.array([(0, 0, 78, 4990), (3, 78, 10, 0), (1, 88, 1, 0), (2, 89, 77, 0)], np.int64)
    out = torch.zeros(166)
    for step in range(3):
        compiled.all_pending(rows, options, places, out.numpy())
        for row, offset, length, start in places.tolist():
            expected = torch.zeros(length)
            plain.pending(*theirs[row][1:], single, start, expected)
            assert torch.equal(out[offset : offset + length], expected)
        if step == 1:
            compiled.all_drift(rows, options)
        elif step == 0:
            assert compiled.all_advance(rows, options, 0.3, places, out[:0].numpy())
            compiled.all_settle(rows, places, out.numpy())
        else:
            assert compiled.all_advance(rows, options, 0.3, places, out.numpy())
        for state in theirs:
            plain.drift(*state[1:], single) if step == 1 else plain.advance(*state, single, 0.3)
        for row, offset, length, start in places.tolist() if step != 1 else ():
            state, mean = theirs[row], out[offset : offset + length]
            plain.settle(state[0], state[1], state[4], start, mean)
        for mine, yours in zip(ours, theirs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, yours, strict=True))
    largest = max(plain.largest(state[3]) for state in ours)
    assert compiled.all_within(rows, largest)
    assert not compiled.all_within(rows, 0.99 * largest)
    ours[2][3][5] = float("nan")
    assert not compiled.all_within(rows, 1e30)
    assert not compiled.all_advance(rows, options, 0.3, places, out[:0].numpy())
