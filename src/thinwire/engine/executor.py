"""Executor of the exchanges of one layout: in a daemon thread per wire, or in the caller's when all ranks live in this process.

After its first exception an executor is closed: it issues no further collective, because a peer that expects another size
is aborted by gloo instead of raising, and everything that still waits fails with the same error.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import msgspec
from torch import Tensor

from ..comm.world import TorchWorld, World
from ..errors import AttachError, ExchangeError, WireClosed
from .consensus import agree
from .layout import Layout
from .lifecycle import Lifecycle
from .packing import Bucket, Packer
from .rank_state import RankState, Safety
from .recorder import Progress, Recorder, Statistics
from .scheduler import ReadyGroup, Scheduler, Timing
from .trace import Done as DoneStep

SLICE_SECONDS = 0.2

Done = Callable[[BaseException | None], None]


@dataclass(slots=True, eq=False)
class _Arrival:
    """A bucket, one buffer for each rank_state, and what to call when it holds its results or has failed."""

    names: tuple[str, ...]
    buffers: Sequence[Tensor]
    unused: Sequence[Sequence[str]]
    done: Done
    buckets: list[Bucket] = field(default_factory=list)
    at: float = field(default_factory=perf_counter)


class Executor:
    """All exchanges of one layout on one world."""

    def __init__(
        self,
        world: World,
        layout: Layout,
        *,
        safety: Safety = Safety(),
        direct: bool = False,
        recorder: Recorder | None = None,
        progress: Progress | None = None,
        lifecycle: Lifecycle | None = None,
    ) -> None:
        """`recorder` is told of every step, which is counted on from `progress`; `lifecycle` of what ends it.

        direct  whether the exchange is nothing but the all-reduce of the gradients, which a hook may issue by itself
        """
        self.world, self.layout, self.direct = world, layout, direct
        self._recorder, self._progress = recorder, progress if progress is not None else Progress()
        self._lifecycle = lifecycle if lifecycle is not None else Lifecycle()
        self._step: DoneStep | None = None
        self._arrivals: list[tuple[float, Sequence[str], tuple[int, ...]]] = []
        self._work: list[tuple[str, int, float, float]] = []
        self._handed_back = 0.0
        self.rank_states = [
            RankState(layout, rank, world.size, ranks_per_node=world.ranks_per_node, safety=safety)
            for rank in world.local_ranks
        ]
        self.statistics = Statistics(layout)
        self.error: BaseException | None = None
        self._packers = [Packer(layout) for _ in world.local_ranks]
        self._inbox: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._scheduler = Scheduler(
            world,
            self.rank_states,
            wake=_waker(weakref.ref(self)),
            on_group=self._hand_back,
            on_step=self._count,
            tracks_unused=safety.tracks_unused,
        )
        self._lock = threading.Lock()
        self._open: list[_Arrival] = []
        self._thread: ExchangeThread | None = None
        self._stopped = threading.Event()
        self._compared = not isinstance(world, TorchWorld)

    def run_in(self, thread: ExchangeThread) -> None:
        """From now on exchanges run in this thread."""
        self._thread = thread
        thread.give(self)

    @property
    def threaded(self) -> bool:
        return self._thread is not None

    @property
    def busy(self) -> bool:
        """Whether a caller waits for a result."""
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
        if self._thread is None:
            self.work()

    def _compare(self) -> None:
        """Before the first exchange: all ranks must be at the same step, with the same layout.

        Loading a state is local, so no rank has noticed another's. Shared random choices would then differ silently, and
        messages of different lengths would end the peers.
        """
        self._compared, rank_state = True, self.rank_states[0]
        assert isinstance(self.world, TorchWorld)
        # In a chain, ranks that never meet may have different capacities.
        drivers = [run.driver for run in rank_state.groups]
        facts = {
            "step": rank_state.step,
            "sizes of messages": [driver.capacity.value if driver and driver.capacity else 0 for driver in drivers],
            "layout": hashlib.sha256(msgspec.json.encode(self.layout)).hexdigest()[:16],
        }
        try:
            agree(self.world.groups[0], facts)
        except AttachError as error:
            where = f"before the first exchange at step {rank_state.step}, rank {rank_state.rank}"
            advice = "load states that were saved after the same step on all ranks"
            failure = ExchangeError(f"{where}: {error}; {advice}")
            self.close(failure)
            raise failure from None
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
                        self._pack(arrival)
                    arrival = self._inbox.get_nowait()
            while self.error is None and self._scheduler.advance():
                if self._step is not None:
                    self._tell()
        except BaseException as error:
            self.close(error)
            if self._thread is None:
                raise

    def stop(self) -> None:
        """Leave the thread and the world to another executor. What still waits is left to the end of the process."""
        with self._lock:
            self.error = self.error or WireClosed("it was stopped")
        self._inbox.put(None)
        if self._thread is not None and self._thread.thread is not threading.current_thread():
            self._stopped.wait(timeout=5.0)

    def close(self, error: BaseException | None = None) -> None:
        """Stop for good; everything that waits fails with `error`. May be called from any thread, and twice."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error if error is not None else WireClosed("it was closed")
            waiting, self._open = self._open, []
        self._lifecycle.close(self.error)
        for arrival in waiting:
            arrival.done(self.error)
        self._inbox.put(None)
        self.world.close()  # last: it may have to wait for a collective that a peer never joins
        if self._thread is not None:
            self._thread.close()
        if self._recorder is not None:
            self._recorder.event(self.step_number, "closed", str(self.error))

    @property
    def step_number(self) -> int:
        """The number of the last step, of all since training began."""
        return self._progress.dense_steps + self.rank_states[0].step

    def interrupt(self) -> None:
        """Ctrl-C while a caller waits: Python delivers it only after the wait, so the wait must fail."""
        if self.busy:
            self.close(ExchangeError(f"interrupted while waiting: {self._scheduler.under_way()}"))

    def _pack(self, arrival: _Arrival) -> None:
        begun = perf_counter()
        complete: list[int] = []
        for packer, buffer, unused in zip(self._packers, arrival.buffers, arrival.unused, strict=True):
            bucket, complete = packer.arrive(arrival.names, buffer, unused)
            arrival.buckets.append(bucket)
        self._arrivals.append((arrival.at, arrival.names, tuple(complete)))
        self._work.append(("take in", complete[0] if complete else -1, begun, perf_counter()))
        for index in complete:
            self._scheduler.feed(
                index,
                ReadyGroup(
                    [packer.gradient(index) for packer in self._packers],
                    [packer.riders[index] for packer in self._packers],
                    [packer.unused.get(index, ()) for packer in self._packers],
                ),
            )
        if not [bucket for bucket in arrival.buckets if bucket.open]:
            self._finished(arrival)

    def _hand_back(self, index: int) -> None:
        begun = perf_counter()
        for packer in self._packers:
            packer.finish(index)
        self._handed_back = perf_counter()
        self._work.append(("hand back", index, begun, self._handed_back))
        for arrival in [arrival for arrival in self._open if arrival.buckets]:
            if not [bucket for bucket in arrival.buckets if bucket.open]:
                self._finished(arrival)

    def _finished(self, arrival: _Arrival) -> None:
        with self._lock:
            if arrival not in self._open:
                return
            self._open.remove(arrival)
        arrival.done(None)

    def _count(self, timings: list[Timing]) -> None:
        self.statistics.add(self.rank_states[0], timings)
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
            self._recorder.step(self.step_number, done, self.rank_states[0])


def _waker(executor: weakref.ref[Executor]) -> Callable[[], None]:
    def wake() -> None:
        target = executor()
        if target is not None:
            target._inbox.put(None)

    return wake


class ExchangeThread:
    """The exchange thread of a wire. One executor follows another in it: every new thread costs memory that stays."""

    def __init__(self) -> None:
        self._executors: queue.SimpleQueue[weakref.ref[Executor] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_work, args=(self._executors,), name="thinwire", daemon=True)
        self.thread.start()

    def give(self, executor: Executor) -> None:
        """To an executor, when the one before has stopped."""
        self._executors.put(weakref.ref(executor))

    def close(self) -> None:
        """End the thread after the executor that works there, which has been stopped."""
        self._executors.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join(timeout=5.0)


def _work(executors: queue.SimpleQueue[weakref.ref[Executor] | None]) -> None:
    for reference in iter(executors.get, None):
        _serve(reference)


def _serve(reference: weakref.ref[Executor]) -> None:
    """It lets go of the executor after every slice, so that a forgotten wire ends by itself."""
    while True:
        executor = reference()
        if executor is None:
            return
        if executor.error is not None:
            executor._stopped.set()
            return
        executor.work(SLICE_SECONDS)
        del executor
