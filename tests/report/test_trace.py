"""Traces of real steps: the format that Perfetto opens, flows from backward to the exchange, and nothing left out."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.chrome import validate
from tests.report.sample import TRACED
from thinwire.engine.journal import Arrival, Span, Trace
from thinwire.report.runs import Run, load
from thinwire.report.timeline import FOR_BACKWARD, FOR_CORE, FOR_WIRE, Interval, coverage, exchange, waits, without
from thinwire.report.trace import chrome


def _trace(run: Path) -> dict[str, Any]:
    found = load(run)
    assert isinstance(found, Run)
    result: dict[str, Any] = json.loads(json.dumps(chrome(found)))
    return result


def test_twenty_steps_of_two_ranks(real_run: Path) -> None:
    trace = _trace(real_run)
    validate(trace)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in slices if event["name"].startswith("step ")]
    assert len(steps) == 2 * TRACED
    flows = [event for event in trace["traceEvents"] if event["ph"] == "s"]
    assert len(flows) == 2 * TRACED * 3, "one for each group, step and rank"
    backward = [event for event in slices if event["name"] == "backward"]
    for flow in flows:
        assert any(
            b["pid"] == flow["pid"] and b["ts"] - 1 <= flow["ts"] <= b["ts"] + b["dur"] + 1 for b in backward
        ), "a flow begins in backward"
    names = {event["name"].split(",")[0] for event in slices}
    assert {"encode", "decode", "all-gather", "forward", "optimizer", "commit", FOR_WIRE} <= names


def test_the_spans_of_the_exchange_leave_little_out(real_run: Path) -> None:
    found = load(real_run)
    assert isinstance(found, Run)
    whole = covered = 0.0
    for journal in found.journals:
        for trace in journal.traces.values():
            start, end = exchange(trace)
            whole += end - start
            covered += coverage(trace) * (end - start)
    assert covered >= 0.95 * whole


def test_a_hostile_name_is_a_name(hostile_run: Path) -> None:
    validate(_trace(hostile_run))


def _overlap(slices: list[dict[str, Any]]) -> None:
    """Let one slice end in the middle of the next."""
    first, second = sorted(slices, key=lambda event: event["ts"])[:2]
    first["dur"] = second["ts"] + second["dur"] / 2 - first["ts"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda events: events[0].pop("ph"),
        lambda events: next(e for e in events if e["ph"] == "X").update(dur=-1.0),
        lambda events: _overlap([e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (0, 2)]),
        lambda events: next(e for e in events if e["ph"] == "f").update(id=0),
        lambda events: next(e for e in events if e["ph"] == "s").update(ts=1e12),
        lambda events: next(e for e in events if e["ph"] == "t").update(tid=77),
        lambda events: [events.remove(e) for e in list(events) if e["ph"] == "M"],
    ],
)
def test_the_validator_notices(real_run: Path, damage: Any) -> None:
    trace = copy.deepcopy(_trace(real_run))
    damage(trace["traceEvents"])
    with pytest.raises((AssertionError, KeyError)):
        validate(trace)


def test_what_the_thread_waits_for() -> None:
    spans = (
        Span("thread", "encode", 0, 1.0, 2.0),
        Span("wire", "all-gather", 0, 2.0, 5.0),
        Span("thread", "encode", 1, 3.0, 3.5),
        Span("thread", "decode", 0, 5.5, 6.0),
        Span("thread", "encode", 2, 8.0, 9.0),
    )
    arrivals = (Arrival(1.0, 1, "a", (0,)), Arrival(3.0, 1, "b", (1,)), Arrival(7.5, 1, "c", (2,)))
    trace = Trace(1, 0.0, 10.0, spans, arrivals)
    found = [(span.name, span.start, span.end) for span in waits(trace)]
    assert found == [
        (FOR_WIRE, 2.0, 3.0),
        (FOR_WIRE, 3.5, 5.0),
        (FOR_CORE, 5.0, 5.5),
        (FOR_BACKWARD, 6.0, 7.5),
        (FOR_CORE, 7.5, 8.0),
    ]
    # 9 to 10: there was nothing to wait for any more.
    assert coverage(trace) == pytest.approx(1.0 - 1.0 / 9.0)


def test_intervals() -> None:
    whole = [Interval(0, 10)]
    assert without(whole, []) == whole
    assert without(whole, [Interval(2, 3), Interval(2.5, 4)]) == [Interval(0, 2), Interval(4, 10)]
    assert without(whole, [Interval(-1, 11)]) == []
    assert without([Interval(0, 4), Interval(6, 8)], [Interval(3, 7)]) == [Interval(0, 3), Interval(7, 8)]
