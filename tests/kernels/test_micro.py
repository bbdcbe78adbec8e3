"""MiCRO's fused pass equals the reference bit for bit: sums, flag, counts and selected places."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.kernels.cpu import basic, micro
from thinwire.kernels.reference import micro as reference

unhurried = settings(deadline=None)  # the first call of a kernel compiles it

SIZES = st.sampled_from([0, 1, 63, 64, 65, 129, 4095, 4096, 4097, 8192, 8193, 12_345]) | st.integers(0, 9000)
BAD = st.sampled_from([np.nan, np.inf, -np.inf])


def draw_vector(data: st.DataObject, size: int) -> np.ndarray:
    """Normal values, some exact zeros, and a scale that may make them denormal."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = random.standard_normal(size) * data.draw(st.sampled_from([1e-42, 1.0]))
    x[random.random(size) < data.draw(st.sampled_from([0.0, 0.9, 1.0]))] = 0.0
    return x.astype(np.float32)


def draw_range(data: st.DataObject, size: int) -> tuple[int, int]:
    border = st.integers(0, size) | st.sampled_from([i for i in (0, 64, 4095, 4096, 4097, size) if i <= size])
    start, stop = sorted((data.draw(border), data.draw(border)))
    return start, stop


def draw_threshold(data: st.DataObject, *vectors: np.ndarray) -> float:
    """Anything from nothing to all, and often a value that an element has exactly."""
    total = np.abs(sum(vectors))
    choices = st.sampled_from([0.0, -1.0, 1e-45, 1.0, 2.5, 1e38, np.inf])
    present = [float(x) for x in total[:20] if np.isfinite(x)]
    return data.draw(choices | st.sampled_from(present) if present else choices)


def spoil(data: st.DataObject, gradient: np.ndarray) -> None:
    if gradient.size:
        for place in data.draw(st.lists(st.integers(0, gradient.size - 1), max_size=2)):
            gradient[place] = data.draw(BAD)


@unhurried
@given(st.data())
def test_segments_equal_reference(data: st.DataObject) -> None:
    size = data.draw(SIZES)
    residual, gradient = draw_vector(data, size), draw_vector(data, size)
    start, stop = draw_range(data, size)
    inner = data.draw(st.just([]) | st.lists(st.integers(0, size), max_size=12))
    last = data.draw(st.sampled_from([0, size]))  # the last segment goes on, whatever its end
    ends = np.array([*sorted(inner), max([last, *inner])], np.int64)  # equal ends are empty segments
    thresholds = np.array([draw_threshold(data, residual, gradient) for _ in ends], np.float32)

    capacity = data.draw(st.sampled_from([0, 1, 2, 63, 64, 65, 130, size]))
    expected, places = torch.from_numpy(residual.copy()), torch.full((capacity,), -1, dtype=torch.int32)
    counts = reference.accumulate_select_segments(
        expected,
        torch.from_numpy(gradient),
        start,
        stop,
        torch.from_numpy(ends),
        torch.from_numpy(thresholds),
        places,
    )
    indices = np.full(capacity, -1, np.int32)
    assert micro.accumulate_select_segments(residual, gradient, start, stop, ends, thresholds, indices) == counts
    assert residual.tobytes() == expected.numpy().tobytes()
    assert indices[: counts[2]].tobytes() == places[: counts[2]].numpy().tobytes()


def select(
    residual: np.ndarray, gradient: np.ndarray, start: int, stop: int, threshold: float, indices: np.ndarray
) -> tuple[bool, int, int]:
    """With one threshold for all."""
    ends, thresholds = np.array([stop], np.int64), np.array([threshold], np.float32)
    return micro.accumulate_select_segments(residual, gradient, start, stop, ends, thresholds, indices)


@pytest.mark.parametrize("world", [1, 3, 4, 16])
def test_partitions_cover_everything_once(world: int) -> None:
    random = np.random.default_rng(world)
    start_residual = random.standard_normal(30_011).astype(np.float32)
    gradient = random.standard_normal(30_011).astype(np.float32)
    borders = [rank * 30_011 // world for rank in range(world + 1)]
    found = []
    for start, stop in itertools.pairwise(borders):
        residual, indices = start_residual.copy(), np.empty(stop - start, np.int32)
        _, wanted, written = select(residual, gradient, start, stop, 2.0, indices)
        assert wanted == written
        found.append(indices[:written] + start)
    assert np.array_equal(np.concatenate(found), np.flatnonzero(np.abs(start_residual + gradient) >= 2.0))


def test_selected_and_kept_add_up() -> None:
    random = np.random.default_rng(0)
    residual = random.standard_normal(10_000).astype(np.float32)
    gradient = random.standard_normal(10_000).astype(np.float32)
    whole = residual + gradient
    indices = np.empty(10_000, np.int32)
    _, _, written = select(residual, gradient, 0, 10_000, 1.5, indices)
    values = np.empty(written, np.float32)
    basic.take(residual, indices[:written], values)
    sent = np.zeros_like(whole)
    sent[indices[:written]] = values
    assert (sent + residual == whole).all()
    assert (np.abs(residual) < 1.5).all()
