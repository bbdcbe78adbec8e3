"""Checks a trace against the documented Trace Event Format, as far as Perfetto's importer relies on it.

The object form has a list `traceEvents`. Every event has ph, pid, tid and name. X has ts and dur, in microseconds, and the
slices of one thread must nest: Perfetto drops those that only overlap. Flow events (s, t, f) share cat, name and id; each
binds to the slice that encloses it on its own thread (f with `"bp": "e"`); s comes first, f last.
M names processes and threads.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

EVEN = 0.0015
"""Times are written to a nanosecond: two that are equal may differ by rounding."""


def validate(trace: dict[str, Any]) -> None:
    assert isinstance(trace["traceEvents"], list)
    assert trace.get("displayTimeUnit", "ms") in ("ms", "ns")
    slices: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    flows: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    named: set[tuple[int, int]] = set()
    processes: set[int] = set()
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M", "s", "t", "f"), event
        assert isinstance(event["name"], str), event
        assert event["name"], event
        for key in ("pid", "tid"):
            assert isinstance(event[key], int), event
            assert event[key] >= 0, event
        assert isinstance(event["ts"], int | float), event
        assert event["ts"] >= 0, event
        place = event["pid"], event["tid"]
        if event["ph"] == "X":
            assert isinstance(event["dur"], int | float), event
            assert event["dur"] >= 0, event
            assert isinstance(event.get("args", {}), dict), event
            slices[place].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index"), event
            key = "sort_index" if event["name"].endswith("index") else "name"
            assert isinstance(event["args"][key], int if key == "sort_index" else str), event
            if event["name"] == "thread_name":
                named.add(place)
            if event["name"] == "process_name":
                processes.add(event["pid"])
        else:
            flows[event["cat"], event["name"], event["id"]].append(event)
    assert set(slices) <= named, "every thread has a name"
    assert {pid for pid, _ in slices} <= processes, "every process has a name"
    for place, found in slices.items():
        _nest(place, found)
    for key, events in flows.items():
        events.sort(key=lambda event: event["ts"])
        assert [event["ph"] for event in events] == ["s", *["t"] * (len(events) - 2), "f"], key
        assert events[-1]["bp"] == "e", key
        for event in events:
            around = [s for s in slices[event["pid"], event["tid"]] if s[0] - EVEN <= event["ts"] <= s[1] + EVEN]
            assert around, f"the flow {event} is in no slice"


def _nest(place: tuple[int, int], slices: list[tuple[float, float, str]]) -> None:
    stack: list[tuple[float, float, str]] = []
    for one in sorted(slices, key=lambda one: (one[0], -one[1])):
        while stack and stack[-1][1] <= one[0] + EVEN:
            stack.pop()
        assert not stack or one[1] <= stack[-1][1] + EVEN, f"{place}: {one} overlaps {stack[-1]}"
        stack.append(one)
