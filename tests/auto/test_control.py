"""When a control step is due, and what several of them say."""

from __future__ import annotations

import pytest

from thinwire.auto.control import COMPARED, SHARE, SLOWER, Control


def test_a_control_step_is_earned_by_half_a_percent_of_the_time() -> None:
    control, passed = Control(dense=0.25), 0.0
    while not control.due(0.2):
        control.passed(0.2)
        passed += 0.2
    assert SHARE * passed == pytest.approx(0.25, rel=0.01)
    assert not control.compare(0.25, 0.2)
    assert not control.due(0.2), "it has been spent"


def test_none_is_made_where_links_say_enough() -> None:
    control = Control(dense=3.7)
    control.passed(1e6)
    assert not control.due(0.25)
    assert control.due(0.25, slower=0.1), "messages take a tenth of the time now"
    assert Control(dense=0.7).needed(0.25)
    assert not Control().due(0.25), "nothing is known of dense steps"


def test_only_what_is_slower_most_of_the_time_is_slower() -> None:
    control = Control(dense=0.25)
    single = [control.compare(0.25, seconds) for seconds in (0.2, 0.9, 0.2, 0.24, 0.2)]
    assert not any(single), "one disturbed step says nothing"
    verdicts = [control.compare(0.25, 0.25 * (SLOWER + 0.01)) for _ in range(COMPARED)]
    assert verdicts[-1]
    assert not verdicts[0]
