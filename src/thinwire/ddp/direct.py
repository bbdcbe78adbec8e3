"""Dense steps of DDP: plain all-reduces, issued right from the hook.

Usually one for each bucket, in place. But gloo adds three ranks and more in an order that depends on where in a buffer an
element lies, and the buckets of a job that begins, or begins again, are not those of one that goes on. So a partition can
say what one all-reduce takes, whatever the buckets are: then the bits are the same as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from ..comm.world import TorchWorld
from ..engine.recorder import Recorder
from ..engine.scheduler import Timing
from ..engine.trace import Done
from ..errors import ExchangeError


class Flight:
    """A bucket under way. DDP waits for this future and not for gloo's own, which an abort does not end."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.future = Future[Any]()
        self.missing: set[str] = set()
        self._lock = threading.Lock()

    def end(self, value: Tensor | BaseException) -> None:
        with self._lock:
            if not self.future.done():
                self.future.set_result(value)


class Log:
    """What the all-reduces of one step took; the recorder hears of it when all of them have ended."""

    def __init__(self, number: int, recorder: Recorder) -> None:
        self._number, self._recorder = number, recorder
        self._done = Done([], [], 0.0, path="dense")
        self._open, self._lock = 1, threading.Lock()  # the one is for buckets that are still to come

    def arrive(self, names: Sequence[str]) -> None:
        self._done.arrivals.append((perf_counter(), names, (len(self._done.arrivals),)))

    def issue(self, tensor: Tensor) -> Timing:
        self._done.bytes += tensor.nbytes
        with self._lock:
            self._open += 1
        now = perf_counter()
        return Timing(len(self._done.arrivals) - 1, now, [("all-reduce (average)", now, now)])

    def land(self, timing: Timing) -> None:
        """An all-reduce has ended. Called before its bucket is handed back, so that no wait of this thread counts."""
        name, start, _ = timing.phases[0]
        timing.phases[0] = (name, start, perf_counter())
        with self._lock:
            self._done.timings.append(timing)
            self._done.ended = max(self._done.ended, timing.phases[0][2])

    def close(self) -> None:
        """One all-reduce less is open, or the last bucket has come."""
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last:
            self._recorder.step(self._number, self._done)


class DensePath:
    """The all-reduces of one wire. `inspect` is given each mean, `failed` each error."""

    def __init__(
        self,
        world: TorchWorld,
        inspect: Callable[[Tensor, int], None],
        failed: Callable[[ExchangeError], None],
        recorder: Recorder,
    ) -> None:
        self.world, self._inspect, self._failed = world, inspect, failed
        self._recorder, self._log = recorder, Log(0, recorder)
        self._flying: list[Flight] = []
        self._error: ExchangeError | None = None
        self._pieces: dict[str, Tensor] = {}
        self._issued: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> bool:
        """Whether backward waits for a bucket."""
        with self._lock:
            return any(not flight.future.done() for flight in self._flying)

    def begin(self, number: int) -> None:
        """A step begins, which is the job's with this number."""
        self._log = Log(number, self._recorder)
        self._pieces, self._issued = {}, set()
        with self._lock:
            self._flying = []

    def fail(self, error: ExchangeError) -> None:
        """For good: what is under way fails, and what the thread that trains is just about to hand over."""
        with self._lock:
            self._error, flights = error, self._flying
        for flight in flights:
            flight.end(error)

    def _fly(self, buffer: Tensor) -> Flight:
        flight = Flight(buffer)
        with self._lock:
            self._flying = [*self._flying, flight]
            error = self._error
        if error is not None:
            flight.end(error)
        return flight

    def bucket(
        self,
        names: tuple[str, ...],
        bucket: GradBucket,
        partition: Sequence[tuple[str, ...]] | None,
        place: str,
        step: int,
    ) -> Future[Any]:
        """Replace a bucket, whose tensors have these names, by its mean."""
        buffer = bucket.buffer()
        flight = self._fly(buffer)
        self._log.arrive(names)
        if partition is None or names in partition:
            self._reduce(buffer, lambda: flight.end(buffer), place, step)
            if bucket.is_last():
                self._log.close()
            return flight.future
        flight.missing = set(names)
        pieces = self._pieces
        pieces |= zip(names, bucket.gradients(), strict=True)
        # All ranks have the same buckets in the same order, so they issue the same groups in the same order.
        for group in partition:
            if group not in self._issued and pieces.keys() >= set(group):
                self._issued.add(group)
                self._reduce_group(group, [pieces[name] for name in group], place, step)
        if bucket.is_last():
            self._log.close()
        return flight.future

    def _reduce_group(self, group: tuple[str, ...], pieces: Sequence[Tensor], place: str, step: int) -> None:
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        flights = [flight for flight in self._flying if flight.missing.intersection(group)]

        def hand_back() -> None:
            for piece, mean in zip(pieces, torch.split(flat, [piece.numel() for piece in pieces]), strict=True):
                piece.copy_(mean.view(piece.shape))
            with self._lock:
                for flight in flights:
                    flight.missing.difference_update(group)
            for flight in flights:
                if not flight.missing:
                    flight.end(flight.buffer)

        self._reduce(flat, hand_back, place, step)

    def _reduce(self, tensor: Tensor, done: Callable[[], None], place: str, step: int) -> None:
        self.world.check()
        # Divided before, as DDP does it: the same bits, and while the bucket is still in the cache. AVG divides afterwards.
        tensor.mul_(1.0 / self.world.size)
        log, timing = self._log, self._log.issue(tensor)
        work = dist.all_reduce(tensor, group=self.world.groups[0], async_op=True)

        def arrive(future: Future[list[Tensor]]) -> None:
            try:
                future.value()
            except RuntimeError as error:
                failure = ExchangeError(f"{place}, all-reduce (average), rank {self.world.rank}: {error}")
                self._failed(failure)
                self.fail(failure)
                return
            self._inspect(tensor, step)
            log.land(timing)
            done()
            log.close()

        work.get_future().add_done_callback(arrive)
