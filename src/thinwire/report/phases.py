"""What a run did besides training by its plan, for the time axis: DDP alone while it is watched, and pauses."""

from __future__ import annotations

from typing import NamedTuple

from ..engine.journal import Journal
from ..engine.pauses import durations, pauses


class Phase(NamedTuple):
    """From `start` to `end`, in seconds since the run began. `kind` is "ddp" or "pause"."""

    kind: str
    start: float
    end: float


def phases(found: Journal) -> list[Phase]:
    """None for a run without a wire, which has no such thing. Neighbouring steps of DDP alone are one phase."""
    steps = found.steps
    if not steps or not any(event.what == "auto" for event in found.events):
        return []
    began = found.starts[0].time
    ends = [step.time - began for step in steps]
    result: list[Phase] = []
    at = 0.0
    seconds, paths = durations(ends), [step.path for step in steps]
    for end, path, pause in zip(ends, paths, pauses(seconds, paths), strict=True):
        if pause:
            result.append(Phase("pause", at, at + pause))
            at += pause
        if path == "ddp":
            if result and result[-1].kind == "ddp" and result[-1].end == at:
                result[-1] = Phase("ddp", result[-1].start, end)
            else:
                result.append(Phase("ddp", at, end))
        at = end
    return result
