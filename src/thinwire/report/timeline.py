"""Work and waits of the exchange thread in a traced step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..engine.journal import Span, Trace

FOR_WIRE, FOR_BACKWARD, FOR_CORE = "waiting for wire", "waiting for backward", "waiting for a core"


class Interval(NamedTuple):
    start: float
    end: float


def merged(spans: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, sorted and disjoint."""
    result: list[Interval] = []
    for span in sorted(spans):
        if result and span.start <= result[-1].end:
            result[-1] = Interval(result[-1].start, max(result[-1].end, span.end))
        elif span.end > span.start:
            result.append(Interval(*span))
    return result


def without(spans: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """The parts of `spans` outside `taken`."""
    gone = merged(taken)
    result = []
    for start, end in merged(spans):
        for other in gone:
            if other.end <= start or other.start >= end:
                continue
            if other.start > start:
                result.append(Interval(start, other.start))
            start = other.end
        if start < end:
            result.append(Interval(start, end))
    return result


def seconds(spans: Iterable[Interval]) -> float:
    return sum(span.end - span.start for span in spans)


def exchange(trace: Trace) -> Interval:
    """From the first ready bucket to the end of the step."""
    return Interval(min((arrival.at for arrival in trace.arrivals), default=0.0), trace.seconds)


def waits(trace: Trace) -> list[Span]:
    """Idle times of the exchange thread by reason.

    wire      a collective is in progress
    a core    a bucket is ready or a collective has ended, but other threads hold the cores or the interpreter lock
    backward  neither; the next bucket is not ready yet

    Remaining gaps are the thread's own bookkeeping, which is not timed.
    """
    work = sorted((span for span in trace.spans if span.lane == "thread"), key=lambda span: span.start)
    wire = [span for span in trace.spans if span.lane == "wire"]
    idle = without([exchange(trace)], map(_interval, work))
    quiet = without(idle, map(_interval, wire))
    ready = [Interval(arrival.at, _next(work, arrival.at, trace.seconds)) for arrival in trace.arrivals]
    ready += [Interval(span.end, _next(work, span.end, span.end, span.group)) for span in wire]
    rest = without(quiet, ready)
    found = [Span("thread", FOR_WIRE, -1, *span) for span in without(idle, quiet)]
    found += [Span("thread", FOR_CORE, -1, *span) for span in without(quiet, rest)]
    arrived = {arrival.at for arrival in trace.arrivals}
    found += [Span("thread", FOR_BACKWARD, -1, *span) for span in rest if span.end in arrived]
    return sorted(found, key=lambda span: span.start)


def _interval(span: Span) -> Interval:
    return Interval(span.start, span.end)


def _next(work: Iterable[Span], at: float, otherwise: float, group: int | None = None) -> float:
    """Start of the thread's next piece of work, optionally of a group."""
    return next((span.start for span in work if span.start >= at and group in (None, span.group)), otherwise)


def coverage(trace: Trace) -> float:
    """Fraction of the exchange covered by work or by waits with a known reason."""
    whole = exchange(trace)
    named = [Interval(span.start, span.end) for span in (*trace.spans, *waits(trace)) if span.lane == "thread"]
    length = whole.end - whole.start
    return 1.0 - seconds(without([whole], named)) / length if length > 0 else 1.0
