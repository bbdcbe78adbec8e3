"""Strengths, fixed and automatic."""

from __future__ import annotations

import math

import pytest

import thinwire
from thinwire.feedback import Balance, Detached, Plain
from thinwire.feedback.detached import FIRST, PATIENCE, SMALLEST


@pytest.mark.parametrize("strength", [-0.1, 1.1, math.nan, "often"])
def test_a_strength_outside_of_0_to_1_is_refused(strength: object) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        Detached(strength)  # type: ignore[arg-type]


def test_plain_is_strength_zero() -> None:
    assert Plain().strength == 0.0
    assert Balance(thinwire.Plain()).strength == 0.0
    assert repr(Plain()) == "Plain()"


def test_a_fixed_strength_stays() -> None:
    balance = Balance(Detached(0.4))
    for _ in range(200):
        balance.observe(1.0, 2.0)
        assert balance.adopt() == 0.4
    assert balance.measured == pytest.approx(0.5)


def test_auto_waits_then_follows_what_is_sent() -> None:
    balance = Balance(Detached("auto"))
    for _ in range(PATIENCE - 1):
        balance.observe(3.0, 4.0)
        assert balance.adopt() == FIRST
    balance.observe(3.0, 4.0)
    assert balance.adopt() == pytest.approx(0.75)
    for _ in range(2000):
        balance.observe(0.0, 4.0)
    assert balance.adopt() == SMALLEST
    before = balance.measured
    balance.observe(math.inf, math.inf)
    assert balance.measured == before, "a sum that overflows teaches nothing"
