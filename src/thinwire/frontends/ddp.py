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
from ..engine.layout import Exclude, Layout, TensorInfo, build, describe, excluded, kinds_of
from ..engine.runner import explain
from ..engine.wire import Wire
from ..errors import AttachError, ExchangeError, WireClosed
from ..log import logger, set_up
from ..schemes import tree
from ..schemes.chain import choose
from ..schemes.world import TorchWorld, ranks_per_node

_wires: "weakref.WeakKeyDictionary[DistributedDataParallel, DDPWire]" = weakref.WeakKeyDictionary()


def attach(
    ddp: nn.Module,
    codec: Codec | str,
    *,
    chain: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    exclude: Exclude = (),
    min_elements: int = 1024,
    timeout: timedelta | None = None,
) -> "DDPWire":
    """Exchange the gradients of a DDP module through `codec`. A collective: every rank calls it alike.

    ddp           a DistributedDataParallel, or what `torch.compile` made of one
    codec         a codec, or its text: `"topk(density=0.01)"`, `"topk(density=0.01) via B"`
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
    error: str | None = None
    tensors: list[TensorInfo] = []
    facts: dict[str, Any] = {}
    text = ""
    try:
        codec, text = choose(codec, chain)
        _check(module, codec, min_elements)
        kinds = {_plain(name): kind for name, kind in kinds_of(module.module).items()}
        tensors = [describe(name, p, kinds.get(name)) for name, p in _parameters(module).items()]
        facts = {
            "codec": str(codec),
            "chain": text,
            "tensors": tensors,
            "excluded": excluded(tensors, exclude),
            "options": (min_elements, scaler is not None, module.find_unused_parameters, module.static_graph),
            "buckets": module._has_rebuilt_buckets,
        }
    except Exception as problem:  # of any kind, the user's own `exclude` included: the other ranks wait to hear of it
        error = problem_of(problem)
    agree(group, facts, error)
    assert isinstance(codec, Codec)
    nodes = ranks_per_node(group)
    if text and tree.parse(text).hierarchical and nodes[0] is None:
        raise AttachError(f"the chain {text!r} needs nodes: {nodes[1]}")
    compile_kernels(group, codec, text)
    world = TorchWorld(group, codec.rounds if not text else 1, timeout, *nodes)
    wire = DDPWire(module, world, codec, tensors, scaler, exclude, min_elements, text)
    world.prepare(wire._layout([tensors]).places(wire._place()))
    module.register_comm_hook(wire, _exchange_bucket)
    _wires[module] = wire
    wire.announce()
    return wire


def attached(module: DistributedDataParallel) -> Codec | None:
    """The codec of the wire that is attached to a module, if there is one."""
    wire = _wires.get(module)
    return None if wire is None else wire.codec


def _check(module: DistributedDataParallel, codec: Codec, min_elements: int) -> None:
    if not isinstance(codec, Codec):
        raise AttachError(
            f"{codec!r} is not a codec: give thinwire.TopK(0.01), or a text such as 'topk(density=0.01)'"
        )
    str(codec)
    if min_elements < 0:
        raise AttachError(f"min_elements must not be negative, but is {min_elements}")
    if module in _wires:
        raise AttachError(f"a wire with {_wires[module].codec} is attached to this module already")
    # A hook of the built-in kind stands only in DDP's log.
    name = module._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
    if module._comm_hooks:
        name = getattr(module._comm_hooks[0][0], "__qualname__", "another hook")
    if name:
        raise AttachError(f"the communication hook of this module is taken by {name}; DDP has room for one")
    for name, child in module.module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise AttachError(f"{name!r} makes sparse gradients, which thinwire cannot compress: use sparse=False")
    for name, parameter in _parameters(module).items():
        if parameter.is_complex():
            raise AttachError(f"{name!r} is {parameter.dtype}: complex gradients are not supported")
        if parameter.device.type != "cpu":
            raise AttachError(f"{name!r} is on {parameter.device}: only CPU tensors are supported yet")


def _parameters(module: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP reduces, in its own order, without a `module.` in front of their names."""
    ignored = set(module.parameters_to_ignore)
    named = module.module.named_parameters()
    return {_plain(name): p for name, p in named if p.requires_grad and name not in ignored}


def _plain(name: str) -> str:
    """The name of a parameter as it was before `torch.compile`: patterns and checkpoints fit a model with and without."""
    return name.replace("_orig_mod.", "")


class DDPWire(Wire):
    """What `attach` returns."""

    def __init__(
        self,
        module: DistributedDataParallel,
        world: TorchWorld,
        codec: Codec,
        tensors: Sequence[TensorInfo],
        scaler: torch.amp.GradScaler | None,
        exclude: Exclude,
        min_elements: int,
        chain: str = "",
    ) -> None:
        tracks_unused = module.find_unused_parameters or module.static_graph
        super().__init__(world, codec, tensors, chain=chain, protected=scaler is not None, tracks_unused=tracks_unused)
        self._torch_world = world
        self._scaler = scaler
        self._exclude, self._min_elements = exclude, min_elements
        named = _parameters(module)
        self._names = {id(p): name for name, p in named.items()}
        self._used: set[int] = set()
        if tracks_unused:
            for parameter in named.values():
                parameter.register_post_accumulate_grad_hook(_marker(self._used))  # type: ignore[no-untyped-call]
        self._infos = {tensor.name: tensor for tensor in tensors}
        self._buckets: list[list[TensorInfo]] = []
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
        memory = (8 if self._protected else 4) * coded / total if total and self.codec.keeps_residual else 0.0
        codecs = [codec.at(0, self.settings) for codec in layout.codecs()]
        estimate = [c.estimate(g.info(), self.world.size) for g, c in zip(layout.groups, codecs, strict=True)]
        travel = sum(e.gathered + e.summed for e in estimate)
        how = f"a rank hands over about {_bytes(travel)} a step instead of {_bytes(4 * total)}"
        if self.chain:
            how = f"by the chain {self.chain}"
        logger.info(
            "%s on %d ranks: compresses %d of %d parameters (%.1f %%), the rest travels dense; %s; residuals add %.1f bytes "
            "a parameter; dense until the buckets are final",
            self.codec, self.world.size, coded, total, share, how, memory,
        )  # fmt: skip
        if self.world.size == 1:
            logger.warning("world size is 1: there is nobody to exchange with, so compression can only cost")

    def _layout(self, buckets: Sequence[Sequence[TensorInfo]]) -> Layout:
        return build(buckets, self.codec, chain=self.chain, exclude=self._exclude, min_elements=self._min_elements)

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
            if self.runner is None:
                self._record(bucket)
            elif bucket.is_last():
                self.dense_steps += 1
            return future
        names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
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

    def _record(self, bucket: GradBucket) -> None:
        """Note what DDP's buckets hold; once they are final, freeze the layout for the steps to come."""
        self._buckets.append([self._infos[self._names[id(parameter)]] for parameter in bucket.parameters()])
        if bucket.is_last():
            self._used.clear()
            self.dense_steps += 1
            buckets, self._buckets = self._buckets, []
            if self.dense_steps > self._steps_until_final:
                layout = self._layout(buckets)
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
