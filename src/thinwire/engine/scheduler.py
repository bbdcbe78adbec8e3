"""Scheduler of one step: takes each group through its rounds, and encodes one while another is on the wire.

On every round collectives are issued in layout order, whatever finishes first; that is all the order that ranks need to
agree on, because each round has its own process group.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from torch import Tensor
from torch.autograd import profiler

from ..comm.collectives import Collective, Pending
from ..comm.world import World
from ..errors import ExchangeError
from .rank_state import RankState

Steps = Generator[Collective, None, None]


@dataclass
class ReadyGroup:
    """The gradients of one group, ready to go: one for each rank_state of the world in this process."""

    gradients: Sequence[Tensor]
    riders: Sequence[Tensor]
    unused: Sequence[Sequence[str]]


WORK = ("encode", "decode", "commit")
"""Phases in which the exchange thread works; the others are collectives."""


@dataclass
class Timing:
    """When one group passed through its phases, in seconds of `time.perf_counter`. Group -1: what ends a step."""

    group: int
    arrived: float
    phases: list[tuple[str, float, float]] = field(default_factory=list)


@dataclass
class _Task:
    """A group under way, or the epilogue of a step (index -1)."""

    index: int
    name: str
    steps: list[Steps]
    timing: Timing
    round: int = 0
    parts: list[Collective] = field(default_factory=list)
    pending: Pending | None = None
    issued: float = 0.0
    landed: list[float] = field(default_factory=list)


class Scheduler:
    """The step in progress. `advance` does one piece of work; it never waits."""

    def __init__(
        self,
        world: World,
        rank_states: Sequence[RankState],
        *,
        wake: Callable[[], None],
        on_group: Callable[[int], None],
        on_step: Callable[[list[Timing]], None],
        tracks_unused: bool = False,
    ) -> None:
        self.world, self.rank_states = world, rank_states
        self._wake, self._on_group, self._on_step = wake, on_group, on_step
        self._tracks_unused = tracks_unused
        self._count = len(rank_states[0].groups)
        self._last_round = [max(0, run.way.rounds - 1) for run in rank_states[0].groups]
        self._waiting: dict[int, tuple[ReadyGroup, float]] = {}
        self._next = 0
        self._done = 0
        self._last = 0
        self._rounds: list[deque[_Task]] = [deque() for _ in range(max(self._last_round, default=0) + 1)]
        self._timings: list[Timing] = []

    def feed(self, index: int, feed: ReadyGroup) -> None:
        if index in self._waiting or index < self._next:
            raise ExchangeError(f"group {index} came twice in one step")
        self._waiting[index] = (feed, perf_counter())

    @property
    def idle(self) -> bool:
        return self._next == 0 and not self._waiting

    def advance(self) -> bool:
        """Do the most urgent piece of work there is; False when all that is left is to wait.

        First what puts a further round on the wire, then the next group, last what only decodes.
        """
        ready = [queue[0] for queue in self._rounds if queue and queue[0].pending and queue[0].pending.done()]
        for task in ready:
            if task.index >= 0 and task.round < self._last_round[task.index]:
                self._resume(task)
                return True
        if self._next in self._waiting:
            index = self._next
            feed, arrived = self._waiting.pop(index)
            self._next += 1  # before: a chain that needs no collective may end the step at once
            self._begin(index, feed, arrived)
            return True
        if ready:
            self._resume(ready[0])
            return True
        return False

    def _begin(self, index: int, feed: ReadyGroup, arrived: float) -> None:
        name = self.rank_states[0].groups[index].group.name
        steps = [
            rank_state.run(index, gradient, riders, unused)
            for rank_state, gradient, riders, unused in zip(
                self.rank_states, feed.gradients, feed.riders, feed.unused, strict=True
            )
        ]
        self._work(_Task(index, name, steps, Timing(index, arrived)), "encode")

    def _resume(self, task: _Task) -> None:
        self._rounds[task.round].popleft()
        now = perf_counter()
        task.timing.phases.append((task.parts[0].name, task.issued, max(task.landed, default=now)))
        assert task.pending is not None
        try:
            task.pending.check()
        except RuntimeError as error:
            raise ExchangeError(f"{self.place(task)}: {error}") from error
        task.round += 1
        self._work(task, "decode")

    def _work(self, task: _Task, phase: str) -> None:
        """Let the codec work until its next collective, and issue that; or until its end."""
        begun = perf_counter()
        parts: list[Collective] = []
        try:
            with self._named(phase, task):
                for steps in task.steps:
                    part = next(steps, None)
                    if part is not None:
                        parts.append(part)
        except Exception as error:
            raise ExchangeError(f"{self.place(task)}, {phase}: {type(error).__name__}: {error}") from error
        task.timing.phases.append((phase, begun, perf_counter()))
        if not parts:
            self._end(task)
            return
        if len(parts) != len(task.steps):
            raise ExchangeError(f"{self.place(task)}: some ranks end where others ask for a collective")
        if task.round >= len(self._rounds):
            raise ExchangeError(f"{self.place(task)}: its codec declares fewer rounds than it uses")
        task.parts, task.issued, task.landed = parts, perf_counter(), []
        task.pending = self.world.issue(task.round, parts, _stamper(task.landed, self._wake))
        self._rounds[task.round].append(task)

    @staticmethod
    def _named(phase: str, task: _Task) -> contextlib.AbstractContextManager[object]:
        """A name for torch's profiler, while there is one: it costs 30 microseconds even without one."""
        if profiler._is_profiler_enabled:
            return profiler.record_function(f"thinwire::{phase}/{task.name}")
        return contextlib.nullcontext()

    def _end(self, task: _Task) -> None:
        self._timings.append(task.timing)
        if task.index >= 0:
            self._done += 1
            if self._done < self._count:
                self._on_group(task.index)
                return
            self._last = task.index
            if self._tracks_unused:
                steps = [rank_state.epilogue() for rank_state in self.rank_states]
                self._work(_Task(-1, "used parameters", steps, Timing(-1, perf_counter())), "encode")
                return
        begun = perf_counter()
        for rank_state in self.rank_states:
            rank_state.finish()
        self._timings.append(Timing(-1, begun, [("commit", begun, perf_counter())]))
        timings, self._timings = self._timings, []
        self._next = self._done = 0
        self._on_step(timings)
        # Only now: when the last bucket is handed back, residuals and thresholds are those of the finished step.
        self._on_group(self._last)

    def place(self, task: _Task) -> str:
        """Where an error happened, for people."""
        step, ranks = self.rank_states[0].step, ", ".join(str(rank_state.rank) for rank_state in self.rank_states)
        collective = f", {task.parts[0].name} of round {task.round + 1}" if task.parts else ""
        return f"{task.name}, step {step}{collective}, rank {ranks}"

    def under_way(self) -> str:
        """The oldest thing that is not done, for errors about waiting."""
        for queue in self._rounds:
            if queue:
                return self.place(queue[0])
        return f"step {self.rank_states[0].step}, before any collective"


def _stamper(landed: list[float], wake: Callable[[], None]) -> Callable[[], None]:
    """Notes when a collective ended: the thread that goes on with it may be busy then. Holds nothing but the list."""

    def stamp() -> None:
        landed.append(perf_counter())
        wake()

    return stamp
