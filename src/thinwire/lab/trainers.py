"""Training loops of `bench converge`: a method on a task, with ranks in memory or real ones.

The gradients of all ranks of this process are computed in sequence with the same weights, then exchanged by the engine that
real jobs use. Local updates have one model per rank.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import traffic
from ..chains.chain import choose
from ..comm.world import LocalWorld
from ..engine.exchange import GROUP_BYTES, Exchange
from ..engine.layout import kinds_of
from ..errors import ThinwireError
from ..updates import LocalUpdates
from .method_spec import EXAMPLE, UpdatesSpec, parse_updates
from .netns import LabError
from .tasks import Task

REFERENCE = "dense"
ALIASES = {
    "fp32": "dense",
    "fp16": "cast(dtype='fp16')",
    "bf16": "cast(dtype='bf16')",
    "powersgd1": "lowrank(rank=1)",
    "powersgd4": "lowrank(rank=4)",
}
"""Other names of codecs, as in `bench step`."""

World = LocalWorld | dist.ProcessGroup | None


@dataclass(frozen=True)
class Method:
    """A codec or local updates, with an optional learning rate."""

    text: str
    name: str
    codec: str
    updates: UpdatesSpec | None = None
    lr: float | None = None

    @staticmethod
    def parse(text: str) -> Method:
        """`"micro(density=0.01)"`, `"updates(randomblock(ratio=64), 0)@lr=0.01"`."""
        name, _, own = text.rpartition("@lr=")
        lr: float | None = None
        if name:
            try:
                lr = float(own)
            except ValueError:
                lr = math.nan
            if not (lr > 0.0 and math.isfinite(lr)):
                raise LabError(f"{text!r}: what follows @lr= is a learning rate, as in 'micro@lr=0.05'")
        name = (name or text).strip()
        updates = parse_updates(name)
        codec = updates.codec if updates is not None else ALIASES.get(name, name)
        try:
            choose(codec)
        except ThinwireError as error:
            names = ", ".join(ALIASES)
            raise LabError(f"{error}; or one of {names}, or {EXAMPLE}") from None
        return Method(text.strip(), name, codec, updates, lr)

    @property
    def momentum(self) -> float:
        """Momentum applied by the codec instead of the optimizer."""
        return float(getattr(choose(self.codec)[0], "momentum", 0.0))

    def full(self) -> str:
        """The method with all parameters, including defaults."""
        chosen, chain = choose(self.codec)
        extra = f", {self.updates.feedback!r}, period={self.updates.period}" if self.updates else ""
        return f"{chosen!r}{' via ' + chain if chain else ''}{extra}{f' @lr={self.lr:g}' if self.lr else ''}"


@dataclass(frozen=True)
class Exclusions:
    """Tensors that are not compressed."""

    exclude: tuple[str, ...] = ()
    min_elements: int = 1024
    by_layer: bool = False
    """One group per tensor, so that bytes can be attributed to layers."""


class Trainer(abc.ABC):
    """A method on a task: `step`, `evaluate`, `state` and `load`."""

    wire: Exchange
    optimizer: torch.optim.Optimizer
    stateful: Mapping[str, Any]
    """The parts of its training state: all have `state_dict` and `load_state_dict`."""

    def __init__(
        self, task: Task, method: Method, seed: int, workers: int, world: World, exceptions: Exclusions
    ) -> None:
        self.task, self.method, self.seed, self.workers = task, method, seed, workers
        self.ranks: Sequence[int] = range(workers) if isinstance(world, LocalWorld) else [dist.get_rank()]
        self.done = 0
        self.support: float | None = None
        """Fraction of the compressed elements that were nonzero in the last mean."""

    def step(self) -> float:
        """A step of all ranks of this process; returns their mean loss."""
        recipe = self.task.recipe
        factor = self.method.lr / recipe.lr if self.method.lr else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = factor * recipe.rate_at(self.done)
        loss = self._step()
        self.done += 1
        return loss

    @abc.abstractmethod
    def _step(self) -> float:
        """Gradients, exchange and optimizer; returns the mean loss."""

    @abc.abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Loss and metric on all test data."""

    def state(self) -> dict[str, Any]:
        """The complete training state."""
        return {name: part.state_dict() for name, part in self.stateful.items()}

    def load(self, state: dict[str, Any]) -> None:
        for name, part in self.stateful.items():
            part.load_state_dict(state[name])

    def numbers(self) -> dict[str, float]:
        """Totals of this rank: bytes on its link, by the formulas of the collectives, and the norm of its residuals."""
        executor = self.wire.executor
        return {
            "link_bytes": executor.statistics.link_bytes,
            "residual_norm": executor.rank_states[0].residuals.norm(),
        }

    def bytes_by_group(self) -> dict[str, float]:
        """Total bytes on the link by the names of the tensors of a group."""
        executor = self.wire.executor
        pairs = zip(executor.layout.groups, executor.statistics.groups, strict=True)
        return {",".join(slot.name for slot in group.slots): sum(seen.traffic.values()) for group, seen in pairs}

    def _clip(self, gradient: Tensor) -> None:
        """Clip a gradient before error feedback, which bounds what is added to a residual."""
        if self.task.recipe.clip is not None:
            norm = float(gradient.norm())
            if norm > self.task.recipe.clip:
                gradient.mul_(self.task.recipe.clip / norm)

    def close(self) -> None:
        self.wire.close()


class GradientTrainer(Trainer):
    """Exchanges gradients with a codec, then takes one optimizer step on a model shared by all ranks."""

    def __init__(
        self, task: Task, method: Method, seed: int, workers: int, world: World, exceptions: Exclusions
    ) -> None:
        super().__init__(task, method, seed, workers, world, exceptions)
        self.model = task.model(seed).to(memory_format=task.layout)  # type: ignore[call-overload]
        self.optimizer = task.recipe.make(self.model.parameters(), corrected=method.momentum)
        self.named = dict(self.model.named_parameters())
        self.wire = Exchange(
            self.named,
            method.codec,
            world,
            exclude=exceptions.exclude,
            min_elements=exceptions.min_elements,
            group_bytes=1 if exceptions.by_layer else GROUP_BYTES,
        )
        self._flat = [torch.zeros(sum(p.numel() for p in self.named.values())) for _ in self.ranks]
        sizes = [parameter.numel() for parameter in self.named.values()]
        self._gradients = [
            {
                name: piece.view_as(p)
                for (name, p), piece in zip(self.named.items(), torch.split(flat, sizes), strict=True)
            }
            for flat in self._flat
        ]
        self.stateful = {"model": self.model, "optimizer": self.optimizer, "exchange": self.wire}
        groups = self.wire.executor.layout.groups
        self._coded = [
            slot.name for group in groups for slot in group.slots if slot.role == "coded" and not group.direct
        ]

    def _step(self) -> float:
        total = 0.0
        for rank, flat, gradients in zip(self.ranks, self._flat, self._gradients, strict=True):
            self.optimizer.zero_grad()
            loss = self.task.loss(self.model, self.task.batch(self.seed, self.done, rank, self.workers))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            for name, parameter in self.named.items():
                assert parameter.grad is not None
                gradients[name].copy_(parameter.grad)
            self._clip(flat)
        self.wire.reduce_(self._gradients if isinstance(self.wire.world, LocalWorld) else self._gradients[0])
        for name, parameter in self.named.items():
            assert parameter.grad is not None
            parameter.grad.copy_(self._gradients[0][name])
        self.optimizer.step()
        return total / len(self.ranks)

    def look(self) -> None:
        """Measure the density of the last mean."""
        counts = [(self._gradients[0][name] != 0).sum().item() for name in self._coded]
        elements = sum(self.named[name].numel() for name in self._coded)
        self.support = sum(counts) / elements if elements else None

    def evaluate(self) -> dict[str, float]:
        loss, value = self.task.evaluate(self.model)
        return {"test_loss": loss, "value": value}


class LocalUpdateTrainer(Trainer):
    """Local updates: every rank steps with its own gradient, and updates are exchanged."""

    def __init__(
        self, task: Task, method: Method, seed: int, workers: int, world: World, exceptions: Exclusions
    ) -> None:
        super().__init__(task, method, seed, workers, world, exceptions)
        assert method.updates is not None
        self.models = [task.model(seed) for _ in self.ranks]
        inner = [task.recipe.make(model.parameters()) for model in self.models]
        local = isinstance(world, LocalWorld)
        self.updates = LocalUpdates(
            inner if local else inner[0],
            self.models if local else self.models[0],
            method.codec,
            feedback=method.updates.feedback,
            period=method.updates.period,
            process_group=world,
            exclude=exceptions.exclude,
            min_elements=exceptions.min_elements,
        )
        self.wire, self.optimizer = self.updates.exchange, self.updates
        self.stateful = {"updates": self.updates}
        self._evaluating = 0.0

    def _step(self) -> float:
        total = 0.0
        self.updates.zero_grad()
        for rank, model in zip(self.ranks, self.models, strict=True):
            loss = self.task.loss(model, self.task.batch(self.seed, self.done, rank, self.workers))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            if self.task.recipe.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.task.recipe.clip)
        self.updates.step()
        return total / len(self.ranks)

    def evaluate(self) -> dict[str, float]:
        """`value` is the metric of the settled model (DEF), `value_shared` that of the shared model (DEF-A)."""
        found, before = {}, self._link_bytes()
        for where, end in (("settled", ""), ("shared", "_shared")):
            with self.updates.at(where):  # type: ignore[arg-type]
                found[f"test_loss{end}"], found[f"value{end}"] = self.task.evaluate(self.models[0])
        self._evaluating += self._link_bytes() - before  # ranks exchange to find the settled model: no step's bytes
        return found

    def _link_bytes(self) -> float:
        return sum(wire.executor.statistics.link_bytes for wire in self.updates._backend.wires)

    def numbers(self) -> dict[str, float]:
        residual_norm = self.updates.stats()["residual_norm"]
        return {"link_bytes": self._link_bytes() - self._evaluating, "residual_norm": residual_norm}

    def close(self) -> None:
        self.updates.close()


def make(
    task: Task, method: Method, seed: int, workers: int, world: World = None, exceptions: Exclusions = Exclusions()
) -> Trainer:
    kind: type[Trainer] = GradientTrainer if method.updates is None else LocalUpdateTrainer
    return kind(task, method, seed, workers, world, exceptions)


def rates_by_kind(trainer: Trainer, bytes_by_group: dict[str, float], steps: int) -> dict[str, float]:
    """By kind of layer, how many times fewer bytes than dense the link carried; needs one group per tensor."""
    if not isinstance(trainer, GradientTrainer):
        return {}
    kinds = kinds_of(trainer.model)
    sizes = {name: traffic.dense(p.numel(), trainer.workers) * steps for name, p in trainer.named.items()}
    whole: dict[str, float] = {}
    sent: dict[str, float] = {}
    for name, size in bytes_by_group.items():
        if name in kinds and name in trainer._coded:
            whole[kinds[name]] = whole.get(kinds[name], 0.0) + sizes[name]
            sent[kinds[name]] = sent.get(kinds[name], 0.0) + size
    return {kind: whole[kind] / sent[kind] for kind in whole if sent[kind]}
