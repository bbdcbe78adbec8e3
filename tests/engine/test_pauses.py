"""Which steps hold a pause, and how long it is."""

from __future__ import annotations

import pytest

from thinwire.engine.pauses import durations, longest, pauses


def test_durations_begin_with_the_run() -> None:
    assert durations([1.0, 1.5, 3.0]) == [1.0, 0.5, 1.5]
    assert durations([11.0], began=10.0) == [1.0]
    assert durations([]) == []


def test_a_pause_is_what_a_step_takes_beyond_its_kind() -> None:
    seconds = [0.9, 0.4, 0.4, 3.4, 0.05, 0.05, 0.05, 1.05, 0.05]
    paths = ["ddp"] * 4 + ["layout"] * 5
    found = pauses(seconds, paths)
    # The median step of DDP alone took (0.4 + 0.9) / 2 of these four.
    assert found == pytest.approx([0.0, 0.0, 0.0, 2.75, 0.0, 0.0, 0.0, 1.0, 0.0])


def test_what_nobody_notices_is_no_pause() -> None:
    assert pauses([0.01, 0.01, 0.01, 0.1], ["layout"] * 4) == [0.0] * 4
    assert pauses([0.4, 0.4, 0.55, 0.65], ["ddp"] * 4)[:3] == [0.0] * 3


def test_the_slow_steps_of_ddp_alone_are_no_pauses() -> None:
    """They are what DDP costs; pauses are what measuring costs."""
    assert sum(pauses([0.4] * 10 + [0.05] * 200, ["ddp"] * 10 + ["layout"] * 200)) == 0.0


def test_the_longest_is_beyond_the_median_of_all() -> None:
    assert longest([0.4, 0.05, 0.05, 2.05, 0.05]) == pytest.approx(2.0)
    assert longest([0.1]) == 0.0
    assert longest([]) == 0.0
