"""The parts of one `LocalUpdates`: checked, agreed on with all ranks, and held together by an `UpdateJob`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..codecs import Codec, GatheredCodec, RandomBlock, parse
from ..comm.world import LocalWorld, TorchWorld, World
from ..engine.compiler import announced
from ..engine.consensus import agree, problem_of
from ..engine.layout import Exclude, excluded
from ..engine.warmup import take_turns
from ..errors import AttachError
from ..feedback import Balance, Detached
from ..log import logger
from . import blocks
from .generic import GenericBackend
from .pointer_table import compile_kernels
from .replica import Replica, broadcast, make_replicas


@dataclass
class UpdateJob:
    """The parts of a `LocalUpdates`, and its counts.

    replicas       the ranks of this process: one, or all of a `LocalWorld`
    backend        carries updates from gradients to parameters: in one pass over memory, or the generic way
    steps          calls of `step`
    skipped        steps with an exchange that were void on all ranks
    local_skipped  steps without an exchange that this rank skipped
    local          steps since the last exchange
    """

    codec: Codec
    period: int
    balance: Balance
    replicas: Sequence[Replica]
    backend: blocks.BlockBackend | GenericBackend
    steps: int = 0
    skipped: int = 0
    local_skipped: int = 0
    local: int = 0

    @property
    def world(self) -> World:
        return self.backend.exchange.world

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace one tensor of each replica by their plain mean over ranks. A collective."""
        self.backend.exchange.average_(tensors)

    def agree(self, facts: Mapping[str, Any], problem: str | None = None) -> None:
        """Raise `AttachError` on every rank if facts differ between ranks or one of them has a problem. A collective."""
        if isinstance(self.world, TorchWorld):
            agree(self.world.parent, facts, problem)


def make_job(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module | Sequence[nn.Module],
    codec: Codec | str,
    feedback: Detached,
    period: int,
    process_group: dist.ProcessGroup | LocalWorld | None,
    *,
    exclude: Exclude,
    min_elements: int,
    overlap: bool,
    timeout: timedelta | None,
) -> UpdateJob:
    """A job that starts from the weights of rank 0. A collective; the arguments are those of `LocalUpdates`."""
    error: str | None = None
    facts: dict[str, Any] = {}
    try:
        codec = parse(codec) if isinstance(codec, str) else codec
        balance = _check(codec, feedback, period)
        replicas = make_replicas(optimizer, model, process_group)
        one_pass = all(blocks.fits(replica, codec) for replica in replicas)
        tensors = [slot.info for slot in replicas[0].slots]
        facts = {
            "codec": str(codec),
            "feedback": repr(feedback),
            "optimizer": type(replicas[0].optimizer).__name__,
            "one pass": one_pass,
            "tensors": tensors,
            "buffers": list(replicas[0].buffers),
            "excluded": excluded(tensors, exclude),
            "options": (period, min_elements, overlap),
        }
    except Exception as problem:  # of any kind: the other ranks wait to agree
        if isinstance(process_group, LocalWorld):
            raise
        error = problem_of(problem)
    if not isinstance(process_group, LocalWorld):
        agree(process_group, facts, error)
        if one_pass:

            def work() -> None:
                with announced("local updates"):
                    compile_kernels()

            take_turns(process_group, work, "the kernels of local updates do not compile")
    broadcast(replicas, process_group)
    for replica in replicas:
        replica.prepare()
    options: dict[str, Any] = {"exclude": exclude, "min_elements": min_elements, "timeout": timeout}
    assert isinstance(codec, Codec)
    backend: blocks.BlockBackend | GenericBackend
    if one_pass and isinstance(codec, RandomBlock):
        backend = blocks.BlockBackend(replicas, codec, balance, process_group, overlap=overlap, **options)
    else:
        backend = GenericBackend(replicas, codec, balance, process_group, **options)
    job = UpdateJob(codec, period, balance, replicas, backend)
    _announce(job)
    return job


def _check(codec: object, feedback: object, period: object) -> Balance:
    if not isinstance(codec, Codec):
        raise AttachError(
            f"{codec!r} is not a codec: give thinwire.RandomBlock(64), or a text such as 'randomblock(ratio=64)'"
        )
    if not isinstance(feedback, Detached):
        raise AttachError(f"{feedback!r} is not a feedback: give thinwire.Detached(0.3) or thinwire.Plain()")
    if not (isinstance(period, int) and period >= 1):
        raise AttachError(f"the period is a number of steps, at least 1, not {period!r}")
    if feedback.automatic and (isinstance(codec, GatheredCodec) or not codec.keeps_residual):
        raise AttachError(
            f"Detached('auto') compares what ranks send of the same elements, but with {codec} every rank chooses its own: "
            "give a number, Detached(0.3), or take randomblock, randomk, micro or lowrank"
        )
    return Balance(feedback)


def _announce(job: UpdateJob) -> None:
    if job.world.local_ranks[0] != 0:
        return
    optimizer = job.replicas[0].optimizer
    logger.info(
        "local updates of %s through %s, %r, an exchange every %s on %d ranks; %s",
        type(optimizer).__name__, job.codec, job.balance.feedback, "step" if job.period == 1 else f"{job.period} steps",
        job.world.size, "one pass over memory" if job.backend.one_pass else "general path",
    )  # fmt: skip
    if not isinstance(optimizer, SGD):
        logger.warning(
            "local updates of %s are experimental: only SGD is covered by theory and papers", type(optimizer).__name__
        )
    if job.world.size == 1:
        logger.warning("world size is 1: the shared model still follows block by block, an average over steps")
