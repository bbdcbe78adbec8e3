"""Lines through measurements: found exactly where there is no noise, and not moved by a few bad ones."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire.profiler.fit import fit

SIZES = np.geomspace(64, 8e6, 12)


def test_a_line_is_found() -> None:
    line = fit(SIZES, 0.001 + 8e-9 * SIZES)
    assert line.start == pytest.approx(0.001, rel=1e-3)
    assert line.slope == pytest.approx(8e-9, rel=1e-3)
    assert line.error < 1e-3


def test_a_floor_is_found() -> None:
    line = fit(SIZES, np.maximum(0.002, 0.0005 + 8e-9 * SIZES))
    assert line(64) == pytest.approx(0.002, rel=1e-3)
    assert line(8e6) == pytest.approx(0.0645, rel=1e-3)


def test_disturbed_measurements_do_not_move_it() -> None:
    generator = np.random.default_rng(0)
    times = (0.001 + 8e-9 * SIZES) * generator.normal(1.0, 0.03, 12)
    times[3] *= 6.0
    times[9] *= 3.0
    line = fit(SIZES, times)
    for size in (1e4, 1e6, 2e7):
        assert line(size) == pytest.approx(0.001 + 8e-9 * size, rel=0.1)
    assert line.error > 0.1  # and it says that something was wrong


def test_few_points() -> None:
    assert fit([1000], [0.5])(7) == 0.5
    two = fit([1000, 2000], [0.1, 0.2])
    assert two(1500) == pytest.approx(0.15)
    assert fit([1000, 1000, 1000], [0.1, 0.3, 0.2])(5) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="at least one"):
        fit([], [])


def test_no_time_is_negative() -> None:
    line = fit([1e6, 2e6, 4e6], [0.001, 0.004, 0.009])
    assert line(0.0) >= 0.0
    falling = fit([1e3, 1e4, 1e5], [0.3, 0.2, 0.1])
    assert falling.slope >= 0.0
    assert falling(1e9) > 0.0
