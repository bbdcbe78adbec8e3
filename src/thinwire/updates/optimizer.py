"""`LocalUpdates`: an optimizer that steps locally on every rank and exchanges updates instead of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..codecs import Codec
from ..comm.world import LocalWorld
from ..engine import files
from ..engine.consensus import load_alike
from ..engine.exchange import Exchange
from ..engine.layout import Exclude
from ..errors import AttachError, ExchangeError, ThinwireError
from ..feedback import Detached
from ..log import set_up
from . import checkpoint, evaluation, restore
from .job import make_job


class LocalUpdates(Optimizer):
    """Local steps of any torch optimizer, whose updates are exchanged through a codec with (detached) error feedback.

    optimizer      a torch optimizer, made as usual; schedulers take it or this object
    model          its module; a DDP around it no longer averages gradients
    codec          what is sent of the updates: `RandomBlock(64)`, any other codec, or its text
    feedback       `Detached(0.3)`, `Detached("auto")`, `Detached(1)` (SAEF, PSync) or `Plain()` (EF)
    period         steps between exchanges
    process_group  the ranks; or a `LocalWorld(n)`, with a list of n optimizers and one of n models
    exclude        shell patterns on parameter names, or a function of the name: these tensors are sent whole
    min_elements   tensors with fewer elements are sent whole
    overlap        send while backward still runs, where SGD and random blocks allow it

    Creating one is a collective; training starts from the weights of rank 0. The model x that ranks share is kept
    explicitly, equal on all ranks bit for bit. Between steps the parameters hold this rank's x - strength * residual,
    the residual being what it has not sent: to evaluate or to save the model, use `at`.
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
        self.feedback, self.period = Detached() if feedback is None else feedback, period
        self._job = make_job(
            optimizer, model, codec, self.feedback, period, process_group,
            exclude=exclude, min_elements=min_elements, overlap=overlap, timeout=timeout,
        )  # fmt: skip
        self.codec, self._backend, self._replicas = self._job.codec, self._job.backend, self._job.replicas
        self._point: evaluation.Point | None = None
        self._failure: BaseException | None = None
        self._compared = True
        # All that `Optimizer.__init__` does, except for making parameter groups.
        self.__setstate__({"defaults": self._replicas[0].optimizer.defaults})
        self._expect()

    # -- the interface of an optimizer ---------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the inner optimizer; of all of them with a `LocalWorld`."""
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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A local step, and an exchange at the end of a period.

        A gradient that is not finite on any rank makes a step with an exchange void on all of them: nothing changes, and
        the next step tries again. In the other steps of a period only the affected rank skips.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_failed()
        self._refuse_inside("step()", ": the parameters are not those to be trained")
        for replica in self._replicas:
            replica.refuse_new_parameters()
            replica.optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers on it look at
        # What a GradScaler left here: what gradients were multiplied with, and whether one of them overflowed.
        scale, found = getattr(self, "grad_scale", None), bool(getattr(self, "found_inf", None))
        scale, overflows = 1.0 if scale is None else 1.0 / float(scale), [found for _ in self._replicas]
        job = self._job
        with self._closing():
            self._compare()
            if job.local + 1 < self.period:
                job.local_skipped += self._backend.local_step(overflows, scale).count(False)
                job.local += 1
            elif self._backend.exchange_step(overflows, scale):
                job.local = 0
            else:
                job.skipped += 1
        job.steps += 1
        self._expect()
        return loss

    # -- conditions of a step ------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        """In the first step after a load, which is local: check that all ranks have loaded the same state."""
        if not self._compared:
            try:
                self._job.agree({"step": self.steps, "draws": self._backend.round, "local": self._job.local})
            except AttachError as error:
                raise ExchangeError(f"in the first step after a load: {error}") from None
        self._compared = True

    def _expect(self) -> None:
        self._backend.expects_exchange = self._point is None and self._job.local + 1 >= self.period

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """After an error in an exchange nothing more is sent."""
        try:
            yield
        except ThinwireError as error:
            self._failure = error
            raise

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise ExchangeError(f"these local updates have failed: {self._failure}") from self._failure

    def _refuse_inside(self, call: str, reason: str = "") -> None:
        if self._point is not None:
            raise ExchangeError(f"{call} inside of at({self._point!r}){reason}")

    def _rendezvous(self, purpose: str) -> None:
        """Wait for all ranks, and check that they have the same purpose."""
        self._refuse_failed()
        with self._closing():
            self._backend.rendezvous()
            try:
                self._job.agree({"purpose": purpose})
            except AttachError as error:
                raise ExchangeError(str(error)) from error

    # -- evaluation ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def at(self, where: evaluation.Point, *, buffers: bool = True) -> Iterator[None]:
        """Set the parameters to those of a model to evaluate or to save; afterwards they are as before, bit for bit.

        "shared"   x, the DEF-A model: local and free
        "settled"  x - mean(residual), the DEF model: one dense all-reduce, so every rank must enter

        If the model has floating buffers (running statistics of BatchNorm), they are those of this rank's own batches:
        inside, they are averaged over ranks, and then every rank must enter for "shared" too. `buffers=False` leaves them
        alone.
        """
        if where not in ("shared", "settled"):
            raise ValueError(f"at({where!r}): there is 'shared' (x, DEF-A) and 'settled' (x - mean residual, DEF)")
        self._refuse_inside(f"at({where!r})")
        averages = buffers and bool(self._replicas[0].buffers)
        if where == "settled" or averages:
            self._rendezvous(f"at({where!r}){' and means of buffers' if averages else ''}")
        restore_all = evaluation.restorer(self._job, buffers=averages)
        self._point = where
        self._expect()
        try:
            with torch.no_grad(), self._closing():
                evaluation.show(self._job, where, averages=averages)
            yield
        finally:
            with torch.no_grad():
                restore_all()
            self._point = None
            self._expect()

    def settled(self, index: int) -> list[Tensor]:
        """x - mean(residual) of one parameter, for each replica of this process. A collective."""
        return evaluation.settled(self._job, index)

    def mean_buffers(self) -> dict[str, list[Tensor]]:
        """The floating buffers, averaged over ranks in float32, for each replica of this process. A collective."""
        return evaluation.mean_buffers(self._job)

    # -- numbers -------------------------------------------------------------------------------------------------------

    @property
    def exchange(self) -> Exchange:
        """What carries the updates."""
        return self._backend.exchange

    @property
    def strength(self) -> float:
        """The strength in use: parameters are x - strength * residual."""
        return self._job.balance.strength

    @property
    def steps(self) -> int:
        """Calls of `step`."""
        return self._job.steps

    @property
    def skipped(self) -> int:
        """Steps with an exchange that were void on all ranks."""
        return self._job.skipped

    @property
    def local_skipped(self) -> int:
        """Steps without an exchange that this rank skipped."""
        return self._job.local_skipped

    def stats(self) -> dict[str, Any]:
        """Numbers of this rank; bytes, handed over and on the link, are means over steps with or without an exchange."""
        statistics = [wire.executor.statistics for wire in self._backend.wires]
        residuals = [residual for residual in self._backend.residuals[0] if residual is not None]
        return {
            "codec": str(self.codec),
            "feedback": repr(self.feedback),
            "world": self._job.world.size,
            "steps": self.steps,
            "exchanges": self._backend.round,
            "skipped": self.skipped,
            "local_skipped": self.local_skipped,
            "bytes_per_step": sum(each.bytes for each in statistics) / max(self.steps, 1),
            "link_bytes_per_step": sum(each.link_bytes for each in statistics) / max(self.steps, 1),
            "strength": self.strength,
            "best_strength": self._job.balance.measured,
            "residual_norm": float(sum(residual.double().square().sum() for residual in residuals)) ** 0.5,
        }

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self, kind: Literal["exact", "folded"] = "exact") -> dict[str, Any]:
        """The state to resume from.

        "exact"   of this rank, for the same number of ranks and the same bits. Local, never a collective; every rank saves
        "folded"  the same on all ranks, for any number of them: x := x - mean(residual), residuals empty, the optimizer's
                  state averaged. A collective. One rank may save it, all must load it.
        """
        if kind == "exact":
            return checkpoint.exact(self._job)
        if kind != "folded":
            raise ValueError(f"state_dict({kind!r}): there is 'exact' and 'folded'")
        self._refuse_inside("a folded state")
        self._rendezvous("state_dict('folded')")
        with torch.no_grad(), self._closing():
            return checkpoint.folded(self._job)

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume from a state of either kind. Local; refuses what does not fit, changing nothing.

        If the number of ranks has changed: from a folded state, or from a list with the exact ones of all old ranks.
        """
        self._refuse_inside("load_state_dict()")
        with torch.no_grad():
            restore.load(self._job, state_dict)
        self._compared = False
        self._expect()

    def save(self, folder: files.Where, kind: Literal["exact", "folded"] = "exact") -> None:
        """Write `state_dict(kind)` as safetensors files: one per rank, or one in all, each complete or not at all."""
        files.write_all(folder, self.state_dict(kind), self._job.world, self.steps, shared=kind == "folded")

    def load(self, where: files.Where | Sequence[files.Where], *, key: str | None = None) -> None:
        """Resume from files of `save`, or from a checkpoint of `torch.distributed.checkpoint`.

        **A collective**: an error on all ranks if one of them cannot, or loads another step.
        """
        world = self._job.world

        def load() -> tuple[None, dict[str, Any]]:
            self.load_state_dict(files.read(where, world.local_ranks, world.size, key))
            return None, {"steps of the state": self.steps}

        load_alike(load, self._job.agree)

    def close(self) -> None:
        """End the exchange thread and give up the process groups. The parameters stay as they are."""
        self._failure = self._failure or ExchangeError("they were closed")
        self._backend.close()
