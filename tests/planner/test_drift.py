"""Numbers that change for good, and profiles of a job whose links have."""

from __future__ import annotations

import random

import pytest

from thinwire.planner.drift import Cusum


def _steps_until(values: list[float], watch: Cusum) -> int | None:
    return next((place for place, value in enumerate(values) if watch.observe(value)), None)


@pytest.mark.parametrize("factor", [2.0, 0.5, 10.0, 0.1])
def test_a_change_is_found_soon(factor: float) -> None:
    generator = random.Random(1)
    noisy = [generator.gauss(1.0, 0.05) for _ in range(20)]
    found = _steps_until([*noisy, *(factor * generator.gauss(1.0, 0.05) for _ in range(5))], Cusum())
    assert found is not None
    assert 20 <= found <= 22


def test_noise_is_not_a_change() -> None:
    generator = random.Random(2)
    assert _steps_until([generator.gauss(1.0, 0.08) for _ in range(1000)], Cusum()) is None


def test_what_says_nothing_is_left_out() -> None:
    watch = Cusum()
    assert not any(watch.observe(value) for value in (0.0, float("nan"), float("inf"), -1.0) * 10)
    assert watch.level == 0.0
    assert _steps_until([1.0, 1.0, 3.0, 3.0], watch) == 2


def test_a_slow_drift_is_found_too() -> None:
    found = _steps_until([1.0 * 1.05**place for place in range(40)], Cusum())
    assert found is not None
    assert found < 15
