"""Predictions that may be acted on: between computation and DDP alone, and only where measurements agree."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.auto.patience import DISAPPOINTMENTS, FIRST, LONGEST, Patience
from thinwire.auto.pauses import ALLOWED, Pauses
from thinwire.auto.sanity import TWICE, Evidence, Verdict, contradiction, judge, possible

CALM = Evidence(native=0.25, compute=0.1, expected=0.24)
seconds = st.floats(1e-4, 1e3)


@given(native=seconds, compute=seconds, expected=seconds, predicted=seconds, unsteady=st.floats(0, 2))
def test_nothing_outside_of_the_bounds_is_acted_on(
    native: float, compute: float, expected: float, predicted: float, unsteady: float
) -> None:
    evidence = Evidence(native, compute, expected, unsteady=unsteady)
    if judge(evidence, predicted, 0.04) is Verdict.ACT:
        assert 0.998 * compute <= predicted <= 0.96 * native
        assert native / TWICE <= expected <= native * TWICE
        assert 1.0 - predicted / native >= unsteady / 2.0


@pytest.mark.parametrize(
    ("evidence", "predicted", "verdict"),
    [
        (CALM, 0.11, Verdict.ACT),
        (CALM, 0.245, Verdict.STAY),
        (CALM, 0.26, Verdict.STAY),
        (CALM, 0.0082, Verdict.BUSY),  # below its computation
        (dataclasses.replace(CALM, expected=53.135), 0.162, Verdict.BUSY),
        (
            dataclasses.replace(CALM, expected=0.12),
            0.11,
            Verdict.BUSY,
        ),  # steps take more than twice what links explain
        (dataclasses.replace(CALM, unsteady=0.7), 0.2, Verdict.STAY),  # a gain that disappears in the noise
        (CALM, math.nan, Verdict.BUSY),
        (dataclasses.replace(CALM, expected=math.inf), 0.11, Verdict.BUSY),
        (dataclasses.replace(CALM, native=0.0), 0.11, Verdict.BUSY),
    ],
)
def test_verdicts(evidence: Evidence, predicted: float, verdict: Verdict) -> None:
    assert judge(evidence, predicted, 0.04) is verdict


def test_links_that_vary_contradict_only_where_even_the_fastest_do() -> None:
    slow = dataclasses.replace(CALM, expected=0.7)
    assert contradiction(slow)
    assert not contradiction(dataclasses.replace(slow, spread=1.0)), "at best they are twice as fast"


def test_possible() -> None:
    assert possible(CALM, CALM.compute)
    assert possible(CALM, CALM.native)
    assert not possible(CALM, 0.9 * CALM.compute)
    assert not possible(CALM, 1.1 * CALM.native)


def test_patience_doubles_and_ends() -> None:
    patience = Patience()
    waits = [patience.wait() for _ in range(12)]
    assert waits[:3] == [FIRST, 2 * FIRST, 4 * FIRST]
    assert waits[-1] == LONGEST
    assert [patience.disappointed() for _ in range(DISAPPOINTMENTS)] == [False] * (DISAPPOINTMENTS - 1) + [True]
    patience.satisfied()
    assert not patience.disappointed()


def test_pauses_are_paid_for_by_time() -> None:
    assert not Pauses.enough(ALLOWED, 0.0)
    assert Pauses.enough(ALLOWED + 0.5, 10.0)
    assert not Pauses.enough(ALLOWED + 0.5, 1000.0)
    pauses = Pauses()
    for step, seconds in enumerate((0.25, 0.001, 0.3)):
        pauses.add(step, seconds)
    assert (pauses.total, pauses.longest, pauses.last_step) == (0.55, 0.3, 2)
    assert str(pauses) == "training stood still for 0.6 s in all, at most 0.3 s at a time"
