"""Means of a few tensors, all-reduced from the caller's thread: the shortest way to the wire.

`Exchange` hands tensors to a thread, which a codec with several rounds needs. Plain sums do not: issued from the caller's
thread, a sum of 40 KB costs a core half of the time.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from time import perf_counter

import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Collective, Pending
from ..comm.world import LocalWorld
from ..errors import ExchangeError
from .exchange import Exchange
from .executor import SLICE_SECONDS
from .scheduler import Timing
from .trace import Done


class DirectReducer(Exchange):
    """Replaces named tensors by their means over ranks. Every rank must `begin` them in the same order, whichever it is.

    The tensor `apart` has its own connections: it does not wait until those that were begun before it have arrived.
    """

    def __init__(
        self,
        named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        process_group: dist.ProcessGroup | LocalWorld | None = None,
        *,
        apart: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__(named_tensors, "dense", process_group, group_bytes=0, timeout=timeout)
        self._apart = apart
        if apart is not None:
            self.world.prepare([(1, "flat")])
        self._woken = threading.Event()
        self._flying: dict[str, tuple[Pending, Collective, float]] = {}

    def begin(self, name: str, tensors: Sequence[Tensor]) -> None:
        self.session.check_open()
        parts = [Collective("average", tensor.detach().view(-1)) for tensor in tensors]
        try:
            pending = self.world.issue(int(name == self._apart), parts, self._woken.set)
        except RuntimeError as error:
            raise self._failed(name, parts[0], error) from error
        self._flying[name] = (pending, parts[0], perf_counter())

    def there(self, name: str) -> bool:
        """Whether one tensor that was handed over holds its mean; never waits."""
        arrived = self._flying[name][0].done()
        if arrived:
            self.wait(name)
        return arrived

    def wait(self, name: str) -> None:
        """Wait until one tensor that was handed over holds its mean."""
        pending, part, _ = self._flying[name]
        try:
            while not pending.done():
                self._woken.wait(SLICE_SECONDS)
                self._woken.clear()
            pending.check()
        except RuntimeError as error:
            raise self._failed(name, part, error) from error
        except BaseException:
            self.executor.close(ExchangeError("interrupted"))
            raise

    def end(self) -> None:
        if len(self._flying) != len(self._names):
            raise ExchangeError(f"{len(self._flying)} of {len(self._names)} tensors were handed over")
        rank_state, timings = self.executor.rank_states[0], []
        for index, name in enumerate(self._names):
            self.wait(name)
            _, part, issued = self._flying[name]
            rank_state.groups[index].way.bytes = part.bytes
            rank_state.groups[index].way.traffic = {"flat": part.traffic(self.world.size)}
            timings.append(Timing(index, issued, [(part.name, issued, perf_counter())]))
        self._flying.clear()
        for each in self.executor.rank_states:
            each.finish()
        self.executor.statistics.add(rank_state, timings)
        done = Done(timings, [(timing.arrived, (), (timing.group,)) for timing in timings], perf_counter())
        self.session.recorder.step(self.steps, done, rank_state)

    def _failed(self, name: str, part: Collective, error: RuntimeError) -> ExchangeError:
        """Nothing more is sent after an error."""
        rank_state = self.executor.rank_states[0]
        failure = ExchangeError(f"{name}, step {rank_state.step}, {part.name}, rank {rank_state.rank}: {error}")
        self.executor.close(failure)
        return failure
