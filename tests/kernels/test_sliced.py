"""Slices over threads: the same bits as one pass, whatever the number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import thinwire
from tests.kernels.test_basic import same_bits
from thinwire.kernels.cpu import basic, laplace, micro, sliced


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(sliced, "SLICE", 2 * basic.TILE)
    sliced.set_threads(request.param)
    yield request.param
    sliced.set_threads(1)


def _vectors(elements: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal(elements).astype(np.float32), random.standard_normal(elements).astype(np.float32)


SIZES = [0, 1, 2 * basic.TILE, 2 * basic.TILE + 1, 50_000]


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("bad", [False, True])
def test_accumulate(threads: int, elements: int, bad: bool) -> None:
    residual, gradient = _vectors(elements)
    if bad and elements:
        gradient[elements // 2] = np.nan
    expected = residual.copy()
    flag = basic.accumulate(expected, gradient)
    assert sliced.accumulate(residual, gradient) == flag
    assert same_bits(residual, expected)
    sliced.clear(gradient)
    assert not gradient.any()


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("room", [5, 100_000])
@pytest.mark.parametrize("part", [(0.0, 1.0), (0.3, 0.6), (0.5, 0.5)])
def test_select(threads: int, elements: int, room: int, part: tuple[float, float]) -> None:
    residual, gradient = _vectors(elements)
    start, stop = (int(share * elements) for share in part)
    ends = np.array([elements // 3, elements // 2, elements], np.int64)
    thresholds = np.array([1.0, 3.0, 2.0], np.float32)
    expected, places, indices = residual.copy(), np.zeros(room, np.int32), np.zeros(room, np.int32)
    counts = micro.accumulate_select_segments(expected, gradient, start, stop, ends, thresholds, places)
    assert sliced.accumulate_select_segments(residual, gradient, start, stop, ends, thresholds, indices) == counts
    assert same_bits(residual, expected)
    assert np.array_equal(indices[: counts[2]], places[: counts[2]])


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("room", [3, 400, 100_000])
def test_collect(threads: int, elements: int, room: int) -> None:
    residual, gradient = _vectors(elements)
    expected = residual.copy()
    places, magnitudes = np.zeros(room, np.int32), np.zeros(room, np.float32)
    finite, wanted, excess = laplace.accumulate_collect(expected, gradient, 2.0, places, magnitudes)
    indices, values = np.zeros(room, np.int32), np.zeros(room, np.float32)
    found = sliced.accumulate_collect(residual, gradient, 2.0, indices, values)
    assert found[:2] == (finite, wanted)
    assert same_bits(residual, expected)
    kept = min(wanted, room)
    assert np.array_equal(indices[:kept], places[:kept])
    assert same_bits(values[:kept], magnitudes[:kept])
    if wanted <= room:
        assert found[2] == pytest.approx(excess, rel=1e-12)


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize(("room", "window"), [(3, (0, 3)), (100_000, (0, 100_000)), (100_000, (0, 1))])
@pytest.mark.parametrize("coding", [1, 2])
def test_take(threads: int, elements: int, room: int, window: tuple[int, int], coding: int) -> None:
    """What is taken is what lies above the threshold; where it is too much, everything is as if it had been listed."""
    residual, gradient = _vectors(elements)
    before = residual + gradient
    indices, values = np.zeros(room, np.int32), np.zeros(room, np.float32)
    taken, finite, wanted, excess = sliced.accumulate_take(residual, gradient, 2.0, window, coding, indices, values)
    expected, right, magnitudes = np.zeros_like(residual), np.zeros(room, np.int32), np.zeros(room, np.float32)
    assert (finite, wanted, excess) == sliced.accumulate_collect(expected, before, 2.0, right, magnitudes)
    assert taken == (wanted <= min(window[1], room))
    kept = min(wanted, room)
    assert np.array_equal(indices[:kept], right[:kept])
    if not taken:
        assert same_bits(residual, expected)
        assert same_bits(values[:kept], magnitudes[:kept])
    else:
        assert np.array_equal(values[:kept] + residual[indices[:kept]], magnitudes[:kept])
        assert (np.abs(residual[indices[:kept]]) <= np.abs(magnitudes[:kept]) * (2.0**-11 if coding == 2 else 0)).all()


def _train(count: int, codec: str) -> torch.Tensor:
    sliced.set_threads(count)
    exchange = thinwire.Exchange(
        {"a": torch.empty(300, 200), "b": torch.empty(90, 7, 7)}, codec, thinwire.LocalWorld(2)
    )
    generator = torch.Generator().manual_seed(0)
    results = []
    for _ in range(6):
        shapes = {"a": (300, 200), "b": (90, 7, 7)}
        gradients = [
            {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(2)
        ]
        exchange.reduce_(gradients)
        results += [gradients[0]["a"].flatten(), gradients[0]["b"].flatten()]
    assert exchange.executor is not None
    results += [flat for rank_state in exchange.executor.rank_states for flat in rank_state.residuals.flat]
    return torch.cat(results)


@pytest.mark.parametrize("codec", ["micro", "laplace", "laplace(exact=True)", "adacomp", "dgc", "topk", "randomblock"])
def test_codecs_do_not_depend_on_threads(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced, "SLICE", basic.TILE)
    try:
        alone, together = _train(1, codec), _train(3, codec)
    finally:
        sliced.set_threads(1)
    assert torch.equal(alone, together)


def test_how_many() -> None:
    with pytest.raises(ValueError, match="from 1 on"):
        thinwire.set_threads(0)
    command = [sys.executable, "-c", "from thinwire.kernels.cpu import sliced; print(sliced.threads())"]
    found = subprocess.run(
        command, env={**os.environ, "THINWIRE_THREADS": "3"}, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "3"
