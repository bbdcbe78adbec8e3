"""Gradients of `DistributedDataParallel`, through its communication hook."""
# No postponed annotations here: DDP checks those of the hook, and texts do not pass.

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..codecs import Codec
from ..engine.agree import agree, compile_kernels, problem_of
from ..engine.layout import Exclude, TensorInfo, describe, excluded, kinds_of
from ..engine.method import Method
from ..engine.runner import Runner, explain
from ..engine.wire import Wire
from ..errors import AttachError, ExchangeError, WireClosed
from ..log import logger, set_up
from ..planner.plan import Plan
from ..schemes import tree
from ..schemes.world import TorchWorld, ranks_per_node

_wires: "weakref.WeakKeyDictionary[DistributedDataParallel, DDPWire]" = weakref.WeakKeyDictionary()


def attach(
    ddp: nn.Module,
    codec: Codec | str | Plan,
    *,
    chain: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    exclude: Exclude = (),
    min_elements: int = 1024,
    timeout: timedelta | None = None,
) -> "DDPWire":
    """Exchange the gradients of a DDP module through `codec`. A collective: every rank calls it alike.

    ddp           a DistributedDataParallel, or what `torch.compile` made of one
    codec         a codec, or its text: `"topk(density=0.01)"`, `"topk(density=0.01) via B"`; or a plan
    chain         by which collectives: a leaf of the tree, by letter or notation (`docs/chains.md`)
    scaler        the GradScaler of the job, if it has one: residuals are then unscaled, and untouched by a skipped step
    exclude       shell patterns on parameter names, or a function of the name: these tensors travel dense
    min_elements  tensors with fewer elements travel dense
    timeout       of our collectives; the default is that of the module's process group

    Training begins dense and goes over to the codec when DDP's buckets are final (after two steps; three with
    `static_graph`, one with `find_unused_parameters`).
    """
    set_up()
    module = getattr(ddp, "_orig_mod", ddp)
    if not isinstance(module, DistributedDataParallel):
        raise AttachError(
            f"attach needs a DistributedDataParallel, not {type(ddp).__name__}: wrap the model first, "
            "ddp = DistributedDataParallel(model)"
        )
    if scaler is not None and not scaler.is_enabled():
        scaler = None  # it does not skip a step that is not finite
    group = module.process_group
    nodes = ranks_per_node(group)
    error: str | None = None
    tensors: list[TensorInfo] = []
    facts: dict[str, Any] = {}
    method: Method | None = None
    try:
        method = Method.of(codec, chain)
        _check(module, method, min_elements)
        kinds = {plain(name): kind for name, kind in kinds_of(module.module).items()}
        tensors = [describe(name, p, kinds.get(name)) for name, p in parameters_of(module).items()]
        method.check(tensors, dist.get_world_size(group), nodes[0])
        facts = {
            **method.facts(),
            "tensors": tensors,
            "excluded": excluded(tensors, exclude),
            "options": (min_elements, scaler is not None, module.find_unused_parameters, module.static_graph),
            "buckets": module._has_rebuilt_buckets,
        }
    except Exception as problem:  # of any kind, the user's own `exclude` included: the other ranks wait to hear of it
        error = problem_of(problem)
    agree(group, facts, error)
    assert method is not None
    for text in method.chains:
        if tree.parse(text).hierarchical and nodes[0] is None:
            raise AttachError(f"the chain {text!r} needs nodes: {nodes[1]}")
    compile_kernels(group, method)
    world = TorchWorld(group, 1, timeout, *nodes)
    wire = DDPWire(module, world, method, tensors, scaler, exclude, min_elements)
    world.prepare(wire._layout([tensors]).places(wire._place()))
    module.register_comm_hook(wire, _exchange_bucket)
    _wires[module] = wire
    wire.announce()
    return wire


def attached(module: DistributedDataParallel) -> Method | None:
    """How the wire that is attached to a module exchanges, if there is one."""
    wire = _wires.get(module)
    return None if wire is None else wire.method


def _check(module: DistributedDataParallel, method: Method, min_elements: int) -> None:
    str(method)  # a codec of the user's own needs a name
    if min_elements < 0:
        raise AttachError(f"min_elements must not be negative, but is {min_elements}")
    if module in _wires:
        raise AttachError(f"a wire with {_wires[module].method} is attached to this module already")
    # A hook of the built-in kind stands only in DDP's log.
    name = module._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
    if module._comm_hooks:
        name = getattr(module._comm_hooks[0][0], "__qualname__", "another hook")
    if name:
        raise AttachError(f"the communication hook of this module is taken by {name}; DDP has room for one")
    for name, child in module.module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise AttachError(f"{name!r} makes sparse gradients, which thinwire cannot compress: use sparse=False")
    for name, parameter in parameters_of(module).items():
        if parameter.is_complex():
            raise AttachError(f"{name!r} is {parameter.dtype}: complex gradients are not supported")
        if parameter.device.type != "cpu":
            raise AttachError(f"{name!r} is on {parameter.device}: only CPU tensors are supported yet")


def parameters_of(module: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP reduces, in its own order, without a `module.` in front of their names."""
    ignored = set(module.parameters_to_ignore)
    named = module.module.named_parameters()
    return {plain(name): p for name, p in named if p.requires_grad and name not in ignored}


def plain(name: str) -> str:
    """The name of a parameter as it was before `torch.compile`: patterns and checkpoints fit a model with and without."""
    return name.replace("_orig_mod.", "")


class DDPWire(Wire):
    """What `attach` returns."""

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
        self._torch_world = world
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
        # DDP rebuilds its buckets once, after the first step (the second with static_graph), unless it searches for
        # unused parameters. Counted in steps of ours, because all ranks count the same, joined ones included.
        self._steps_until_final = 2 if module.static_graph else 1
        if module._has_rebuilt_buckets or (module.find_unused_parameters and not module.static_graph):
            self._steps_until_final = 0
        self._closed: BaseException | None = None
        self._flying: list[_Flight] = []

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
            return self._exchange(bucket)
        except Exception as error:
            failed = Future[Any]()
            failed.set_result(error)
            return failed.then(_unwrap)

    def _exchange(self, bucket: GradBucket) -> Future[Tensor]:
        if self.error is not None:
            raise WireClosed(f"this wire is closed: {self.error}") from self.error
        buffer = bucket.buffer()
        if self.runner is None or (self.direct and not self.runner.members[0].carries):
            future = self._direct(bucket.index(), buffer)
            self._note(bucket)
            if bucket.is_last():
                self._dense_step_ends()
            return future
        names = self._note(bucket)
        if bucket.index() == 0 and self._scaler is not None:
            self.runner.members[0].scale = float(self._scaler.get_scale())
        ended = Future[Any]()

        def done(error: BaseException | None) -> None:
            # Never set_exception: DDP would say that it cannot cast it to a tensor.
            ended.set_result(buffer if error is None else error)

        self.runner.submit(names, [buffer], done, [self._unused(names)])
        if bucket.is_last():
            self._used.clear()
        return ended.then(_unwrap)

    def _direct(self, index: int, buffer: Tensor) -> Future[Tensor]:
        """The mean by one all-reduce, issued right here: nothing can be faster through a Python hook."""
        rank = self.world.members[0]
        number = self._begin_direct() if index == 0 else self._direct_steps
        # Divided before, as DDP does it: the same bits, and while the bucket is still in the cache. AVG divides afterwards.
        buffer.mul_(1.0 / self.world.size)
        work = dist.all_reduce(buffer, group=self._torch_world.groups[0], async_op=True)

        flight = _Flight()

        def arrive(future: Future[list[Tensor]]) -> None:
            try:
                mean = future.value()[0]
            except RuntimeError as error:
                place = f"bucket {index}, dense step {number - 1}, all-reduce (average), rank {rank}"
                failure = ExchangeError(f"{place}: {error}")
                self._closed = self._closed or failure
                flight.end(failure)
                return
            self._inspect_direct(mean, number)
            flight.end(mean)

        work.get_future().add_done_callback(arrive)
        if index == 0:
            self._flying.clear()
        self._flying.append(flight)
        return flight.future.then(_unwrap)

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

    def _dense_step_ends(self) -> None:
        """Once the buckets are final, freeze the layout for the steps to come."""
        self.dense_steps += 1
        self._used.clear()
        if self.runner is None and self.dense_steps > self._steps_until_final:
            layout = self._layout(self._cut())
            self.freeze(layout)
            if self.world.members[0] == 0 and not self.direct:
                logger.info("layout frozen after %d dense steps: %d groups", self.dense_steps, len(layout.groups))

    def _unused(self, names: Sequence[str]) -> Sequence[str]:
        """Parameters of a bucket that this rank did not use since the last exchange.

        DDP knows it too, but its map is locked while it calls a hook.
        """
        if not self._tracks_unused:
            return ()
        used = {self._names[key] for key in self._used}
        return [name for name in names if name not in used]

    def interrupt(self) -> None:
        if self.runner is not None and not self.direct:
            super().interrupt()
        elif any(not flight.future.done() for flight in self._flying):
            self._closed = ExchangeError("interrupted while waiting for an all-reduce")
            for flight in self._flying:
                flight.end(self._closed)
            self.world.close()

    def close(self) -> None:
        if self._closed is None:
            self._closed = WireClosed("it was closed")
        super().close()

    @property
    def error(self) -> BaseException | None:
        return self._closed or super().error


class _Flight:
    """An all-reduce of the direct path. DDP waits for this future and not for gloo's own, which an abort does not end."""

    def __init__(self) -> None:
        self.future = Future[Any]()
        self._lock = threading.Lock()

    def end(self, value: Tensor | BaseException) -> None:
        with self._lock:
            if not self.future.done():
                self.future.set_result(value)


def _marker(used: set[int]) -> Callable[[Tensor], None]:
    def mark(parameter: Tensor) -> None:
        used.add(id(parameter))

    return mark


def _exchange_bucket(state: DDPWire, bucket: GradBucket) -> Future[torch.Tensor]:
    return state.on_bucket(bucket)


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
