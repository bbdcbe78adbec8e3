"""DDP communication hooks to compare with: torch's own, and two as commonly written."""
# No postponed annotations: DDP checks a hook's annotations and rejects strings.

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

ONE_BUCKET_MB = 1 << 20
"""PowerSGD issues collectives from callbacks: on gloo, the order of two buckets may differ between ranks and deadlock."""

Hook = Callable[[Any, GradBucket], Future[Tensor]]


@dataclass(frozen=True)
class Peer:
    """A communication hook, the factory of its state, and its requirements on DDP."""

    hook: Hook
    state: Callable[[], Any] = lambda: None
    one_bucket: bool = False


def noop(state: None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Sends nothing: the rest is DDP's own step time, and traffic other than gradients."""
    future = Future[torch.Tensor]()
    future.set_result(bucket.buffer())
    return future


def bf16(state: None, bucket: GradBucket) -> Future[torch.Tensor]:
    """torch's hook. DDP rejects it by name without NCCL, although gloo can add bfloat16."""
    return bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


@dataclass
class Feedback:
    """Residuals by bucket. DDP rebuilds buckets after the first step, which drops the residuals."""

    density: float = 1.0
    kept: dict[int, Tensor] = field(default_factory=dict)

    def add_to(self, bucket: GradBucket) -> Tensor:
        """Add the residual to the gradient, in the bucket's memory."""
        gradient = bucket.buffer()
        kept = self.kept.get(bucket.index())
        if kept is not None and kept.numel() == gradient.numel():
            gradient.add_(kept)
        return gradient

    def keep(self, bucket: GradBucket, rest: Tensor) -> None:
        self.kept[bucket.index()] = rest


def _gather(gradient: Tensor, message: Tensor, add: Callable[[Tensor, int], object]) -> Future[torch.Tensor]:
    """Gather all messages, then call `add(message, world)` for each on a cleared gradient."""
    world = dist.get_world_size()
    everyone = message.new_empty(world * message.numel())

    def decode(future: Future[Any]) -> Tensor:
        future.value()
        gradient.zero_()
        for part in everyone.view(world, -1):
            add(part, world)
        return gradient

    gathered = dist.all_gather_into_tensor(everyone, message, async_op=True)
    result: Future[Tensor] = gathered.get_future().then(decode)
    return result


def int8(state: Feedback, bucket: GradBucket) -> Future[torch.Tensor]:
    """One scale per bucket, 8 bits per value, gathered and added by every rank; the rounding error is the residual."""
    gradient = state.add_to(bucket)
    scale = (gradient.abs().max() / 127.0).clamp_min(1e-30)
    codes = torch.round(gradient / scale).to(torch.int8)
    state.keep(bucket, gradient - codes * scale)
    message = torch.cat([codes.view(torch.uint8), scale.reshape(1).view(torch.uint8)])

    def add(part: Tensor, world: int) -> None:
        gradient.add_(part[:-4].view(torch.int8) * (part[-4:].clone().view(torch.float32) / world))

    return _gather(gradient, message, add)


def topk(state: Feedback, bucket: GradBucket) -> Future[torch.Tensor]:
    """The largest values of a bucket with indices (32 bits each), gathered and added by every rank; the rest is kept."""
    gradient = state.add_to(bucket)
    count = max(1, int(gradient.numel() * state.density))
    indices = torch.topk(gradient.abs(), count, sorted=False).indices
    values = gradient[indices]
    rest = gradient.clone()
    rest[indices] = 0.0
    state.keep(bucket, rest)
    message = torch.cat([indices.to(torch.int32), values.view(torch.int32)])

    def add(part: Tensor, world: int) -> None:
        gradient.index_add_(0, part[:count], part[count:].view(torch.float32), alpha=1.0 / world)

    return _gather(gradient, message, add)


def _powersgd(rank: int) -> Peer:
    def state() -> PowerSGDState:
        return PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)

    return Peer(powerSGD_hook, state, one_bucket=True)


PEERS: dict[str, Peer] = {
    "noop": Peer(noop),
    "fp16": Peer(fp16_compress_hook),
    "bf16": Peer(bf16),
    "powersgd1": _powersgd(1),
    "powersgd4": _powersgd(4),
    "int8-hook": Peer(int8, Feedback),
    "topk-hook": Peer(topk, lambda: Feedback(density=0.01)),
}
