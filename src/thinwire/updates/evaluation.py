"""The models to evaluate or to save: the shared one, x, and the settled one, x - mean(residual)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from .job import UpdateJob
from .replica import detached

Point = Literal["shared", "settled"]


def pending(job: UpdateJob, r: int, index: int) -> Tensor | None:
    """What a replica has not sent of a slot, the steps since the last exchange included; None if it sends all at once."""
    slot, residual = job.replicas[r].slots[index], job.backend.residuals[r][index]
    if job.backend.one_pass or not job.local:
        return residual
    # The generic backend leaves those steps in the parameters.
    drift = detached(slot.shared, residual, job.balance.strength).sub_(slot.point.detach())
    return drift if residual is None else drift.add_(residual)


def settled(job: UpdateJob, index: int) -> list[Tensor]:
    """x - mean(residual) of one slot, for each replica of this process. A collective."""
    shared = [replica.slots[index].shared for replica in job.replicas]
    parts = [pending(job, r, index) for r in range(len(job.replicas))]
    means = [part.clone() for part in parts if part is not None]  # of all ranks or of none
    if not means:
        return [x.clone() for x in shared]
    job.average_(means)
    return [x - mean for x, mean in zip(shared, means, strict=True)]


def mean_buffers(job: UpdateJob) -> dict[str, list[Tensor]]:
    """The floating buffers, averaged over ranks in float32, for each replica of this process. A collective."""
    means = {}
    for name in job.replicas[0].buffers:
        means[name] = [replica.buffers[name].float().contiguous().clone() for replica in job.replicas]
        job.average_(means[name])
    return means


def show(job: UpdateJob, where: Point, *, averages: bool) -> None:
    """Set parameters to those of this model; with `averages`, floating buffers to their means over ranks."""
    for index in range(len(job.replicas[0].slots)):
        values = settled(job, index) if where == "settled" else [r.slots[index].shared for r in job.replicas]
        for replica, value in zip(job.replicas, values, strict=True):
            replica.slots[index].write(value)
    for name, means in mean_buffers(job).items() if averages else ():
        for replica, mean in zip(job.replicas, means, strict=True):
            replica.buffers[name].copy_(mean)


def restorer(job: UpdateJob, *, buffers: bool) -> Callable[[], None]:
    """What puts parameters back, and floating buffers if they are averaged, bit for bit.

    Parameters follow from x and residuals, except between two exchanges: then they are copied.
    """
    points = [[slot.point.detach().clone() for slot in r.slots] for r in job.replicas] if job.local else None
    old = [{name: b.clone() for name, b in r.buffers.items()} if buffers else {} for r in job.replicas]

    def restore() -> None:
        for r, replica in enumerate(job.replicas):
            residuals = job.backend.residuals[r]
            for i, slot in enumerate(replica.slots):
                start = detached(slot.shared, residuals[i], job.balance.strength)
                slot.write(start if points is None else points[r][i])
            for name, buffer in old[r].items():
                replica.buffers[name].copy_(buffer)

    return restore
