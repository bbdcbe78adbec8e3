"""What a page says in words before it shows anything: how runs compare."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .. import traffic
from ..engine.journal import Journal, Step
from .runs import Run, mean, settled, summarise, typical

SAME_LOSS = 0.05
"""Losses that differ by less count as the same."""

SAME = 1.05
"""Ratios closer to 1 count as equal."""

WINDOW = 10
"""Losses of so many steps are averaged: batches differ."""


@dataclass(frozen=True)
class Course:
    """What of a run can be compared: its loss over time, and what it sent. None where that is not known."""

    name: str
    seconds: float | None
    """From the start to the end of the last step."""
    step_seconds: float | None
    steps: int
    losses: Sequence[tuple[float, float]] = ()
    """Seconds since the start, and the mean loss of the last steps."""
    bytes: float | None = None

    @property
    def loss(self) -> float | None:
        return self.losses[-1][1] if self.losses else None

    def reaches(self, loss: float) -> float | None:
        """When the loss is that low for the first time."""
        return next((at for at, value in self.losses if value <= loss), None)


def smoothed(times: Sequence[float], losses: Sequence[float]) -> list[tuple[float, float]]:
    """Means over the last WINDOW losses."""
    return [(at, statistics.fmean(losses[max(0, n - WINDOW) : n])) for n, at in enumerate(times, 1)]


def compare(base: Course, other: Course) -> str:
    """How another run did beside the first: "4.1 times faster to the same loss, 36 times fewer bytes"."""
    parts = speed(base, other), volume(base, other), ending(base, other)
    return ", ".join(part for part in parts if part)


def speed(base: Course, other: Course) -> str:
    """`"4.1 times faster to the same loss"`; empty where times are not known."""
    if base.loss is None or other.loss is None or base.seconds is None or other.seconds is None:
        return _pace(base.step_seconds, other.step_seconds, "per step")
    apart = other.loss - base.loss
    if abs(apart) <= SAME_LOSS:
        return _pace(base.seconds, other.seconds, "to the same loss")
    # The worse of both is reached by both, if only at the end.
    target = max(base.loss, other.loss)
    return _pace(base.reaches(target), other.reaches(target), f"to a loss of {target:.2f}")


def ending(base: Course, other: Course) -> str:
    """`"but the loss at the end is 0.12 higher"`; empty where it is the same, or not known."""
    apart = 0.0 if base.loss is None or other.loss is None else other.loss - base.loss
    if abs(apart) <= SAME_LOSS:
        return ""
    return (
        f"{'but' if apart > 0 else 'and'} the loss at the end is {abs(apart):.2f} {'higher' if apart > 0 else 'lower'}"
    )


def _pace(base: float | None, other: float | None, whereto: str) -> str:
    if not base or not other:
        return ""
    if 1 / SAME < base / other < SAME:
        return f"as fast {whereto}"
    return f"{times(base / other)} faster {whereto}" if base > other else f"{times(other / base)} slower {whereto}"


def volume(base: Course, other: Course) -> str:
    """`"36 times fewer bytes"`, per step; empty where bytes are not known."""
    if not base.bytes or not other.bytes or not base.steps or not other.steps:
        return ""
    ratio = base.bytes / base.steps / (other.bytes / other.steps)
    if 1 / SAME < ratio < SAME:
        return "as many bytes"
    return f"{times(ratio)} fewer bytes" if ratio > 1 else f"{times(1 / ratio)} more bytes"


def times(ratio: float) -> str:
    """Two digits, as many as such a ratio is good for: "4.1 times"."""
    return f"{ratio:.1f} times" if ratio < 9.95 else f"{ratio:.0f} times"


def course(run: Run) -> Course:
    """A run as its journal tells it."""
    found = run.first
    began = found.starts[0].time
    noted = sorted((note.time - began, loss) for note in found.notes if (loss := note.values.get("loss")) is not None)
    steps = found.steps
    return Course(
        run.name,
        steps[-1].time - began if steps else None,
        mean(typical(settled(steps)), "seconds"),
        len(steps),
        smoothed([at for at, _ in noted], [loss for _, loss in noted]),
        _sent(found, steps),
    )


def _sent(found: Journal, steps: Sequence[Step]) -> float | None:
    """Bytes on the link in all steps; those of DDP alone are not counted by anybody, but are known."""
    elements = sum(group.elements for group in found.layouts[-1].groups) if found.layouts else 0
    alone = traffic.dense(elements, found.start.world)
    sizes = [alone if step.link_bytes is None and step.path == "ddp" else step.link_bytes or 0.0 for step in steps]
    return sum(sizes) if all(sizes) and sizes else None


def headlines(runs: Sequence[Run]) -> Iterator[str]:
    """A sentence for the first run alone, or one for each of the others beside it."""
    if len(runs) == 1:
        if said := alone(runs[0]):
            yield said
        return
    base = course(runs[0]) if runs else None
    for run in runs[1:]:
        assert base is not None
        if said := compare(base, course(run)):
            yield f"{run.name}: {said}" if len(runs) > 2 else said


def alone(run: Run) -> str:
    """One run by itself: how long its steps are and how much it sends."""
    row = summarise(run)
    parts = []
    if row["seconds"]:
        waiting = (
            f", {100 * row['exposed'] / row['seconds']:.0f} % of it waiting" if row["exposed"] is not None else ""
        )
        parts.append(f"{1000 * row['seconds']:.3g} ms per step{waiting}")
    if row["link_bytes"] and row["dense_bytes"] and row["dense_bytes"] > SAME * row["link_bytes"]:
        parts.append(f"{times(row['dense_bytes'] / row['link_bytes'])} fewer bytes than dense")
    return "; ".join(parts)
