"""What the exchange thread did in a traced step, and what it waited for when it did nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..engine.journal import Span, Trace

FOR_WIRE, FOR_BACKWARD = "waiting for wire", "waiting for backward"


class Interval(NamedTuple):
    start: float
    end: float


def merged(spans: Iterable[Interval]) -> list[Interval]:
    """The same time, without overlap, in order."""
    result: list[Interval] = []
    for span in sorted(spans):
        if result and span.start <= result[-1].end:
            result[-1] = Interval(result[-1].start, max(result[-1].end, span.end))
        elif span.end > span.start:
            result.append(Interval(*span))
    return result


def without(spans: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """What of `spans` lies outside of `taken`."""
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
    """From the first bucket that was ready to the moment when the last one was handed back."""
    return Interval(min((arrival.at for arrival in trace.arrivals), default=0.0), trace.seconds)


def waits(trace: Trace) -> list[Span]:
    """What the exchange thread waited for: a collective under way, or else a bucket that was still to come.

    What is left between its spans is its own: waking up, and bookkeeping that nobody has timed.
    """
    idle = without([exchange(trace)], [Interval(s.start, s.end) for s in trace.spans if s.lane == "thread"])
    wire = [Interval(span.start, span.end) for span in trace.spans if span.lane == "wire"]
    last = max((arrival.at for arrival in trace.arrivals), default=0.0)
    quiet = without(idle, wire)
    found = [Span("thread", FOR_WIRE, -1, *span) for span in without(idle, quiet)]
    # Between the moment when a bucket was ready and the one when work on it began nobody waits for backward any more.
    for span in quiet:
        end = min(
            span.end, next((a.at for a in sorted(trace.arrivals, key=lambda a: a.at) if a.at > span.start), last)
        )
        if end > span.start:
            found.append(Span("thread", FOR_BACKWARD, -1, span.start, end))
    return sorted(found, key=lambda span: span.start)


def coverage(trace: Trace) -> float:
    """How much of the exchange is inside of a span: work, or a wait whose reason is known."""
    whole = exchange(trace)
    named = [Interval(span.start, span.end) for span in (*trace.spans, *waits(trace)) if span.lane == "thread"]
    length = whole.end - whole.start
    return 1.0 - seconds(without([whole], named)) / length if length > 0 else 1.0
