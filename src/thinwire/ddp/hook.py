"""DDP's communication hook: each bucket goes the way that the wire's phase says, and comes back as a future of its mean."""
# No postponed annotations here: DDP checks those of the hook, and texts do not pass.

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..comm.world import TorchWorld
from ..engine import interrupt
from ..engine.ddp_module import check_join, failed, parameters_of, steps_until_final, unwrap
from ..engine.lifecycle import Phase
from ..engine.session import Session
from ..errors import ExchangeError, WireClosed
from ..log import logger
from .direct import DensePath


class Observer(Protocol):
    """Sees the buckets that go by the layout: this rank's gradients, then the means of all ranks."""

    def came(self, names: tuple[str, ...], buffer: Tensor, scale: float) -> None: ...

    def went(self, names: tuple[str, ...], buffer: Tensor, scale: float) -> None: ...


class BucketHook:
    """The communication hook of one module. It exchanges nothing before `register()`."""

    def __init__(self, module: DistributedDataParallel, world: TorchWorld, session: Session) -> None:
        self.session = session
        self.observer: Observer | None = None
        self.registered = False
        self._module = weakref.ref(module)
        named = parameters_of(module)
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._used: set[int] = set()
        if session.safety.tracks_unused:
            for parameter in named.values():
                parameter.register_post_accumulate_grad_hook(_marker(self._used))  # type: ignore[no-untyped-call]
        self._coming: list[tuple[str, ...]] = []
        self._steps_until_final = self._own_steps = 0
        self._dense = DensePath(world, session.inspect_direct, self._fail, session.recorder)
        self._held: list[tuple[tuple[str, ...], Tensor, Future[Any]]] = []
        self._matches = True
        interrupt.watch(self)

    def register(self) -> None:
        """From the next backward on exchange the gradients. There is no way back: DDP keeps its hook for ever."""
        module = self._module()
        if module is None or self.registered:
            return
        self._steps_until_final = steps_until_final(module)
        module.register_comm_hook(self, _exchange_bucket)
        self.registered = True
        if self.session.lifecycle.error is None:
            self.session.lifecycle.enter(self._next_phase())

    def on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        try:
            module = self._module()
            if module is not None and module._join_config.enable:
                check_join(module)
            return self._exchange(bucket)
        except Exception as error:
            return failed(error)

    def _exchange(self, bucket: GradBucket) -> Future[Tensor]:
        session, lifecycle = self.session, self.session.lifecycle
        if lifecycle.error is not None:
            raise WireClosed(f"this wire is closed: {lifecycle.error}") from lifecycle.error
        names = self._note(bucket)
        if bucket.index() == 0 and (phase := self._next_phase()) is not lifecycle.phase:
            lifecycle.enter(phase)
        if bucket.is_last():
            session.progress.control = max(0, session.progress.control - 1)
        if lifecycle.phase is Phase.COMPRESSED:
            return self._submit(names, bucket.buffer(), bucket.index() == 0, bucket.is_last())
        if lifecycle.phase is Phase.HOLDING:
            return self._hold(bucket, names)
        future = self._reduce(bucket, names)
        if lifecycle.phase is Phase.DIRECT:
            session.progress.dense_steps += bucket.is_last()
        elif lifecycle.phase is Phase.CONTROL:
            if bucket.is_last():
                self._end_control_step()
        elif bucket.is_last():
            self._end_dense_step()
        return future

    def _next_phase(self) -> Phase:
        """Which way the step goes that begins now."""
        session, executor = self.session, self.session.executor
        if executor is None:
            return Phase.HOLDING if self._dense_enough and not session.strategy.direct else Phase.DENSE
        if executor.direct and not executor.rank_states[0].inherits:
            return Phase.DIRECT
        return Phase.CONTROL if session.progress.control == 1 else Phase.COMPRESSED

    def _note(self, bucket: GradBucket) -> tuple[str, ...]:
        """The tensors of a bucket; after the last one of a step it is known how DDP cuts them."""
        names = tuple([self._names[id(parameter)] for parameter in bucket.parameters()])
        if bucket.index() == 0:
            self._coming = []
        self._coming.append(names)
        if bucket.is_last():
            self.session.seen = self._coming
        return names

    # -- by the layout -------------------------------------------------------------------------------------------------

    def _submit(self, names: tuple[str, ...], buffer: Tensor, first: bool, last: bool) -> Future[Tensor]:
        executor, observer = self.session.executor, self.observer
        assert executor is not None
        if first and self.session.scaler is not None:
            self.session.read_scale()
        scale = executor.rank_states[0].scale
        ended = Future[Any]()
        if observer is not None:
            observer.came(names, buffer, scale)

        def done(error: BaseException | None) -> None:
            if error is None and observer is not None:
                observer.went(names, buffer, scale)
            # Never set_exception: DDP would say that it cannot cast it to a tensor.
            ended.set_result(buffer if error is None else error)

        self.session.direct.last = False
        executor.submit(names, [buffer], done, [self._unused(names)])
        if last:
            self._used.clear()
        return ended.then(_mean)

    def _unused(self, names: Sequence[str]) -> Sequence[str]:
        """Parameters of a bucket that this rank did not use since the last exchange.

        DDP knows it too, but its map is locked while it calls a hook.
        """
        if not self.session.safety.tracks_unused:
            return ()
        used = {self._names[key] for key in self._used}
        return [name for name in names if name not in used]

    def _hold(self, bucket: GradBucket, names: tuple[str, ...]) -> Future[Tensor]:
        """Keep a bucket until all of the step are there; then their layout is known, and they are exchanged by it."""
        ended = Future[Any]()
        self._held.append((names, bucket.buffer(), ended))
        if bucket.is_last():
            held, self._held = self._held, []
            try:
                self._freeze()
                for number, (names, buffer, future) in enumerate(held):
                    sent = self._submit(names, buffer, number == 0, number == len(held) - 1)
                    sent.add_done_callback(_passer(future))
            except Exception as error:  # DDP waits for all of them
                for _, _, future in held:
                    if not future.done():
                        future.set_result(error)
                raise
        return ended.then(unwrap)

    def _freeze(self) -> None:
        session = self.session
        executor = session.freeze()
        if session.world.local_ranks[0] == 0 and not session.strategy.direct:
            steps, groups = session.progress.dense_steps, len(executor.layout.groups)
            logger.info("layout frozen after %d dense steps: %d groups", steps, groups)

    # -- by plain all-reduces ------------------------------------------------------------------------------------------

    def _reduce(self, bucket: GradBucket, names: tuple[str, ...]) -> Future[Tensor]:
        """The mean by plain all-reduces: nothing can be faster through a Python hook."""
        session, direct = self.session, self.session.direct
        if bucket.index() == 0:
            direct.count += 1
            direct.last = True
            self._dense.begin(session.steps + 1)
            self._matches = True
        number, partition = direct.count, session.partition
        if session.lifecycle.phase is Phase.CONTROL:
            partition = session.control_partition or None
        self._matches &= partition is None or names in partition
        if (
            bucket.is_last()
            and self._matches
            and partition is session.partition
            and session.executor is not None
            and number > self._steps_until_final + 1
        ):
            session.partition = None  # the buckets are final, and are what it says: no need to compare any more
        place = f"bucket {bucket.index()}, dense step {number - 1}"
        return self._dense.bucket(names, bucket, partition, place, number).then(unwrap)

    def _end_dense_step(self) -> None:
        """A dense step is over; once DDP's buckets are final, freeze the layout for the steps to come."""
        session = self.session
        self._used.clear()
        session.progress.dense_steps += 1
        self._own_steps += 1
        if self._dense_enough and self._own_steps > self._steps_until_final:
            self._freeze()
        elif session.partition is None and not session.strategy.direct:
            # A job that resumes before it has a layout has the buckets of a first step: sums must not depend on it.
            session.partition = session.seen

    def _end_control_step(self) -> None:
        """The layout goes on as if it had not been; only the job counts it."""
        self._used.clear()
        self.session.progress.dense_steps += 1
        self.session.recorder.event(self.session.steps, "control", "a dense step, to compare with")

    @property
    def _dense_enough(self) -> bool:
        """Whether the job, counted from its very beginning, has had its dense steps, and buckets are final by now."""
        return self.session.progress.dense_steps > self._steps_until_final <= self._own_steps

    # -- interruptions and errors --------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether backward waits for a plain all-reduce."""
        return self._dense.waiting

    def interrupt(self) -> None:
        if self.waiting:
            error = ExchangeError("interrupted while waiting for an all-reduce")
            # First: as soon as one future has ended, the thread that trains may be at its next step.
            self.session.lifecycle.close(error)
            self._dense.fail(error)
            self.session.close(error)

    def _fail(self, error: ExchangeError) -> None:
        self.session.lifecycle.close(error)
        # Not here: this is a thread of the group that is to be destroyed.
        threading.Thread(target=self.session.close, name="thinwire-teardown", daemon=True).start()


def _marker(used: set[int]) -> Callable[[Tensor], None]:
    def mark(parameter: Tensor) -> None:
        used.add(id(parameter))

    return mark


def _exchange_bucket(state: BucketHook, bucket: GradBucket) -> Future[torch.Tensor]:
    return state.on_bucket(bucket)


def _mean(future: Future[Any]) -> Tensor:
    value = future.value()
    return value if isinstance(value, Tensor) else unwrap(future)


def _passer(target: Future[Any]) -> Callable[[Future[Any]], None]:
    """Hands a result, or an error as a value, on to a future that DDP waits for."""

    def hand_on(future: Future[Any]) -> None:
        try:
            target.set_result(future.value())
        except Exception as error:
            target.set_result(error)

    return hand_on
