"""EXPERIMENTAL: gradients on a GPU. Written, and its logic tested with tensors of the processor, but never run on a GPU by us.

There is no thread. The hook enqueues kernels and collectives on one side stream, which first waits for the stream of
backward, and returns a future that is completed under that stream. The host never reads a value: whether a step counts is a
tensor of one element, and what depends on it is chosen on the device.

A bucket's collectives are issued when it comes, and its means written when the next one has been issued: so the selection
of one runs while the other is on the wire, though all kernels stand on one stream.

Since a gradient that is not finite may come in the last bucket of a step, nothing is final before it: `Parts.settle` then
keeps what the step did to the residuals, or undoes it.
"""
# No postponed annotations here: DDP checks those of the hook, and texts do not pass.

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..codecs import Codec, Dense
from ..engine.layout import Exclude, TensorInfo
from ..engine.method import Method
from ..errors import AttachError, ExchangeError, StateError, WireClosed
from ..log import logger
from ..schemes.world import Collective, TorchWorld
from ..version import __version__
from .ddp import _unwrap, check_join, parameters_of, steps_until_final
from .parts import Parts, check

FORMAT = 1


class Lane:
    """Where a wire works: on a stream of its own of a GPU; tensors of the processor at once, right here."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def future(self) -> Future[Tensor]:
        return Future() if self._stream is None else Future(devices=[self.device])

    @contextlib.contextmanager
    def after(self, tensor: Tensor) -> Iterator[None]:
        """Work in it, after whatever was asked for so far; `tensor`, of another stream, is used here."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the caller's stream wait for all work in this one."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Let the host wait for it."""
        if self._stream is not None:
            self._stream.synchronize()

    def upload(self, numbers: Sequence[int]) -> Tensor:
        """int64 on the device. From pinned memory: a copy from other memory would wait for the stream."""
        host = torch.tensor(numbers, dtype=torch.int64)
        return host if self._stream is None else host.pin_memory().to(self.device, non_blocking=True)


class _Arrival:
    """A bucket of this step: DDP waits for its future, which wants the means of `missing`."""

    def __init__(self, names: tuple[str, ...], buffer: Tensor, future: Future[Tensor]) -> None:
        self.names, self.buffer, self.future, self.missing = names, buffer, future, set(names)

    def end(self) -> None:
        if not self.future.done():
            self.future.set_result(self.buffer)


class StreamWire:
    """What `attach` returns for parameters on a GPU. It exchanges nothing before `hook()`."""

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
        self.world, self.method, self.tensors = world, method, list(tensors)
        self.codec = method.parts[0].codec
        named = parameters_of(module)
        self.lane = Lane(next(iter(named.values())).device)
        self.steps = self.dense_steps = 0
        """Steps that were compressed, and those that travelled dense before them."""
        self.hooked = False
        self._module, self._scaler = weakref.ref(module), scaler
        self._exclude, self._min_elements = exclude, min_elements
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._infos = {tensor.name: tensor for tensor in tensors}
        self._until_final = self._own_steps = 0
        self._frozen = False
        self._partition: list[tuple[str, ...]] | None = None
        """What travels together, whatever the buckets are: then a resumed job makes the same bits."""
        self._coded: dict[tuple[str, ...], Parts] = {}
        self._dense: dict[tuple[str, ...], Parts] = {}
        self._coming: list[tuple[str, ...]] = []
        self._arrivals: list[_Arrival] = []
        self._issued: set[tuple[str, ...]] = set()
        self._flying: list[tuple[Parts, Tensor, list[tuple[Collective, Any]]]] = []
        self._tests = self.codec.keeps_residual
        # These three are only ever changed in place: memory of one stream must not be given back while another reads it.
        self._void = torch.zeros((), dtype=torch.bool, device=self.lane.device)
        self._last_void = self._void.clone()
        self._skipped = torch.zeros((), dtype=torch.int64, device=self.lane.device)
        self._bytes = self._counted = 0
        self.error: BaseException | None = None
        """What closed this wire, if it is closed."""

    def hook(self) -> None:
        """From the next backward on exchange the gradients. There is no way back: DDP keeps its hook for ever."""
        module = self._module()
        if module is None or self.hooked:
            return
        self._until_final = steps_until_final(module)
        module.register_comm_hook(self, _exchange_bucket)
        self.hooked = True

    def announce(self) -> None:
        """Say once, on rank 0, what happens and how."""
        if self.world.rank != 0:
            return
        if not self.hooked:
            logger.info(
                "auto on %s: no plan yet for GPUs, whose codecs and links nothing here measures; DDP goes on alone, without "
                "a hook; name a codec to compress: dense, cast, topk, randomblock",
                self.lane.device,
            )
            return
        total = sum(tensor.elements for tensor in self.tensors)
        layout = self.method.layout([self.tensors], self._exclude, self._min_elements)
        coded = sum(
            slot.elements
            for group in layout.groups
            for slot in group.slots
            if group.codec != "dense" and slot.role == "coded"
        )
        logger.info(
            "EXPERIMENTAL: %s on %d ranks with tensors on %s: compresses %d of %d parameters, the rest travels dense; dense "
            "until the buckets are final; `thinwire selftest` checks it on this machine",
            self.method, self.world.size, self.lane.device.type, coded, total,
        )  # fmt: skip

    # -- the hook ------------------------------------------------------------------------------------------------------

    def on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        # A hook that raises leaves DDP in pieces: it must be told through the future.
        try:
            check_join(self._module())
            if self.error is not None:
                raise WireClosed(f"this wire is closed: {self.error}") from self.error
            return self._exchange(bucket)
        except Exception as error:
            if self.error is None:
                self.error = error
                self.world.close()  # so that the others fail at once, and not at their timeout
            for arrival in self._arrivals:  # DDP waits for all of them before it hears of this one
                arrival.end()
            self._arrivals, self._flying = [], []
            failed = Future[Any]()  # without devices: what it holds is no tensor
            failed.set_result(error)
            return failed.then(_unwrap)

    def _exchange(self, bucket: GradBucket) -> Future[Tensor]:
        names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        buffer, first, last = bucket.buffer(), bucket.index() == 0, bucket.is_last()
        if first:
            self._coming, self._arrivals, self._issued, self._bytes = [], [], set(), 0
        self._coming.append(names)
        arrival = _Arrival(names, buffer, self.lane.future())
        self._arrivals.append(arrival)
        with self.lane.after(buffer):
            if first:
                self._void.zero_()
            # A resumed job that should compress already, and sees its final buckets for the first time, waits for all.
            holds = self._dense_enough and not self._frozen and not self.codec.direct
            if holds and last:
                self._freeze(self._coming)
            if last or not holds:
                self._advance(bucket.index())
            if last:
                self._land(0)
                self._finish()
        return arrival.future

    @property
    def _dense_enough(self) -> bool:
        """Whether the job, counted from its very beginning, has had its dense steps, and buckets are final by now."""
        return self.dense_steps > self._until_final <= self._own_steps

    def _advance(self, index: int) -> None:
        """Issue whatever is complete. All ranks have the same buckets in the same order, so they issue the same."""
        pieces = {name: arrival for arrival in self._arrivals for name in arrival.names}
        for names in self._partition or [self._coming[-1]]:
            if names in self._issued or not pieces.keys() >= set(names):
                continue
            self._issued.add(names)
            owners = list(dict.fromkeys(pieces[name] for name in names))
            whole = len(owners) == 1 and owners[0].names == names
            flat = owners[0].buffer if whole else torch.cat([self._piece(pieces[name], name) for name in names])
            self._issue(names, flat, f"bucket {index}, step {self.dense_steps + self.steps}")
            self._land(1)

    def _piece(self, arrival: _Arrival, name: str) -> Tensor:
        """Where a tensor lies in its bucket, flat."""
        start = 0
        for before in arrival.names:
            if before == name:
                break
            start += self._infos[before].elements
        return arrival.buffer.narrow(0, start, self._infos[name].elements)

    def _issue(self, names: tuple[str, ...], flat: Tensor, place: str) -> None:
        parts = (self._coded if self._frozen else self._dense).get(names)
        if parts is None:
            parts = self._dense[names] = self._make(names, Dense())
        if parts.elements != flat.numel():
            raise ExchangeError(f"{place}: {flat.numel()} elements where its tensors have {parts.elements}")
        scale = None if self._scaler is None else self._scaler._scale
        if scale is not None:
            scale = scale.to(self.lane.device, non_blocking=True)
        group, works = self.world.groups[0], []
        for part in parts.begin(flat, self.steps, scale, self.lane.upload):
            if part.operation == "gather":
                work = dist.all_gather_single(part.output, part.tensor, group=group, async_op=True)
            else:
                work = dist.all_reduce(part.tensor, group=group, async_op=True)
            works.append((part, work))
        self._bytes += parts.bytes
        self._flying.append((parts, flat, works))

    def _land(self, leave: int) -> None:
        """Wait for the collectives of all but the newest; on a stream that means: let the stream wait."""
        while len(self._flying) > leave:
            parts, flat, works = self._flying.pop(0)
            for part, work in works:
                try:
                    work.wait()
                except RuntimeError as error:
                    place = f"tensors from {parts.names[0]!r} on, step {self.dense_steps + self.steps}"
                    raise ExchangeError(f"{place}, {part.name}, rank {self.world.rank}: {error}") from error
            bad = parts.end(flat, self._tests)
            if bad is not None:
                self._void.logical_or_(bad)
            self._hand_back(parts, flat)

    def _hand_back(self, parts: Parts, flat: Tensor) -> None:
        wanted = set(parts.names)
        for arrival in self._arrivals:
            mine = arrival.missing & wanted
            if mine and arrival.buffer is not flat:
                for name in mine:
                    self._piece(arrival, name).copy_(flat.narrow(0, *parts.offsets[name]))
            arrival.missing -= mine
            if mine and not arrival.missing:
                arrival.end()

    def _finish(self) -> None:
        """All means are written: the step counts or not, and residuals follow."""
        missing = next((name for arrival in self._arrivals for name in arrival.missing), None)
        if missing is not None:
            raise ExchangeError(f"no bucket of this step brought what {missing!r} travels with")
        for parts in self._coded.values():
            for run in parts.kept:
                run.settle(self._void)
        self._last_void.copy_(self._void)
        self._skipped.add_(self._void)
        self._arrivals, self._counted = [], self._bytes
        self._own_steps += 1
        if self._frozen:
            self.steps += 1
            return
        self.dense_steps += 1
        if self.codec.direct:
            return
        if self._dense_enough and self._own_steps > self._until_final:
            self._freeze(self._coming)
        elif self._partition is None:
            # A job that resumes before its buckets are final has those of a first step: sums must not depend on it.
            self._partition = self._coming

    def _freeze(self, partition: list[tuple[str, ...]]) -> None:
        """DDP's buckets are final: from now on tensors travel as they lie in them, compressed."""
        self._partition, self._frozen = partition, True
        self._dense.clear()
        self._coded = {names: self._make(names, self.codec) for names in partition}

    def _make(self, names: tuple[str, ...], codec: Codec) -> Parts:
        tensors = [self._infos[name] for name in names]
        options: dict[str, Any] = {"exclude": self._exclude, "min_elements": self._min_elements}
        parts = Parts(tensors, codec, world=self.world.size, device=self.lane.device, **options)
        if self._scaler is not None:
            for run in parts.kept:
                run.protect()
        return parts

    # -- numbers and saved states --------------------------------------------------------------------------------------

    def residuals(self) -> dict[str, Tensor]:
        """What this rank has not sent yet, by name, shaped like the parameters: views, for between two steps."""
        self.lane.join()
        return dict(_named(self._coded))

    @property
    def skipped_last_step(self) -> bool:
        """Whether the last step was void on all ranks, because a gradient was not finite somewhere. The host waits for it."""
        self.lane.join()
        return bool(self._last_void)

    def guard(self, optimizer: Optimizer) -> None:
        """Make `optimizer.step()` do nothing, on all ranks, after a step in which a gradient was not finite.

        For jobs without a GradScaler. The host then waits for the exchange before every step of the optimizer.
        """
        self._tests = True

        def drop(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self.skipped_last_step:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None

        optimizer.register_step_pre_hook(drop)

    def stats(self) -> dict[str, Any]:
        """Numbers of this rank: steps, and the bytes that it handed to collectives in the last one. The host waits for it."""
        residuals = self.residuals().values()
        return {
            "codec": str(self.method),
            "world": self.world.size,
            "rank": self.world.rank,
            "device": str(self.lane.device),
            "dense_steps": self.dense_steps,
            "steps": self.steps,
            "skipped": int(self._skipped),
            "bytes_per_step": float(self._counted),
            "memory_bytes": sum(residual.nbytes for residual in residuals) * (1 if self._scaler is None else 2),
        }

    def state_dict(self) -> dict[str, Any]:
        """Residuals by name, step, codec and what travels together, of this rank: every rank saves and loads its own. Local."""
        residuals = {f"residual.{name}": residual.clone() for name, residual in self.residuals().items()}
        return {"thinwire": self._about(), **residuals}

    def _about(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "versions": {"thinwire": __version__, "torch": str(torch.__version__)},
            "codec": str(self.method),
            "rank": self.world.rank,
            "world": self.world.size,
            "tensors": {tensor.name: list(tensor.shape) for tensor in self.tensors},
            "steps": self.steps,
            "dense_steps": self.dense_steps,
            "compresses": self._frozen,
            "partition": [list(names) for names in self._partition or ()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state of this rank, between two steps. Local; what does not fit is refused, and nothing loaded."""
        if self._arrivals:
            raise StateError("a step is under way: load between two of them")
        about = state.get("thinwire")
        if not isinstance(about, Mapping):
            raise StateError("this is no state of a wire on CUDA: it has no entry 'thinwire'")
        mine = self._about()
        for key in ("format", "codec", "world", "rank"):
            if about.get(key) != mine[key]:
                raise StateError(f"{key}: the state has {about.get(key)!r}, this job has {mine[key]!r}")
        try:
            theirs = {str(name): list(shape) for name, shape in about["tensors"].items()}
            partition = [tuple(map(str, names)) for names in about["partition"]]
            steps, dense_steps, compresses = int(about["steps"]), int(about["dense_steps"]), bool(about["compresses"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"a field of the state is missing or of the wrong kind: {error!r}") from error
        for name in sorted({*theirs, *mine["tensors"]}):
            if theirs.get(name) != mine["tensors"].get(name):
                was, now = theirs.get(name, "no such tensor"), mine["tensors"].get(name, "no such tensor")
                raise StateError(f"{name!r}: the state has {was}, this model has {now}")
        together = [name for names in partition for name in names]
        if (partition or compresses) and sorted(together) != sorted(self._infos):
            raise StateError("partition: the state does not have every tensor of this model once")
        for names in partition:
            if len({self._infos[name].dtype for name in names}) > 1:
                raise StateError(f"partition: {names[0]!r} travels with tensors that have another dtype in this model")
        coded = {names: self._make(names, self.codec) for names in partition} if compresses else {}
        for name, residual in _named(coded):
            saved = state.get(f"residual.{name}")
            if not isinstance(saved, Tensor) or saved.shape != residual.shape or saved.dtype != residual.dtype:
                raise StateError(f"'residual.{name}' is missing, or not float32 of shape {tuple(residual.shape)}")
            if not bool(saved.isfinite().all()):
                raise StateError(f"'residual.{name}' holds values that are not finite")
            residual.copy_(saved)
        self.lane.join()
        self._coded, self._partition, self._frozen = coded, partition or None, compresses
        self.steps, self.dense_steps = steps, dense_steps
        self._dense.clear()

    def close(self) -> None:
        """Give up the process group of this wire. The job cannot go on with it."""
        if self.error is None:
            self.error = WireClosed("it was closed")
            self.lane.synchronize()
        self.world.close()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a wire on CUDA has no {name!r}; it has: stats, state_dict, load_state_dict, residuals, guard, "
            "skipped_last_step, close"
        )


def device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """Where parameters are: the processor, or one GPU. Anything else is refused."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor.device.type not in ("cpu", "cuda"):
            raise AttachError(
                f"{name!r} is on {tensor.device}: there are exchanges for tensors of CPUs and CUDA devices"
            )
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            raise AttachError(
                f"{first[0]!r} is on {first[1]} and {name!r} on {tensor.device}: all parameters of a module must be on one "
                "device"
            )
    return first[1] if first is not None else torch.device("cpu")


def check_job(module: DistributedDataParallel, method: Method) -> None:
    """Refuse what a wire on CUDA cannot do."""
    if method.plan is not None:
        raise AttachError("plans do not run on CUDA yet; name a codec: dense, cast, topk, randomblock")
    if method.chain:
        raise AttachError(f"chains do not run on CUDA yet: leave {method.chain!r} out")
    codec = method.parts[0].codec
    check(codec)
    if codec.keeps_residual and module.find_unused_parameters:
        raise AttachError(
            f"{codec} with find_unused_parameters=True does not run on CUDA yet: what a parameter that nobody used would send "
            "is lost in DDP; dense and cast can be used"
        )


def _named(coded: Mapping[Any, Parts]) -> Iterator[tuple[str, Tensor]]:
    for parts in coded.values():
        for run in parts.kept:
            yield from run.named()


def _exchange_bucket(state: StreamWire, bucket: GradBucket) -> Future[torch.Tensor]:
    return state.on_bucket(bucket)
