"""Carries out exchanges: one daemon thread a wire, or in the caller's thread when all ranks live in this process.

After its first exception a runner is closed: it issues no further collective, because a peer that expects another size
is aborted by gloo instead of raising, and everything that still waits fails with the same error.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from torch import Tensor

from ..errors import ExchangeError, WireClosed
from ..schemes.world import TorchWorld, World
from .assembly import Assembly, Bucket
from .layout import Layout
from .member import Member
from .outset import compare
from .pipeline import Feed, Pipeline, Timing
from .recorder import Done as DoneStep
from .recorder import Recorder
from .stats import Statistics

SLICE_SECONDS = 0.2

Done = Callable[[BaseException | None], None]


@dataclass(slots=True, eq=False)
class _Arrival:
    """A bucket, one buffer for each member, and what to call when it holds its results or has failed."""

    names: tuple[str, ...]
    buffers: Sequence[Tensor]
    unused: Sequence[Sequence[str]]
    done: Done
    buckets: list[Bucket] = field(default_factory=list)
    at: float = field(default_factory=perf_counter)


class Runner:
    """All exchanges of one layout on one world."""

    def __init__(
        self,
        world: World,
        layout: Layout,
        *,
        protected: bool = False,
        tests_results: bool = False,
        tracks_unused: bool = False,
        saturates: bool = False,
        recorder: Recorder | None = None,
        number: Callable[[], int] = lambda: 0,
    ) -> None:
        """`recorder` is told of every step, which has the number that `number` gives after it."""
        self.world, self.layout = world, layout
        self._recorder, self._number = recorder, number
        self._step: DoneStep | None = None
        self._arrivals: list[tuple[float, Sequence[str], tuple[int, ...]]] = []
        self._work: list[tuple[str, int, float, float]] = []
        self._handed_back = 0.0
        self.members = [
            Member(
                layout,
                rank,
                world.size,
                ranks_per_node=world.ranks_per_node,
                protected=protected,
                tests_results=tests_results,
                saturates=saturates,
            )
            for rank in world.members
        ]
        self.statistics = Statistics(layout)
        self.error: BaseException | None = None
        self._assemblies = [Assembly(layout) for _ in world.members]
        self._inbox: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._pipeline = Pipeline(
            world,
            self.members,
            wake=_waker(weakref.ref(self)),
            on_group=self._hand_back,
            on_step=self._count,
            tracks_unused=tracks_unused,
        )
        self._lock = threading.Lock()
        self._open: list[_Arrival] = []
        self._seat: Seat | None = None
        self._left = threading.Event()
        self._compared = not isinstance(world, TorchWorld)

    def take(self, seat: Seat) -> None:
        """From now on exchanges run in this thread."""
        self._seat = seat
        seat.give(self)

    @property
    def threaded(self) -> bool:
        return self._seat is not None

    @property
    def busy(self) -> bool:
        """Whether somebody waits for a result."""
        return bool(self._open)

    def submit(
        self, names: tuple[str, ...], buffers: Sequence[Tensor], done: Done, unused: Sequence[Sequence[str]] = ()
    ) -> None:
        """A bucket is ready: exchange it. `done` is called once, with None or an error, when the buffers hold the means."""
        arrival = _Arrival(names, buffers, unused or [()] * len(buffers), done)
        if not self._compared and self.error is None:
            self._compare()
        with self._lock:
            if self.error is not None:
                raise WireClosed(f"this wire is closed: {self.error}") from self.error
            self._open.append(arrival)
        self._inbox.put(arrival)
        if self._seat is None:
            self.work()

    def _compare(self) -> None:
        self._compared = True
        assert isinstance(self.world, TorchWorld)
        try:
            compare(self.world, self.layout, self.members[0])
        except BaseException as error:
            self.close(error)
            raise

    def work(self, patience: float = 0.0) -> None:
        """Wait up to `patience` seconds for an event, then do all that can be done without waiting."""
        try:
            with contextlib.suppress(queue.Empty):
                arrival = self._inbox.get(timeout=patience) if patience else self._inbox.get_nowait()
                while True:
                    if arrival is not None:
                        self._take_in(arrival)
                    arrival = self._inbox.get_nowait()
            while self.error is None and self._pipeline.advance():
                if self._step is not None:
                    self._tell()
        except BaseException as error:
            self.close(error)
            if self._seat is None:
                raise

    def stop(self) -> None:
        """Leave the thread and the world to another runner. What still waits is left to the end of the process."""
        with self._lock:
            self.error = self.error or WireClosed("it was stopped")
        self._inbox.put(None)
        if self._seat is not None and self._seat.thread is not threading.current_thread():
            self._left.wait(timeout=5.0)

    def close(self, error: BaseException | None = None) -> None:
        """Stop for good; everything that waits fails with `error`. May be called from any thread, and twice."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error if error is not None else WireClosed("it was closed")
            waiting, self._open = self._open, []
        for arrival in waiting:
            arrival.done(self.error)
        self._inbox.put(None)
        self.world.close()  # last: it may have to wait for a collective that a peer never joins
        if self._seat is not None:
            self._seat.close()
        if self._recorder is not None:
            self._recorder.closed(self._number(), self.error)

    def interrupt(self) -> None:
        """Ctrl-C while somebody waits: Python delivers it only after the wait, so the wait must fail."""
        if self.busy:
            self.close(ExchangeError(f"interrupted while waiting: {self._pipeline.under_way()}"))

    def _take_in(self, arrival: _Arrival) -> None:
        begun = perf_counter()
        complete: list[int] = []
        for assembly, buffer, unused in zip(self._assemblies, arrival.buffers, arrival.unused, strict=True):
            bucket, complete = assembly.arrive(arrival.names, buffer, unused)
            arrival.buckets.append(bucket)
        self._arrivals.append((arrival.at, arrival.names, tuple(complete)))
        self._work.append(("take in", complete[0] if complete else -1, begun, perf_counter()))
        for index in complete:
            self._pipeline.feed(
                index,
                Feed(
                    [assembly.gradient(index) for assembly in self._assemblies],
                    [assembly.riders[index] for assembly in self._assemblies],
                    [assembly.unused.get(index, ()) for assembly in self._assemblies],
                ),
            )
        if not any(bucket.open for bucket in arrival.buckets):
            self._finished(arrival)

    def _hand_back(self, index: int) -> None:
        begun = perf_counter()
        for assembly in self._assemblies:
            assembly.finish(index)
        self._handed_back = perf_counter()
        self._work.append(("hand back", index, begun, self._handed_back))
        for arrival in [arrival for arrival in self._open if arrival.buckets]:
            if not any(bucket.open for bucket in arrival.buckets):
                self._finished(arrival)

    def _finished(self, arrival: _Arrival) -> None:
        with self._lock:
            if arrival not in self._open:
                return
            self._open.remove(arrival)
        arrival.done(None)

    def _count(self, timings: list[Timing]) -> None:
        self.statistics.add(self.members[0], timings)
        self._step = DoneStep(timings, self._arrivals, 0.0, self._work)
        self._arrivals, self._work = [], []

    def _tell(self) -> None:
        """The recorder hears of a step when its last bucket has been handed back."""
        done, self._step = self._step, None
        assert done is not None
        done.ended = self._handed_back
        done.work += self._work
        self._work = []
        if self._recorder is not None:
            self._recorder.step(self._number(), done, self.members[0])


def _waker(runner: weakref.ref[Runner]) -> Callable[[], None]:
    def wake() -> None:
        target = runner()
        if target is not None:
            target._inbox.put(None)

    return wake


class Seat:
    """The exchange thread of a wire. One runner follows another in it: every new thread costs memory that stays."""

    def __init__(self) -> None:
        self._runners: queue.SimpleQueue[weakref.ref[Runner] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_sit, args=(self._runners,), name="thinwire", daemon=True)
        self.thread.start()

    def give(self, runner: Runner) -> None:
        """To a runner, when the one before has stopped."""
        self._runners.put(weakref.ref(runner))

    def close(self) -> None:
        """End the thread after the runner that sits there, which has been stopped."""
        self._runners.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join(timeout=5.0)


def _sit(runners: queue.SimpleQueue[weakref.ref[Runner] | None]) -> None:
    for reference in iter(runners.get, None):
        _serve(reference)


def _serve(reference: weakref.ref[Runner]) -> None:
    """It lets go of the runner after every slice, so that a forgotten wire ends by itself."""
    while True:
        runner = reference()
        if runner is None:
            return
        if runner.error is not None:
            runner._left.set()
            return
        runner.work(SLICE_SECONDS)
        del runner


def explain(error: BaseException) -> str:
    """An error with its traceback as text: DDP hands only texts from the exchange thread to backward."""
    return "".join(traceback.format_exception(error)).rstrip()
