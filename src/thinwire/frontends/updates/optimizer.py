"""`LocalUpdates`: every rank steps for itself, and what travels is the update, not the gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ...codecs import Codec, RandomBlock, parse
from ...engine import files
from ...engine.agree import agree, problem_of, take_turns
from ...engine.exchange import Exchange
from ...engine.layout import Exclude, excluded
from ...errors import AttachError, ExchangeError, StateError, ThinwireError
from ...feedback import Balance, Detached
from ...log import logger, set_up
from ...schemes.world import LocalWorld, TorchWorld
from . import blocks, checkpoint, general
from .replica import Replica

Where = Literal["shared", "settled"]


class LocalUpdates(Optimizer):
    """Local steps of any torch optimizer, whose updates are exchanged through a codec with (detached) error feedback.

    optimizer      a torch optimizer, made as always; schedulers may be given it or this object
    model          its module; a DDP around it no longer averages gradients
    codec          what is sent of the updates: `RandomBlock(64)`, any other codec, or a text
    feedback       `Detached(0.3)`, `Detached("auto")`, `Detached(1)` (SAEF, PSync) or `Plain()` (EF)
    period         steps between exchanges
    process_group  the ranks; or a `LocalWorld(n)`, with a list of n optimizers and one of n models
    exclude        shell patterns on parameter names, or a function of the name: these tensors are sent whole
    min_elements   tensors with fewer elements are sent whole
    overlap        send while backward still runs, where SGD and random blocks allow it

    Making one is a collective; it begins with the weights of rank 0. The model x that ranks share is kept explicitly,
    equal on all ranks bit for bit. Between steps the parameters hold this rank's own x - strength * e, e being what it
    has not sent: to evaluate or to save the model, use `at`.
    """

    _step_supports_amp_scaling = True  # a GradScaler then lets `step` decide, because all ranks must decide alike

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        model: nn.Module | Sequence[nn.Module],
        codec: Codec | str,
        feedback: Detached | None = None,
        period: int = 1,
        process_group: dist.ProcessGroup | LocalWorld | None = None,
        *,
        exclude: Exclude = (),
        min_elements: int = 512,
        overlap: bool = True,
        timeout: timedelta | None = None,
    ) -> None:
        set_up()
        error: str | None = None
        facts: dict[str, Any] = {}
        try:
            self.codec = parse(codec) if isinstance(codec, str) else codec
            self.feedback = feedback if feedback is not None else Detached()
            self.period = period
            self._balance = Balance(self.feedback)
            self._replicas = _replicas(optimizer, model, process_group)
            self._check()
            one_pass = all(blocks.fits(replica, self.codec) for replica in self._replicas)
            tensors = [slot.info for slot in self._replicas[0].slots]
            facts = {
                "codec": str(self.codec),
                "feedback": repr(self.feedback),
                "optimizer": type(self._replicas[0].optimizer).__name__,
                "one pass": one_pass,
                "tensors": tensors,
                "buffers": list(self._replicas[0].buffers),
                "excluded": excluded(tensors, exclude),
                "options": (period, min_elements, overlap),
            }
        except Exception as problem:  # of any kind: the other ranks wait to hear of it
            if isinstance(process_group, LocalWorld):
                raise
            error = problem_of(problem)
        if not isinstance(process_group, LocalWorld):
            agree(process_group, facts, error)
            if one_pass:
                take_turns(process_group, blocks.rehearse, "the kernels of local updates do not compile")
        _spread(self._replicas, process_group)
        for replica in self._replicas:
            replica.prepare()
        self._way: blocks.Blocks | general.General
        options: dict[str, Any] = {"exclude": exclude, "min_elements": min_elements, "timeout": timeout}
        if one_pass:
            assert isinstance(self.codec, RandomBlock)
            self._way = blocks.Blocks(
                self._replicas, self.codec, self._balance, process_group, overlap=overlap, **options
            )
        else:
            self._way = general.General(self._replicas, self.codec, self._balance, process_group, **options)
        self.steps = self.skipped = self.local_skipped = 0
        self._local = 0
        self._place: str | None = None
        self._failure: BaseException | None = None
        self._compared = True
        # All that `Optimizer.__init__` does, except for parameter groups of its own.
        self.__setstate__({"defaults": self._replicas[0].optimizer.defaults})
        self._expect()
        self._announce()

    def _check(self) -> None:
        if not isinstance(self.codec, Codec):
            raise AttachError(
                f"{self.codec!r} is not a codec: give thinwire.RandomBlock(64), or a text such as 'randomblock(ratio=64)'"
            )
        if not isinstance(self.feedback, Detached):
            raise AttachError(f"{self.feedback!r} is not a feedback: give thinwire.Detached(0.3) or thinwire.Plain()")
        if not (isinstance(self.period, int) and self.period >= 1):
            raise AttachError(f"the period is a number of steps, at least 1, not {self.period!r}")
        general.check(self.codec, self._balance)

    def _announce(self) -> None:
        if self.exchange.world.members[0] != 0:
            return
        optimizer = type(self._replicas[0].optimizer).__name__
        way = "one pass over memory" if isinstance(self._way, blocks.Blocks) else "general path"
        logger.info(
            "local updates of %s through %s, %r, an exchange every %s on %d ranks; %s",
            optimizer, self.codec, self.feedback, "step" if self.period == 1 else f"{self.period} steps",
            self.exchange.world.size, way,
        )  # fmt: skip
        if not isinstance(self._replicas[0].optimizer, SGD):
            logger.warning("local updates of %s are experimental: only SGD is covered by theory and papers", optimizer)
        if self.exchange.world.size == 1:
            logger.warning("world size is 1: the shared model still follows block by block, an average over steps")

    # -- an optimizer, to others ---------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the optimizer inside; of all of them with a `LocalWorld`."""
        return [group for replica in self._replicas for group in replica.optimizer.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        if len(self._replicas) == 1:
            return self._replicas[0].optimizer.state
        return {key: value for replica in self._replicas for key, value in replica.optimizer.state.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise AttachError("parameters cannot be added later: make a new LocalUpdates")

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for replica in self._replicas:
            for slot in replica.slots:
                if slot.mastered:
                    slot.parameter.grad = None

    @property
    def exchange(self) -> Exchange:
        """What carries the updates."""
        return self._way.exchange

    @property
    def strength(self) -> float:
        """The strength in use: parameters are x - strength * e."""
        return self._balance.strength

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A local step, and an exchange at the end of a period.

        A gradient that is not finite on any rank makes a step with an exchange void on all of them: nothing changes, and
        the next step tries again. In the other steps of a period only the rank that has it skips.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._usable()
        if self._place is not None:
            raise ExchangeError(f"step() inside of at({self._place!r}): the parameters are not those to be trained")
        for replica in self._replicas:
            replica.refuse_newcomers()
            replica.optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers on it look at
        scale, bad = self._scaler()
        with self._closing():
            self._compare()
            if self._local + 1 < self.period:
                taken = self._way.local(bad, scale)
                self.local_skipped += taken.count(False)
                self._local += 1
            elif self._way.step(bad, scale):
                self._local = 0
            else:
                self.skipped += 1
        self.steps += 1
        self._expect()
        return loss

    def _compare(self) -> None:
        """In the first step after a load, which is local: whether all ranks have loaded the same one."""
        if not self._compared and isinstance(self.exchange.world, TorchWorld):
            try:
                agree(self.exchange.world.parent, {"step": self.steps, "draws": self._way.draws, "local": self._local})
            except AttachError as error:
                raise ExchangeError(f"in the first step after a load: {error}") from None
        self._compared = True

    def _scaler(self) -> tuple[float, list[bool]]:
        """What a GradScaler left here: a factor that gradients must be multiplied with, and whether it met a bad one."""
        scale = getattr(self, "grad_scale", None)
        found = getattr(self, "found_inf", None)
        return 1.0 if scale is None else 1.0 / float(scale), [bool(found) for _ in self._replicas]

    def _expect(self) -> None:
        self._way.expects_exchange = self._place is None and self._local + 1 >= self.period

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """After an error in an exchange nothing more is sent."""
        try:
            yield
        except ThinwireError as error:
            self._failure = error
            raise

    def _usable(self) -> None:
        if self._failure is not None:
            raise ExchangeError(f"these local updates have failed: {self._failure}") from self._failure

    def _meet(self, purpose: str) -> None:
        """Come together with all ranks, for the same purpose."""
        self._usable()
        with self._closing():
            self._way.meet()
            if isinstance(self.exchange.world, TorchWorld):
                try:
                    agree(self.exchange.world.parent, {"purpose": purpose})
                except AttachError as error:
                    raise ExchangeError(str(error)) from error

    # -- where to evaluate ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def at(self, where: Where, *, buffers: bool = True) -> Iterator[None]:
        """Let the parameters be those of a model to evaluate or to save; afterwards they are as before, bit for bit.

        "shared"   x, the DEF-A model: local and free
        "settled"  x - mean(e), the DEF model: one dense all-reduce, so every rank must enter

        If the model has floating buffers (running statistics of BatchNorm), they are those of this rank's own batches:
        inside, they are averaged over ranks, and then every rank must enter for "shared" too. `buffers=False` leaves them
        alone.
        """
        if where not in ("shared", "settled"):
            raise ValueError(f"at({where!r}): there is 'shared' (x, DEF-A) and 'settled' (x - mean error, DEF)")
        if self._place is not None:
            raise ExchangeError(f"at({where!r}) inside of at({self._place!r})")
        averages = buffers and bool(self._replicas[0].buffers)
        if where == "settled" or averages:
            self._meet(f"at({where!r}){' and means of buffers' if averages else ''}")
        # In the middle of a period the parameters cannot be computed from x and e.
        keep = self._local > 0
        points = [[slot.point.detach().clone() if keep else None for slot in r.slots] for r in self._replicas]
        kept = [{name: buffer.clone() for name, buffer in r.buffers.items()} for r in self._replicas]
        self._place = where
        self._expect()
        try:
            with torch.no_grad(), self._closing():
                self._show(where)
                if averages:
                    for name, means in self.mean_buffers().items():
                        for replica, mean in zip(self._replicas, means, strict=True):
                            replica.buffers[name].copy_(mean)
            yield
        finally:
            with torch.no_grad():
                for replica, errors, own, old in zip(self._replicas, self._way.errors, points, kept, strict=True):
                    for slot, error, point in zip(replica.slots, errors, own, strict=True):
                        slot.write(general.detached(slot.shared, error, self.strength) if point is None else point)
                    for name, buffer in old.items() if averages else ():
                        replica.buffers[name].copy_(buffer)
            self._place = None
            self._expect()

    def _show(self, where: Where) -> None:
        if where == "shared":
            for replica in self._replicas:
                for slot in replica.slots:
                    slot.write(slot.shared)
            return
        for index in range(len(self._replicas[0].slots)):
            for replica, value in zip(self._replicas, self.settled(index), strict=True):
                replica.slots[index].write(value)

    def settled(self, index: int) -> list[Tensor]:
        """x - mean(e) of one parameter, for each replica of this process. A collective."""
        pending = [self._way.pending(r, index) for r in range(len(self._replicas))]
        shared = [replica.slots[index].shared for replica in self._replicas]
        if any(error is None for error in pending):
            return [x.clone() for x in shared]
        means = [error.clone() for error in pending if error is not None]
        self.exchange.average_(means)
        return [x - mean for x, mean in zip(shared, means, strict=True)]

    def mean_buffers(self) -> dict[str, list[Tensor]]:
        """The floating buffers, averaged over ranks in float32, for each replica of this process. A collective."""
        result = {}
        for name in self._replicas[0].buffers:
            result[name] = [replica.buffers[name].float().contiguous().clone() for replica in self._replicas]
            self.exchange.average_(result[name])
        return result

    # -- numbers, states -----------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Numbers of this rank; bytes are means over steps, exchanges or not."""
        bytes_ = sum(wire.runner.statistics.bytes for wire in self._way.wires if wire.runner is not None)
        errors = [error for error in self._way.errors[0] if error is not None]
        return {
            "codec": str(self.codec),
            "feedback": repr(self.feedback),
            "world": self.exchange.world.size,
            "steps": self.steps,
            "exchanges": self._way.draws,
            "skipped": self.skipped,
            "local_skipped": self.local_skipped,
            "bytes_per_step": bytes_ / max(self.steps, 1),
            "strength": self.strength,
            "best_strength": self._balance.measured,
            "residual_norm": float(sum(error.double().square().sum() for error in errors)) ** 0.5,
        }

    def state_dict(self, kind: Literal["exact", "folded"] = "exact") -> dict[str, Any]:
        """The state to go on from.

        "exact"   of this rank, for the same number of ranks and the same bits. Local, never a collective; every rank saves
        "folded"  the same on all ranks, for any number of them: x := x - mean(e), nothing pending, the optimizer's state
                  averaged. A collective. One rank may save it, all must load it.
        """
        if kind == "exact":
            return checkpoint.exact(self)
        if kind != "folded":
            raise ValueError(f"state_dict({kind!r}): there is 'exact' and 'folded'")
        if self._place is not None:
            raise ExchangeError(f"a folded state inside of at({self._place!r})")
        self._meet("state_dict('folded')")
        with torch.no_grad(), self._closing():
            return checkpoint.folded(self)

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a state of either kind. Local; refuses what does not fit, changing nothing.

        If the number of ranks has changed: from a folded state, or from a list with the exact ones of all old ranks.
        """
        if self._place is not None:
            raise ExchangeError(f"load_state_dict() inside of at({self._place!r})")
        with torch.no_grad():
            checkpoint.load(self, state_dict)
        self._expect()

    def save(self, folder: files.Where, kind: Literal["exact", "folded"] = "exact") -> None:
        """Write `state_dict(kind)` as safetensors files: one a rank, or one in all, each whole or not at all."""
        whole, world = self.state_dict(kind), self.exchange.world
        if kind == "folded":
            if world.members[0] == 0:
                files.write(folder, files.name_of(None, world.size), whole, self.steps)
            return
        for rank in world.members:
            own = {key: value for key, value in whole.items() if key.startswith((f"rank{rank}.", "shared."))}
            files.write(folder, files.name_of(rank, world.size), own, self.steps)

    def load(self, where: files.Where | Sequence[files.Where], *, key: str | None = None) -> None:
        """Go on from files of `save`, or from a checkpoint of `torch.distributed.checkpoint`.

        **A collective**: an error on all ranks if one of them cannot, or loads another step.
        """
        world, problem = self.exchange.world, None
        try:
            self.load_state_dict(files.read(where, world.members, world.size, key))
        except StateError as error:  # the other ranks wait to hear of it
            problem = error
        if isinstance(world, TorchWorld):
            try:
                agree(world.parent, {"steps of the state": self.steps}, str(problem) if problem is not None else None)
            except AttachError as error:
                raise problem or StateError(str(error)) from None
        if problem is not None:
            raise problem

    def close(self) -> None:
        """End the exchange thread and give up the process groups. The parameters stay as they are."""
        self._failure = self._failure or ExchangeError("they were closed")
        self._way.close()


def _replicas(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module | Sequence[nn.Module],
    process_group: dist.ProcessGroup | LocalWorld | None,
) -> list[Replica]:
    if not isinstance(process_group, LocalWorld):
        if isinstance(optimizer, Sequence) or not isinstance(model, nn.Module):
            raise AttachError("one optimizer and one model a process; lists of them are for a LocalWorld")
        return [Replica(model, optimizer)]
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not len(optimizers) == len(models) == process_group.size:
        raise AttachError(
            f"a LocalWorld({process_group.size}) needs as many optimizers ({len(optimizers)}) and models ({len(models)})"
        )
    replicas = [Replica(m, o) for m, o in zip(models, optimizers, strict=True)]
    for replica in replicas[1:]:
        if [slot.info for slot in replica.slots] != [slot.info for slot in replicas[0].slots]:
            raise AttachError("the models of a LocalWorld differ")
    return replicas


def _spread(replicas: Sequence[Replica], process_group: dist.ProcessGroup | LocalWorld | None) -> None:
    """All ranks begin with the weights and buffers of rank 0."""
    with torch.no_grad():
        for tensors in zip(*(replica.everything() for replica in replicas), strict=True):
            if isinstance(process_group, LocalWorld):
                for tensor in tensors[1:]:
                    tensor.copy_(tensors[0])
            else:
                whole = tensors[0].contiguous()
                dist.broadcast(whole, group=process_group, group_src=0)
                tensors[0].copy_(whole)
