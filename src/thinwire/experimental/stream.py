"""EXPERIMENTAL: gradients on a GPU. Written, and its logic tested with CPU tensors, but never run on a GPU by us.

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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..codecs import Codec, Dense
from ..comm.collectives import Collective
from ..comm.world import TorchWorld
from ..engine import files
from ..engine.consensus import agree, load_alike
from ..engine.ddp_module import check_join, failed, parameters_of, skip_void_steps, steps_until_final
from ..engine.layout import Exclude, TensorInfo
from ..engine.strategy import Strategy
from ..errors import ExchangeError, StateError, WireClosed
from ..version import __version__
from . import stream_state
from .lane import Lane, on
from .parts import Parts
from .stream_state import Meta


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
        strategy: Strategy,
        tensors: Sequence[TensorInfo],
        scaler: torch.amp.GradScaler | None,
        exclude: Exclude,
        min_elements: int,
    ) -> None:
        self.world, self.strategy, self.tensors = world, strategy, list(tensors)
        self.codec = strategy.assignments[0].codec
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
        self._tests = self.codec.keeps_residual or scaler is not None
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

    def explain(self) -> str:
        """What is compressed and how; without a hook, why nothing is."""
        if not self.hooked:
            return (
                f"auto on {self.lane.device.type}: nothing here measures GPUs yet, so there is no plan, and DDP goes on alone, "
                "without a hook; to compress name a codec: cast, topk, randomblock"
            )
        layout = self.strategy.layout([self.tensors], self._exclude, self._min_elements)
        coding = [group for group in layout.groups if group.codec != "dense"]
        coded = sum(slot.elements for group in coding for slot in group.slots if slot.role == "coded")
        total = sum(tensor.elements for tensor in self.tensors)
        return (
            f"EXPERIMENTAL: {self.strategy} on {self.world.size} ranks with tensors on {self.lane.device.type}: compresses "
            f"{coded} of {total} parameters, the rest travels dense; dense until the buckets are final; `thinwire selftest` "
            "checks it on this machine"
        )

    # -- the hook ------------------------------------------------------------------------------------------------------

    def on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
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
            return failed(error)

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
                self._advance(everything=holds)
            if last:
                self._land(0)
                self._finish()
        return arrival.future

    @property
    def _dense_enough(self) -> bool:
        """Whether the job, counted from its very beginning, has had its dense steps, and buckets are final by now."""
        return self.dense_steps > self._until_final <= self._own_steps

    def _advance(self, everything: bool) -> None:
        """Issue what the newest bucket completes, or `everything`. All ranks have the same buckets, so they issue the same."""
        newest, groups = self._coming[-1], self._partition
        if groups is None or (newest in groups and not everything):
            groups = [newest]
        pieces = {name: arrival for arrival in self._arrivals for name in arrival.names}
        for names in groups:
            if names in self._issued or not pieces.keys() >= set(names):
                continue
            self._issued.add(names)
            owners = list(dict.fromkeys(pieces[name] for name in names))
            whole = len(owners) == 1 and owners[0].names == names
            flat = owners[0].buffer if whole else torch.cat([self._piece(pieces[name], name) for name in names])
            self._issue(names, flat)
            self._land(1)

    def _piece(self, arrival: _Arrival, name: str) -> Tensor:
        """Where a tensor lies in its bucket, flat."""
        start = 0
        for before in arrival.names:
            if before == name:
                break
            start += self._infos[before].elements
        return arrival.buffer.narrow(0, start, self._infos[name].elements)

    def _issue(self, names: tuple[str, ...], flat: Tensor) -> None:
        parts = (self._coded if self._frozen else self._dense).get(names)
        if parts is None:
            parts = self._dense[names] = self._make(names, Dense())
        if parts.elements != flat.numel():
            raise ExchangeError(
                f"{names[0]!r} comes with {flat.numel()} elements, where there should be {parts.elements}"
            )
        scale = None if self._scaler is None else self._scaler._scale
        if scale is not None:
            scale = scale.to(self.lane.device, non_blocking=True)
        group, works = self.world.groups[0], []
        for part in parts.begin(flat, self.steps, scale, self.lane.upload):
            with self._said(parts, part):
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
                with self._said(parts, part):
                    work.wait()
            bad = parts.end(flat, self._tests)
            if bad is not None:
                self._void.logical_or_(bad)
            self._hand_back(parts, flat)

    @contextlib.contextmanager
    def _said(self, parts: Parts, part: Collective) -> Iterator[None]:
        """An error of a collective says which one it was."""
        try:
            yield
        except RuntimeError as error:
            place = f"tensors from {parts.names[0]!r} on, step {self.dense_steps + self.steps}"
            raise ExchangeError(f"{place}, {part.name}, rank {self.world.rank}: {error}") from error

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
        skip_void_steps(optimizer, self)

    def stats(self) -> dict[str, Any]:
        """Numbers of this rank: steps, and the bytes that it handed to collectives in the last one. The host waits for it."""
        residuals = self.residuals().values()
        return {
            "codec": str(self.strategy),
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
        return stream_state.write(self._meta(), self.residuals())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state of this rank, between two steps. Local; what does not fit is refused, and nothing loaded."""
        self._take(*self._prepare(state))

    def save(self, folder: files.Where) -> None:
        """Write `state_dict()` to a file of this rank, whole or not at all. Every rank calls it; not a collective."""
        files.write(
            folder, files.name_of(self.world.rank, self.world.size), self.state_dict(), self.steps + self.dense_steps
        )

    def load(self, where: files.Where | Sequence[files.Where]) -> None:
        """Go on from files of `save`. **A collective**: all ranks load, from the same step, or none does."""

        def prepare() -> tuple[tuple[Meta, dict[tuple[str, ...], Parts]], dict[str, Any]]:
            meta, coded = self._prepare(files.read(where, [self.world.rank], self.world.size))
            return (meta, coded), {"steps of the state": meta.steps + meta.dense_steps}

        with on(self.lane.device):  # NCCL uses the current device
            prepared = load_alike(prepare, partial(agree, self.world.parent))
        self._take(*prepared)

    def _meta(self) -> Meta:
        return Meta(
            format=stream_state.FORMAT,
            versions={"thinwire": __version__, "torch": str(torch.__version__)},
            codec=str(self.strategy),
            world=self.world.size,
            rank=self.world.rank,
            tensors={tensor.name: list(tensor.shape) for tensor in self.tensors},
            dtypes={tensor.name: tensor.dtype for tensor in self.tensors},
            steps=self.steps,
            dense_steps=self.dense_steps,
            compresses=self._frozen,
            partition=[list(names) for names in self._partition or ()],
        )

    def _prepare(self, state: Mapping[str, Any]) -> tuple[Meta, dict[tuple[str, ...], Parts]]:
        """Read a state, and lay out what it says, without a change to this wire."""
        if self._arrivals:
            raise StateError("a step is under way: load between two of them")
        meta = stream_state.read(state, self._meta())
        coded = {tuple(names): self._make(tuple(names), self.codec) for names in meta.partition if meta.compresses}
        stream_state.fill(dict(_named(coded)), state, meta)
        return meta, coded

    def _take(self, meta: Meta, coded: dict[tuple[str, ...], Parts]) -> None:
        self.lane.join()  # the old residuals may still be in use
        self._coded, self._frozen = coded, meta.compresses
        self._partition = [tuple(names) for names in meta.partition] or None
        self.steps, self.dense_steps = meta.steps, meta.dense_steps
        self._dense.clear()

    def close(self) -> None:
        """Give up the process group of this wire. The job cannot go on with it."""
        if self.error is None:
            self.error = WireClosed("it was closed")
            self.lane.synchronize()
        self.world.close()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a wire on CUDA has no {name!r}; it has: explain, stats, state_dict, load_state_dict, save, load, residuals, "
            "guard, skipped_last_step, close"
        )


def _named(coded: Mapping[Any, Parts]) -> Iterator[tuple[str, Tensor]]:
    for parts in coded.values():
        for run in parts.kept:
            yield from run.named()


def _exchange_bucket(state: StreamWire, bucket: GradBucket) -> Future[torch.Tensor]:
    return state.on_bucket(bucket)
