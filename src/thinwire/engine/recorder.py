"""Makes journal lines out of what the engine knows after a step, and hands them to whoever asked for them.

Nothing is measured here. A line is put together after the last gradient of a step was handed back, in the exchange thread.
"""

from __future__ import annotations

import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ..log import logger
from ..planner.plan import Plan
from ..version import __version__
from . import journal
from .pipeline import WORK, Timing

if TYPE_CHECKING:
    from .layout import Layout
    from .member import GroupRun, Member

Sink = Callable[[journal.Line], None]


@dataclass(slots=True)
class Done:
    """A finished exchange, in seconds of `perf_counter`. `work` is what the exchange thread did beside codecs."""

    timings: list[Timing]
    arrivals: list[tuple[float, Sequence[str], tuple[int, ...]]]
    ended: float
    work: list[tuple[str, int, float, float]] = field(default_factory=list)
    bytes: int = 0
    path: str = "layout"


class Recorder:
    """The journal of one wire on one rank. Without sinks it does nothing."""

    def __init__(self, rank: int, world: int, ranks_per_node: int | None) -> None:
        self.rank, self.world, self.ranks_per_node = rank, world, ranks_per_node
        self.every, self.residual_every, self.summary_every = 1, 50, 0
        self.active = False
        """Whether anybody asked for a log, on this rank or another."""
        self.tracing = 0
        """Steps that are still to be traced."""
        self._trace_from = 0.0
        self._marks: deque[tuple[str, float]] = deque()
        self._sinks: list[Sink] = []
        self._lock = threading.RLock()
        self._ended: float | None = None
        self._recent: list[journal.Step] = []

    def add(self, sink: Sink, codec: str) -> None:
        """Hand all lines from now on to one more."""
        start = journal.Start(
            journal.VERSION,
            time.time(),
            self.rank,
            self.world,
            codec,
            __version__,
            str(torch.__version__),
            platform.node(),
            self.ranks_per_node,
        )
        sink(start)
        with self._lock:
            self._sinks.append(sink)

    # -- what happens --------------------------------------------------------------------------------------------------

    def layout(self, step: int, codec: str, layout: Layout, plan: Plan | None) -> None:
        if not self._sinks:
            return
        groups = []
        for group, found in zip(layout.groups, layout.codecs(), strict=True):
            estimate = found.at(step).estimate(group.info(), self.world)
            groups.append(
                journal.GroupLine(
                    group.name,
                    group.codec,
                    group.chain,
                    group.elements,
                    tuple(slot.name for slot in group.slots if slot.role != "elsewhere"),
                    group.dtype,
                    float(estimate.gathered + estimate.summed),
                )
            )
        self._write(journal.Layout(step, time.time(), codec, tuple(groups), plan))

    def event(self, step: int, what: str, text: str) -> None:
        if self._sinks:
            self._write(journal.Event(step, time.time(), what, text))

    def note(self, step: int, values: dict[str, float]) -> None:
        if self._sinks:
            self._write(journal.Note(step, time.time(), {name: float(value) for name, value in values.items()}))

    def trace(self, steps: int) -> None:
        """Write down everything of the next steps."""
        self._marks.clear()
        self._trace_from = perf_counter()
        self.tracing = steps

    def mark(self, name: str) -> None:
        """The training thread begins something."""
        if self.tracing:
            self._marks.append((name, perf_counter()))

    def step(self, number: int, done: Done, member: Member | None = None) -> None:
        """An exchange is over. `member` has its numbers, where it followed the layout."""
        before, self._ended = self._ended, done.ended
        if not self.active:
            return
        if number % self.every == 0 or (member is not None and member.last_off):
            line = self._line(number, before, done, member)
            self._write(line)
            if line.skipped:
                self.event(number, "skipped", "a gradient was not finite: the step is void on all ranks")
            self._summarise(line)
        # Not the step that is just being written down while the training thread asks for the next ones.
        begun = done.arrivals[0][0] if done.arrivals else done.ended
        if self.tracing and before is not None and begun >= self._trace_from:
            marks = []
            while self._marks and self._marks[0][1] < done.ended:  # the training thread adds those of the next step
                marks.append(self._marks.popleft())
            self._write(_trace(number, before, done, marks))
            self.tracing -= 1

    def alone(self, number: int, seconds: float) -> None:
        """A step of DDP without a hook: nobody knows more than how long it took."""
        if self.active and number % self.every == 0:
            self._write(journal.Step(number, round(time.time(), 3), _short(seconds), path="ddp"))

    def _line(self, number: int, before: float | None, done: Done, member: Member | None) -> journal.Step:
        seconds = done.ended - before if before is not None else None
        exposed = max(0.0, done.ended - max((at for at, _, _ in done.arrivals), default=done.ended))
        by_group = {timing.group: _spent(timing.phases) for timing in done.timings}
        encode, decode = (sum(spent[at] for spent in by_group.values()) for at in (0, 2))
        groups: tuple[journal.GroupStep, ...] = ()
        density = target = norm = None
        size, skipped = done.bytes, False
        if member is not None:
            groups = tuple(_of_group(by_group.get(at), run) for at, run in enumerate(member.groups))
            size, skipped = sum(group.bytes for group in groups), member.last_off
            counted = [(g.sent, run.info.elements) for g, run in zip(groups, member.groups, strict=True) if g.sent]
            density = _ratio(sum(sent for sent, _ in counted), sum(elements for _, elements in counted))
            target = _target(member)
            if self.residual_every and number % self.residual_every == 0 and not skipped:
                norm = member.residuals.norm()
        wire = _covered(
            (start, stop) for timing in done.timings for name, start, stop in timing.phases if name not in WORK
        )
        return journal.Step(
            number,
            round(time.time(), 3),
            None if seconds is None else _short(seconds),
            None if seconds is None else _short(max(0.0, seconds - exposed)),
            _short(exposed),
            _short(encode),
            _short(wire),
            _short(decode),
            size,
            density,
            target,
            norm,
            skipped,
            done.path,
            groups,
        )

    def _summarise(self, line: journal.Step) -> None:
        if not self.summary_every or self.rank:
            return
        self._recent.append(line)
        if len(self._recent) * self.every < self.summary_every:
            return
        recent, self._recent = self._recent, []
        parts = []
        timed = [step for step in recent if step.seconds is not None]  # the first one has no step before it
        for name in ("seconds", "compute", "exposed", "encode", "wire", "decode"):
            known = [value for step in timed if (value := getattr(step, name)) is not None]
            parts.append(f"{1000 * sum(known) / len(known):.1f}" if known else "-")
        size = sum(step.bytes or 0 for step in recent) / len(recent)
        density = next((step.density for step in reversed(recent) if step.density is not None), None)
        norm = next((step.residual_norm for step in reversed(recent) if step.residual_norm is not None), None)
        skipped = sum(step.skipped for step in recent)
        logger.info(
            "step %d: %s ms a step = %s computing + %s waiting (encode %s, wire %s, decode %s); %.3f MB a step%s%s%s",
            line.step, *parts, size / 1e6,
            "" if density is None else f", density {density:.4g}",
            "" if norm is None else f", residual norm {norm:.4g}",
            f", {skipped} skipped" if skipped else "",
        )  # fmt: skip

    def closed(self, step: int, error: BaseException) -> None:
        self.event(step, "closed", str(error))

    def _write(self, line: journal.Line) -> None:
        """To all sinks. One that fails is dropped: a full disk must not end a training job."""
        with self._lock:
            for sink in list(self._sinks):
                try:
                    sink(line)
                except Exception as error:
                    self._sinks.remove(sink)
                    logger.warning("a log is given up after %s: %s", type(error).__name__, error)


# -- sinks -------------------------------------------------------------------------------------------------------------


class JsonLines:
    """A file that grows by one line at a time, each written at once: nothing is lost with a job that is killed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def __call__(self, line: journal.Line) -> None:
        self._file.write(journal.encode(line) + b"\n")


def to_board(writer: Any) -> Sink:
    """Scalars for an object with `add_scalar`, as TensorBoard's SummaryWriter has it."""
    names = ("seconds", "compute", "exposed", "encode", "wire", "decode", "bytes", "density", "residual_norm")

    def write(line: journal.Line) -> None:
        if isinstance(line, journal.Step):
            for name in names:
                value = getattr(line, name)
                if value is not None:
                    writer.add_scalar(f"thinwire/{name}", value, line.step)
        elif isinstance(line, journal.Event) and hasattr(writer, "add_text"):
            writer.add_text(f"thinwire/{line.what}", line.text, line.step)

    return write


def to_callable(function: Callable[[dict[str, Any]], object]) -> Sink:
    """Each line as a dict, as it would stand in the file."""

    def write(line: journal.Line) -> None:
        function(msgspec.to_builtins(line))

    return write


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _short(seconds: float) -> float:
    """To a tenth of a microsecond: lines are half as long."""
    return round(seconds, 7)


def _exact(seconds: float) -> float:
    """To a nanosecond: the spans of a trace must neither overlap nor leave holes."""
    return round(seconds, 9)


def _spent(phases: Sequence[tuple[str, float, float]]) -> tuple[float, float, float]:
    """Seconds of encode, of collectives, and of decode."""
    encode = wire = decode = 0.0
    for name, start, stop in phases:
        if name == "encode":
            encode += stop - start
        elif name == "decode":
            decode += stop - start
        elif name not in WORK:
            wire += stop - start
    return encode, wire, decode


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of them was under way."""
    total, until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _target(member: Member) -> float | None:
    """The density that the codecs were asked for in the step that is over, over all groups that have one."""
    shares: dict[str, float | None] = {}
    asked = whole = 0.0
    for run in member.groups:
        text = run.group.codec
        if text not in shares:
            density = getattr(run.codec.at(member.step - 1, member.settings), "density", None)
            shares[text] = float(density) if isinstance(density, int | float) else None
        share = shares[text]
        if share is not None:
            asked += share * run.info.elements
            whole += run.info.elements
    return _ratio(asked, whole)


def _of_group(spent: tuple[float, float, float] | None, run: GroupRun) -> journal.GroupStep:
    if spent is None:
        return journal.GroupStep(0.0, 0.0, 0.0, 0, 0)
    return journal.GroupStep(_short(spent[0]), _short(spent[1]), _short(spent[2]), run.bytes, run.entries)


def _trace(number: int, began: float, done: Done, marks: Sequence[tuple[str, float]]) -> journal.Trace:
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


def make_sink(target: Any, rank: int) -> Sink | None:
    """What `log_to` was given, as something that takes lines; None where another rank writes."""
    if isinstance(target, str | Path):
        path = Path(target)
        if path.suffix == ".jsonl" and not path.is_dir():
            return JsonLines(path) if rank == 0 else None
        return JsonLines(path / f"rank-{rank}.jsonl")
    if hasattr(target, "add_scalar"):
        return to_board(target) if rank == 0 else None
    if callable(target):
        return to_callable(target)
    raise TypeError(
        f"log_to takes a path, an object with add_scalar such as a SummaryWriter, or a function, not {type(target).__name__}"
    )
