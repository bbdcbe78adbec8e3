"""Rates as people write them, and the buckets that follow from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import ThinwireError
from thinwire.lab.calibrate import LONGEST_SECONDS, rounds
from thinwire.lab.netns import FRAME, Counters, LabError, Network, Shape, format_rate, parse_rate


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("100mbit", 100_000_000),
        ("1gbit", 1_000_000_000),
        ("2.5gbit", 2_500_000_000),
        ("500kbit", 500_000),
        (" 10 Mbit ", 10_000_000),
        ("none", None),
        (None, None),
    ],
)
def test_rates(text: str | None, bits: int | None) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize(
    "text", ["", "fast", "100", "100mb", "100 mbps", "-1gbit", "1e9bit", "1.gbit", "0mbit", "9999gbit"]
)
def test_wrong_rates_are_quoted(text: str) -> None:
    with pytest.raises(LabError, match=r"'100mbit'|'64kbit'") as raised:
        parse_rate(text)
    assert repr(text) in str(raised.value)
    assert isinstance(raised.value, ThinwireError)


@given(st.integers(64, 100_000_000).map(lambda kbit: kbit * 1000), st.booleans())
def test_buckets_fit(rate: int, port: bool) -> None:
    shape = Shape.of(rate, port)
    assert shape.burst <= max(rate / 8 * 0.002, 2 * FRAME)
    assert FRAME < shape.bucket <= shape.burst
    assert FRAME < shape.gso <= max(shape.bucket, 2 * FRAME)
    assert shape.gso <= 65536
    assert shape.limit > shape.burst
    assert ("peakrate" in shape.tbf()) is not port
    if shape.peak is not None:
        assert rate // 8 < shape.peak // 8 <= 0.14 * rate, "or the kernel refuses it"
    assert parse_rate(format_rate(rate)) == pytest.approx(rate, rel=1e-3)


@given(st.integers(64, 100_000_000).map(lambda kbit: kbit * 1000) | st.none())
def test_calibration_is_short(rate: int | None) -> None:
    plan = rounds(rate)
    assert plan[0][0] == 65536
    assert all(repeats >= 1 for _, _, repeats in plan)
    if rate is not None and rate >= 1_000_000:
        assert all(size * 8 / rate <= LONGEST_SECONDS for size, _, _ in plan)
        assert sum(size * 8 / rate * repeats for size, _, repeats in plan) < 5


def test_addresses_are_different() -> None:
    assert len({Network.address(node) for node in range(1000)}) == 1000


def test_counters_subtract() -> None:
    assert Counters(10, 2, 30, 4) - Counters(1, 1, 1, 1) == Counters(9, 1, 29, 3)
