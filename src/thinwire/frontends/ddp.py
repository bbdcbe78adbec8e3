"""Gradients of `DistributedDataParallel`, through its communication hook."""
# No postponed annotations here: DDP checks those of the hook, and texts do not pass.

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..engine.layout import Exclude, TensorInfo
from ..engine.method import Method
from ..engine.runner import Runner, explain
from ..engine.state import Meta
from ..engine.wire import Wire
from ..errors import ExchangeError, WireClosed
from ..log import logger
from ..schemes.world import TorchWorld
from .dense import DensePath
from .marks import Marks


def parameters_of(module: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP reduces, in its own order, without a `module.` in front of their names."""
    ignored = set(module.parameters_to_ignore)
    named = module.module.named_parameters()
    return {plain(name): p for name, p in named if p.requires_grad and name not in ignored}


def plain(name: str) -> str:
    """The name of a parameter as it was before `torch.compile`: patterns and checkpoints fit a model with and without."""
    return name.replace("_orig_mod.", "")


def steps_until_final(module: DistributedDataParallel) -> int:
    """After how many steps the buckets of DDP stay as they are.

    It rebuilds them once, after the first step (the second with static_graph), unless it searches for unused parameters.
    Counted in steps of ours, because all ranks count the same, joined ones included.
    """
    if module._has_rebuilt_buckets or (module.find_unused_parameters and not module.static_graph):
        return 0
    return 2 if module.static_graph else 1


def check_join(module: DistributedDataParallel | None) -> None:
    if module is not None and module._join_config.enable and not module._divide_by_initial_world_size:
        raise ExchangeError(
            "join(divide_by_initial_world_size=False) is not possible with a communication hook, which DDP does not tell "
            "how many ranks have not joined: leave it at True"
        )


class DDPWire(Wire):
    """What `attach` returns for a codec or a plan. It exchanges nothing before `hook()`."""

    def __init__(
        self,
        module: DistributedDataParallel,
        world: TorchWorld,
        method: Method,
        tensors: Sequence[TensorInfo],
        scaler: torch.amp.GradScaler | None,
        exclude: Exclude,
        min_elements: int,
    ) -> None:
        tracks_unused = module.find_unused_parameters or module.static_graph
        super().__init__(
            world,
            method,
            tensors,
            exclude=exclude,
            min_elements=min_elements,
            protected=scaler is not None,
            tracks_unused=tracks_unused,
        )
        self._module = weakref.ref(module)
        self._scaler = scaler
        named = parameters_of(module)
        self._names = {id(p): name for name, p in named.items()}
        self._used: set[int] = set()
        if tracks_unused:
            for parameter in named.values():
                parameter.register_post_accumulate_grad_hook(_marker(self._used))  # type: ignore[no-untyped-call]
        self._infos = {tensor.name: tensor for tensor in tensors}
        self._coming: list[tuple[str, ...]] = []
        self._seen: list[tuple[str, ...]] = []
        self.hooked = False
        self._steps_until_final = 0
        self._closed: BaseException | None = None
        self._dense = DensePath(world, self._inspect_direct, self._fail, self._recorder)
        self._held: list[tuple[tuple[str, ...], Tensor, Future[Any]]] = []
        self._own_steps = 0
        self._matches = True
        self._marks: Marks | None = None
        self._hooks_allowed = True
        """Not in a module that is compiled as a whole: hooks in it would make it compile again."""

    def hook(self) -> None:
        """From the next backward on exchange the gradients. There is no way back: DDP keeps its hook for ever."""
        module = self._module()
        if module is None or self.hooked:
            return
        self._steps_until_final = steps_until_final(module)
        module.register_comm_hook(self, _exchange_bucket)
        self.hooked = True

    def announce(self) -> None:
        """Say once, on rank 0, what is compressed and how."""
        if self.world.members[0] != 0:
            return
        layout = self._layout([list(self._infos.values())])
        coded = sum(
            s.elements for group in layout.groups for s in group.slots if group.codec != "dense" and s.role == "coded"
        )
        total = sum(tensor.elements for tensor in self._infos.values())
        share = 100 * coded / total if total else 0.0
        keeping = [g for g, codec in zip(layout.groups, layout.codecs(), strict=True) if codec.keeps_residual]
        kept = sum(slot.elements for group in keeping for slot in group.slots if slot.role == "coded")
        memory = (8 if self._protected else 4) * kept / total if total else 0.0
        codecs = [codec.at(0, self.settings) for codec in layout.codecs()]
        estimate = [c.estimate(g.info(), self.world.size) for g, c in zip(layout.groups, codecs, strict=True)]
        travel = sum(e.gathered + e.summed for e in estimate)
        how = f"a rank hands over about {_bytes(travel)} a step instead of {_bytes(4 * total)}"
        if self.method.chain:
            how = f"by the chain {self.method.chain}"
        if self.plan is not None and self.plan.predicted_seconds:
            predicted, dense = 1000 * self.plan.predicted_seconds, 1000 * self.plan.dense_seconds
            how += f"; predicted: {predicted:.1f} ms a step, {dense:.1f} dense"
        logger.info(
            "%s on %d ranks: compresses %d of %d parameters (%.1f %%), the rest travels dense; %s; residuals add %.1f bytes "
            "a parameter; dense until the buckets are final",
            self.method, self.world.size, coded, total, share, how, memory,
        )  # fmt: skip
        if self.world.size == 1:
            logger.warning("world size is 1: there is nobody to exchange with, so compression can only cost")

    # -- the hook ------------------------------------------------------------------------------------------------------

    def on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        # A hook that raises leaves DDP in pieces: it must be told through the future.
        try:
            check_join(self._module())
            return self._exchange(bucket)
        except Exception as error:
            failed = Future[Any]()
            failed.set_result(error)
            return failed.then(_unwrap)

    def _exchange(self, bucket: GradBucket) -> Future[Tensor]:
        if self.error is not None:
            raise WireClosed(f"this wire is closed: {self.error}") from self.error
        names = self._note(bucket)
        if self.runner is not None and self.direct and not self.runner.members[0].carries:
            future = self._reduce(bucket, names)
            self.dense_steps += bucket.is_last()
            return future
        if self.runner is None:
            if self._dense_enough and not self.direct:
                return self._hold(bucket, names)
            future = self._reduce(bucket, names)
            if bucket.is_last():
                self._record()
            return future
        return self._submit(names, bucket.buffer(), bucket.index() == 0, bucket.is_last())

    def _submit(self, names: tuple[str, ...], buffer: Tensor, first: bool, last: bool) -> Future[Tensor]:
        """Exchange a bucket by the layout."""
        assert self.runner is not None
        if first:
            self._look_at_scale()
        ended = Future[Any]()
        self._came(names, buffer)

        def done(error: BaseException | None) -> None:
            if error is None:
                self._went(names, buffer)
            # Never set_exception: DDP would say that it cannot cast it to a tensor.
            ended.set_result(buffer if error is None else error)

        self._went_direct = False
        self.runner.submit(names, [buffer], done, [self._unused(names)])
        if last:
            self._used.clear()
        return ended.then(_unwrap)

    def _came(self, names: tuple[str, ...], buffer: Tensor) -> None:
        """A bucket holds this rank's gradients. For those who look on."""

    def _went(self, names: tuple[str, ...], buffer: Tensor) -> None:
        """A bucket holds the means of all ranks. Called from the exchange thread."""

    def _reduce(self, bucket: GradBucket, names: tuple[str, ...]) -> Future[Tensor]:
        """The mean by plain all-reduces: nothing can be faster through a Python hook."""
        if bucket.index() == 0:
            self._begin_direct()
            self._dense.begin(self.steps + 1)
            self._matches = True
        number, partition = self._direct_steps, self._partition
        self._matches &= partition is None or names in partition
        if bucket.is_last() and self._matches and self.runner is not None and number > self._steps_until_final + 1:
            self._partition = None  # the buckets are final, and are what it says: no need to look any more
        place = f"bucket {bucket.index()}, dense step {number - 1}"
        return self._dense.bucket(names, bucket, partition, place, number).then(_unwrap)

    def _note(self, bucket: GradBucket) -> tuple[str, ...]:
        """The tensors of a bucket; after the last one of a step it is known how DDP cuts them."""
        names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        if bucket.index() == 0:
            self._coming = []
        self._coming.append(names)
        if bucket.is_last():
            self._seen = self._coming
        return names

    def _buckets_of(self, runner: Runner) -> Sequence[Sequence[TensorInfo]]:
        return self._cut() if self._seen else super()._buckets_of(runner)

    def _cut(self) -> list[list[TensorInfo]]:
        return [[self._infos[name] for name in names] for names in self._seen]

    def _record(self) -> None:
        """A dense step is over; once DDP's buckets are final, freeze the layout for the steps to come."""
        self._used.clear()
        self.dense_steps += 1
        self._own_steps += 1
        if self._dense_enough and self._own_steps > self._steps_until_final:
            self._freeze()
        elif self._partition is None and not self.direct:
            # A job that resumes before it has a layout has the buckets of a first step: sums must not depend on it.
            self._partition = self._seen

    def _freeze(self) -> None:
        layout = self._layout(self._cut())
        self.freeze(layout)
        if self.world.members[0] == 0 and not self.direct:
            logger.info("layout frozen after %d dense steps: %d groups", self.dense_steps, len(layout.groups))

    @property
    def _dense_enough(self) -> bool:
        """Whether the job, counted from its very beginning, has had its dense steps, and buckets are final by now."""
        return self.dense_steps > self._steps_until_final <= self._own_steps

    def _hold(self, bucket: GradBucket, names: tuple[str, ...]) -> Future[Tensor]:
        """A resumed job that should compress already, and sees its final buckets for the first time: wait for all of them."""
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
        return ended.then(_unwrap)

    def _use(self, runner: Runner) -> Runner:
        groups = [tuple(slot.name for slot in group.slots) for group in runner.layout.groups]
        self._partition = groups if self.direct else None
        return super()._use(runner)

    def _resume(self, meta: Meta) -> None:
        if self.runner is None:
            self._partition = [tuple(names) for names in meta.buckets] or None

    def trace(self, steps: int = 20) -> None:
        super().trace(steps)
        module = self._module()
        if module is not None and self._hooks_allowed:
            if self._marks is not None:
                self._marks.close()
            self._marks = Marks(module, self._recorder)

    trace.__doc__ = Wire.trace.__doc__

    def _unused(self, names: Sequence[str]) -> Sequence[str]:
        """Parameters of a bucket that this rank did not use since the last exchange.

        DDP knows it too, but its map is locked while it calls a hook.
        """
        if not self._tracks_unused:
            return ()
        used = {self._names[key] for key in self._used}
        return [name for name in names if name not in used]

    @property
    def waiting(self) -> bool:
        return super().waiting or any(not flight.future.done() for flight in self._dense.flying)

    def interrupt(self) -> None:
        if super().waiting:
            super().interrupt()
        elif self.waiting:
            self._closed = ExchangeError("interrupted while waiting for an all-reduce")
            for flight in self._dense.flying:
                flight.end(self._closed)
            super().close()

    def _fail(self, error: ExchangeError) -> None:
        self._closed = self._closed or error
        # Not here: this is a thread of the group that is to be destroyed.
        threading.Thread(target=self.close, name="thinwire-farewell", daemon=True).start()

    def close(self) -> None:
        if self._closed is None:
            self._closed = WireClosed("it was closed")
        super().close()

    @property
    def error(self) -> BaseException | None:
        return self._closed or super().error


def _marker(used: set[int]) -> Callable[[Tensor], None]:
    def mark(parameter: Tensor) -> None:
        used.add(id(parameter))

    return mark


def _exchange_bucket(state: DDPWire, bucket: GradBucket) -> Future[torch.Tensor]:
    return state.on_bucket(bucket)


def _passer(target: Future[Any]) -> Callable[[Future[Any]], None]:
    """Hands a result, or an error as a value, on to a future that somebody waits for."""

    def hand_on(future: Future[Any]) -> None:
        try:
            target.set_result(future.value())
        except Exception as error:
            target.set_result(error)

    return hand_on


def _unwrap(future: Future[Any]) -> Tensor:
    value = future.value()
    if isinstance(value, BaseException):
        raise ExchangeError(explain(value)) from value
    assert isinstance(value, Tensor)
    return value


def _bytes(size: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
