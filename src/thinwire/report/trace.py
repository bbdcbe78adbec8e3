"""Traced steps as Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process is a rank. Its threads are training, the exchange thread, and as many wire lanes as collectives overlap. A flow
connects the bucket that completed a group, in backward, with all work on the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..engine.journal import GroupLine, Span, Trace
from .runs import Run
from .timeline import waits

TRAINING, THREAD, WIRE = 1, 2, 10

Event = dict[str, Any]


def chrome(run: Run) -> dict[str, Any]:
    """The trace as a JSON object. Times are microseconds since the first traced step, by each rank's clock."""
    events: list[Event] = []
    began = min((trace.time for found in run.journals for trace in found.traces.values()), default=0.0)
    for found in run.journals:
        rank, lanes = found.start.rank, 0
        first = next(iter(found.traces.values()), None)
        for trace in found.traces.values():
            assert first is not None
            # The wall clock is too coarse for consecutive steps.
            offset = 1e6 * (first.time - began + trace.clock - first.clock)
            scribe = _Scribe(rank, trace, offset, found.layout_of(trace.step, trace.path))
            events += scribe.events()
            lanes = max(lanes, scribe.lanes)
        if found.traces:
            events += _names(rank, f"rank {rank} on {found.start.host}", lanes)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"run": run.name, "codec": run.first.start.codec, "thinwire": run.first.start.thinwire},
    }


def _names(rank: int, process: str, lanes: int) -> list[Event]:
    threads = {TRAINING: "training", THREAD: "exchange thread"}
    threads |= {WIRE + lane: "wire" if lane == 0 else f"wire {lane + 1}" for lane in range(lanes)}
    events: list[Event] = [_metadata(rank, 0, "process_name", name=process)]
    events.append(_metadata(rank, 0, "process_sort_index", sort_index=rank))
    for place, (tid, name) in enumerate(threads.items()):
        events.append(_metadata(rank, tid, "thread_name", name=name))
        events.append(_metadata(rank, tid, "thread_sort_index", sort_index=place))
    return events


def _metadata(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": args}


class _Scribe:
    """Events of one step of one rank."""

    def __init__(self, rank: int, trace: Trace, offset: float, groups: Sequence[GroupLine]) -> None:
        self.rank, self.trace, self.offset, self.groups = rank, trace, offset, groups
        self.lanes = 0
        self._events: list[Event] = []

    def events(self) -> list[Event]:
        trace = self.trace
        self._slice(TRAINING, f"step {trace.step}", 0.0, trace.seconds, {})
        for span in trace.spans:
            if span.lane == "job":
                self._slice(TRAINING, span.name, span.start, span.end, {})
        buckets = self._buckets()
        placed = [(THREAD, span) for span in trace.spans if span.lane == "thread"]
        placed += self._on_lanes(span for span in trace.spans if span.lane == "wire")
        for tid, span in placed:
            self._slice(tid, self._title(span), span.start, span.end, self._facts(span))
        for span in waits(trace):
            self._slice(THREAD, span.name, span.start, span.end, {})
        for group, at in buckets.items():
            self._flow(group, at, [(tid, span) for tid, span in placed if span.group == group])
        return self._events

    def _buckets(self) -> dict[int, float]:
        """Add a slice per bucket within backward; returns where the flow of each group starts."""
        inside = [span for span in self.trace.spans if span.lane == "job" and span.name in ("backward", "compute")]
        begin = inside[-1].start if inside else 0.0
        limit = inside[-1].end if inside else self.trace.seconds
        starts: dict[int, float] = {}
        for number, arrival in enumerate(sorted(self.trace.arrivals, key=lambda arrival: arrival.at)):
            end = min(max(arrival.at, begin), limit)
            more = f" and {arrival.tensors - 1} more" if arrival.tensors > 1 else ""
            self._slice(TRAINING, f"until bucket {number}", begin, end, {"tensors": f"{arrival.first}{more}"})
            for group in arrival.groups:
                starts[group] = (begin + end) / 2 if end - begin < 2e-6 else end - 1e-6
            begin = end
        return starts

    def _on_lanes(self, spans: Iterable[Span]) -> list[tuple[int, Span]]:
        """Slices of a thread must nest, but collectives overlap: each goes to the first free lane."""
        free: list[float] = []
        placed = []
        for span in sorted(spans, key=lambda span: span.start):
            lane = next((lane for lane, until in enumerate(free) if until <= span.start), len(free))
            free[lane : lane + 1] = [span.end]
            placed.append((WIRE + lane, span))
        self.lanes = len(free)
        return placed

    def _title(self, span: Span) -> str:
        return f"{span.name}, {self._group(span.group)}" if span.group >= 0 else span.name

    def _group(self, group: int) -> str:
        return self.groups[group].name if group < len(self.groups) else f"bucket {group}"

    def _facts(self, span: Span) -> dict[str, Any]:
        if not 0 <= span.group < len(self.groups):
            return {}
        group = self.groups[span.group]
        codec = f"{group.codec} via {group.chain}" if group.chain else group.codec
        return {"codec": codec, "elements": group.elements, "tensors": len(group.tensors)}

    def _at(self, seconds: float) -> float:
        return round(self.offset + 1e6 * seconds, 3)

    def _slice(self, tid: int, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        begin = self._at(start)
        event = {"ph": "X", "pid": self.rank, "tid": tid, "ts": begin, "dur": round(self._at(end) - begin, 3)}
        self._events.append({**event, "name": name, "cat": "thinwire", "args": args})

    def _flow(self, group: int, at: float, spans: list[tuple[int, Span]]) -> None:
        spans = sorted(
            (item for item in spans if item[1].name not in ("take in", "hand back")), key=lambda x: x[1].start
        )
        if not spans:
            return
        number = (self.rank << 40) + (self.trace.step << 12) + group
        common = {"pid": self.rank, "name": "group", "cat": "gradient", "id": number}
        self._events.append({"ph": "s", "tid": TRAINING, "ts": self._at(at), **common})
        for place, (tid, span) in enumerate(spans):
            last = place == len(spans) - 1
            event = {"ph": "f" if last else "t", "tid": tid, "ts": self._at(span.start), **common}
            self._events.append({**event, "bp": "e"} if last else event)
