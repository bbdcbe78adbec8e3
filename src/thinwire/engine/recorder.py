"""Statistics and journal lines of finished steps.

Nothing is measured here. A line of the journal is put together after the last gradient of a step was handed back, in the
exchange thread.
"""

from __future__ import annotations

import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from .. import traffic
from ..comm.collectives import Scope
from ..log import logger
from ..planner.plan import Plan
from ..version import __version__
from . import fits, journal
from .layout import Layout
from .rank_state import GroupExchange, RankState
from .scheduler import WORK, Timing
from .trace import Done, trace_line

Sink = Callable[[journal.Line], None]


@dataclass
class Progress:
    """Steps that no executor has counted: those of DDP alone, and those of plain all-reduces.

    control  in how many steps one is a control step; 0 if none is agreed on
    """

    dense_steps: int = 0
    control: int = 0


@dataclass
class GroupStatistics:
    """Sums over all steps of one group. Seconds of `wire` run from the issue of a collective to its end, waits for
    slower ranks included: the rank that waits least is the one that the others wait for. `bytes` are handed over to
    collectives; `traffic` is what these put on the link of a rank, by scope."""

    name: str
    codec: str
    elements: int
    bytes: int = 0
    gathered_bytes: int = 0
    traffic: dict[Scope, float] = field(default_factory=dict)
    entries: int = 0
    encode_seconds: float = 0.0
    wire_seconds: float = 0.0
    decode_seconds: float = 0.0

    def to_dict(self, steps: int) -> dict[str, Any]:
        each = max(steps, 1)
        return {
            "name": self.name,
            "codec": self.codec,
            "elements": self.elements,
            "bytes_per_step": self.bytes / each,
            "gathered_bytes_per_step": self.gathered_bytes / each,
            "traffic_per_step": {scope: total / each for scope, total in self.traffic.items()},
            "density": self.entries / each / self.elements if self.elements and self.entries else None,
            "encode_seconds": self.encode_seconds / each,
            "wire_seconds": self.wire_seconds / each,
            "decode_seconds": self.decode_seconds / each,
        }


@dataclass
class Statistics:
    """Of one rank. `last` holds the timings of the last step, for traces."""

    layout: Layout
    steps: int = 0
    skipped: int = 0
    bytes: int = 0
    groups: list[GroupStatistics] = field(init=False)
    last: list[Timing] = field(default_factory=list)

    @property
    def link_bytes(self) -> float:
        """Bytes that the link of this rank carried; what stays inside of a node does not count."""
        return sum(_outside(group.traffic) for group in self.groups)

    def __post_init__(self) -> None:
        self.groups = [GroupStatistics(group.name, group.codec, group.elements) for group in self.layout.groups]

    def add(self, rank_state: RankState, timings: list[Timing]) -> None:
        self.steps += 1
        self.skipped = rank_state.skipped
        self.last = timings
        for timing in timings:
            if timing.group < 0:
                continue
            group, way = self.groups[timing.group], rank_state.groups[timing.group].way
            group.bytes += way.bytes
            group.gathered_bytes += way.gathered
            group.entries += way.entries
            for scope, size in way.traffic.items():
                group.traffic[scope] = group.traffic.get(scope, 0.0) + size
            self.bytes += way.bytes
            encode, wire, decode = _spent(timing.phases)
            group.encode_seconds += encode
            group.wire_seconds += wire
            group.decode_seconds += decode

    def to_dict(self) -> dict[str, Any]:
        groups = [group.to_dict(self.steps) for group in self.groups]
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            "bytes_per_step": self.bytes / max(self.steps, 1),
            "link_bytes_per_step": self.link_bytes / max(self.steps, 1),
            **{
                key: sum(group[key] for group in groups)
                for key in ("encode_seconds", "wire_seconds", "decode_seconds")
            },
            "groups": groups,
        }


class Recorder:
    """The journal of one wire on one rank. Without sinks it does nothing."""

    def __init__(self, rank: int, world: int, ranks_per_node: int | None) -> None:
        self.rank, self.world, self.ranks_per_node = rank, world, ranks_per_node
        self.every, self.residual_every, self.summary_every = 1, 50, 0
        self.active = False
        """Whether a log was requested, on this rank or another."""
        self.tracing = 0
        """Steps that are still to be traced."""
        self._trace_from = 0.0
        self._trace_hooks: deque[tuple[str, float]] = deque()
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

    def fits(self, rank_state: RankState, *, fresh: bool) -> None:
        """How magnitudes are distributed, where a codec took a look; in the last step if `fresh`."""
        if self._sinks:
            for line in fits.lines(rank_state, fresh=fresh):
                self._write(line)

    def trace(self, steps: int) -> None:
        """Write down everything of the next steps."""
        self._trace_hooks.clear()
        self._trace_from = perf_counter()
        self.tracing = steps

    def mark(self, name: str) -> None:
        """The training thread begins something."""
        if self.tracing:
            self._trace_hooks.append((name, perf_counter()))

    def step(self, number: int, done: Done, rank_state: RankState | None = None) -> None:
        """An exchange is over. `rank_state` has its numbers, where it followed the layout."""
        before, self._ended = self._ended, done.ended
        if not self.active:
            return
        if number % self.every == 0 or (rank_state is not None and rank_state.last_void):
            line = self._line(number, before, done, rank_state)
            self._write(line)
            if line.skipped:
                self.event(number, "skipped", "a gradient was not finite: the step is void on all ranks")
            self._summarise(line)
        if rank_state is not None and _was_looked_at(rank_state.groups):
            self.fits(rank_state, fresh=True)
        # Not the step that is just being written down while the training thread asks for the next ones.
        begun = done.arrivals[0][0] if done.arrivals else done.ended
        if self.tracing and before is not None and begun >= self._trace_from:
            marks = []
            while (
                self._trace_hooks and self._trace_hooks[0][1] < done.ended
            ):  # the training thread adds those of the next step
                marks.append(self._trace_hooks.popleft())
            self._write(trace_line(number, before, done, marks))
            self.tracing -= 1

    def alone(self, number: int, seconds: float) -> None:
        """A step of DDP without a hook: only its duration is known."""
        if self.active and number % self.every == 0:
            self._write(journal.Step(number, round(time.time(), 3), _short(seconds), path="ddp"))

    def _line(self, number: int, before: float | None, done: Done, rank_state: RankState | None) -> journal.Step:
        seconds = done.ended - before if before is not None else None
        exposed = max(0.0, done.ended - max([at for at, _, _ in done.arrivals], default=done.ended))
        by_group = {timing.group: _spent(timing.phases) for timing in done.timings}
        encode, decode = [sum([spent[at] for spent in by_group.values()]) for at in (0, 2)]
        groups: tuple[journal.GroupStep, ...] = ()
        density = target = norm = None
        size, skipped = done.bytes, False
        if rank_state is None:
            link_bytes = traffic.all_reduce(done.bytes, self.world)
        else:
            groups = tuple([_of_group(by_group.get(at), run) for at, run in enumerate(rank_state.groups)])
            size, skipped = sum([group.bytes for group in groups]), rank_state.last_void
            link_bytes = sum([_outside(run.way.traffic) for at, run in enumerate(rank_state.groups) if at in by_group])
            counted = [(g.sent, run.info.elements) for g, run in zip(groups, rank_state.groups, strict=True) if g.sent]
            density = _ratio(sum([sent for sent, _ in counted]), sum([elements for _, elements in counted]))
            target = _target(rank_state)
            if self.residual_every and number % self.residual_every == 0 and not skipped:
                norm = rank_state.residuals.norm()
        wire = _covered(
            [(start, stop) for timing in done.timings for name, start, stop in timing.phases if name not in WORK]
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
            link_bytes,
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
        size = sum(step.link_bytes or 0.0 for step in recent) / len(recent)
        density = next((step.density for step in reversed(recent) if step.density is not None), None)
        norm = next((step.residual_norm for step in reversed(recent) if step.residual_norm is not None), None)
        skipped = sum(step.skipped for step in recent)
        logger.info(
            "step %d: %s ms per step = %s computing + %s waiting (encode %s, wire %s, decode %s); %.3f MB on the link%s%s%s",
            line.step, *parts, size / 1e6,
            "" if density is None else f", density {density:.4g}",
            "" if norm is None else f", residual norm {norm:.4g}",
            f", {skipped} skipped" if skipped else "",
        )  # fmt: skip

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


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _short(seconds: float) -> float:
    """To a tenth of a microsecond: lines are half as long."""
    return round(seconds, 7)


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


def _was_looked_at(groups: Sequence[GroupExchange]) -> bool:
    """Whether a codec took a look at magnitudes in the last step."""
    states = [state for run in groups for state in run.way.states]
    return bool([state for state in states if getattr(state, "fitted_at", -1) == state.step])


def _outside(by_scope: Mapping[Scope, float]) -> float:
    """Of bytes by scope, those that leave the node."""
    return sum([size for scope, size in by_scope.items() if scope != "intra"])


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _target(rank_state: RankState) -> float | None:
    """The density that the codecs were asked for in the step that is over, over all groups that have one."""
    shares: dict[str, float | None] = {}
    asked = whole = 0.0
    for run in rank_state.groups:
        text = run.group.codec
        if text not in shares:
            density = getattr(run.used, "density", None)
            shares[text] = float(density) if isinstance(density, int | float) else None
        share = shares[text]
        if share is not None:
            asked += share * run.info.elements
            whole += run.info.elements
    return _ratio(asked, whole)


def _of_group(spent: tuple[float, float, float] | None, run: GroupExchange) -> journal.GroupStep:
    if spent is None:
        return journal.GroupStep(0.0, 0.0, 0.0, 0, 0)
    return journal.GroupStep(_short(spent[0]), _short(spent[1]), _short(spent[2]), run.way.bytes, run.way.entries)
