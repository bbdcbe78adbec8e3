"""Timings of a finished step, and its trace line: spans without overlap or holes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from . import journal
from .scheduler import WORK, Timing


@dataclass(slots=True)
class Done:
    """A finished exchange, in seconds of `perf_counter`. `work` is what the exchange thread did apart from codecs."""

    timings: list[Timing]
    arrivals: list[tuple[float, Sequence[str], tuple[int, ...]]]
    ended: float
    work: list[tuple[str, int, float, float]] = field(default_factory=list)
    bytes: int = 0
    path: str = "layout"


def trace_line(number: int, began: float, done: Done, marks: Sequence[tuple[str, float]]) -> journal.Trace:
    """Everything of one step, in seconds since it began."""
    spans = []
    for timing in done.timings:
        for name, start, stop in timing.phases:
            lane = "thread" if name in WORK else "wire"
            spans.append(journal.Span(lane, name, timing.group, _exact(start - began), _exact(stop - began)))
    for name, group, start, stop in done.work:
        spans.append(journal.Span("thread", name, group, _exact(start - began), _exact(stop - began)))
    last = max((at for at, _, _ in done.arrivals), default=done.ended)
    starts = [("between steps", began), *(mark for mark in marks if began <= mark[1] < last)]
    if len(starts) == 1:
        starts = [("compute", began)]
    for (name, start), (_, stop) in zip(starts, [*starts[1:], ("", last)], strict=True):
        spans.append(journal.Span("job", name, -1, _exact(start - began), _exact(stop - began)))
    waiting = journal.Span("job", "waiting for the exchange", -1, _exact(last - began), _exact(done.ended - began))
    spans.append(waiting)
    arrivals = tuple(
        journal.Arrival(_exact(at - began), len(names), names[0] if names else "", groups)
        for at, names, groups in done.arrivals
    )
    wall = time.time() - (perf_counter() - began)
    return journal.Trace(number, wall, _exact(done.ended - began), tuple(spans), arrivals, done.path, began)


def _exact(seconds: float) -> float:
    """To a nanosecond: the spans of a trace must neither overlap nor leave holes."""
    return round(seconds, 9)
