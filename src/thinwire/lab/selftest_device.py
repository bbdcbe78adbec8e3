"""The check `device` of `thinwire selftest`: a short training on GPUs with the experimental wire, compared with plain DDP.

It works on any device; the tests run it on the CPU.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..comm import object_collectives
from ..ddp.attach import attach, stream_wire
from ..engine.ddp_module import parameters_of
from ..engine.layout import describe
from ..engine.strategy import Strategy
from ..experimental.stream import StreamWire

STEPS = 12
PATIENCE = timedelta(seconds=60)


class Failed(Exception):
    """A check of the self-test found a defect."""


def run(device: torch.device | None = None, backend: str = "") -> str:
    """Run the check on this rank's GPU, over NCCL if no two ranks share a GPU. A collective."""
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)
        own = os.uname().nodename, torch.cuda.get_device_properties(device).uuid, dist.is_nccl_available()
        everyone = object_collectives.gather([str(part) for part in own], None)
        shared = len({tuple(theirs) for theirs in everyone}) < len(everyone)
        backend = "gloo" if shared or any(theirs[2] == "False" for theirs in everyone) else "nccl"
    group = dist.new_group(backend=backend, timeout=PATIENCE)
    try:
        native = _trained(device, group, None)
        for codec, allowed in (
            ("dense", 1e-4),
            ("cast", 0.05),
            ("topk(density=0.05)", None),
            ("randomblock(ratio=8)", None),
        ):
            losses = _trained(device, group, codec)
            if allowed is not None:
                off = max(abs(mine - theirs) for mine, theirs in zip(losses, native, strict=True))
                _judge(off <= allowed, f"{codec}: losses differ by up to {off:.3g} from those of plain DDP")
        for codec in ("topk(density=0.05)", "randomblock(ratio=8)"):
            _roll_back(device, group, codec)
            _resume(device, group, codec)
    finally:
        dist.destroy_process_group(group)
    return f"{device.type} over {backend}, experimental: trains, loses nothing, rolls back, resumes"


def model(seed: int = 0) -> nn.Module:
    """What the checks train."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's inputs and targets in a step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(32, 32, generator=generator)
    return inputs, inputs[:, :10].argmax(1)


def differing(tensor: Tensor, group: dist.ProcessGroup | None = None) -> int:
    """How many elements of a float32 tensor are not identical on all ranks. A collective."""
    least, most = tensor.contiguous().view(torch.int32).clone(), tensor.contiguous().view(torch.int32).clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return int((least != most).sum())


def _wrapped(device: torch.device, group: dist.ProcessGroup) -> DistributedDataParallel:
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model().to(device), device_ids=ids, process_group=group, bucket_cap_mb=0.02)


@contextlib.contextmanager
def _attached(
    ddp: DistributedDataParallel, codec: str, scaler: torch.amp.GradScaler | None = None
) -> Iterator[StreamWire]:
    """`attach`, or on the CPU what it would do on a GPU."""
    if next(ddp.parameters()).is_cuda:
        wire = cast(StreamWire, attach(ddp, codec, scaler=scaler, min_elements=100, timeout=PATIENCE))
        assert isinstance(wire, StreamWire)
    else:
        tensors = [describe(name, parameter) for name, parameter in parameters_of(ddp).items()]
        wire = stream_wire(ddp, Strategy.of(codec), tensors, scaler=scaler, min_elements=100, timeout=PATIENCE)
    try:
        yield wire
    finally:
        wire.close()


def _backward(ddp: DistributedDataParallel, step: int, factor: float | Tensor = 1.0) -> float:
    device = next(ddp.parameters()).device
    inputs, targets = batch(step)
    ddp.zero_grad()
    loss = nn.functional.cross_entropy(ddp(inputs.to(device)), targets.to(device))
    (loss * factor).backward()  # type: ignore[no-untyped-call]
    return float(loss)


def _trained(device: torch.device, group: dist.ProcessGroup, codec: str | None) -> list[float]:
    """The losses of a short training; with a codec, its laws are checked in every step."""
    ddp = _wrapped(device, group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    local: dict[str, Tensor] = {}
    for name, parameter in ddp.module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: local.__setitem__(name, gradient.detach().clone()))
    losses = []
    with contextlib.nullcontext() if codec is None else _attached(ddp, codec) as wire:
        for step in range(STEPS):
            before = _copied(wire)
            losses.append(_backward(ddp, step))
            if wire is not None and codec is not None:
                _check(ddp, codec, local, before, _copied(wire), step)
            optimizer.step()
    return losses


def _copied(wire: StreamWire | None) -> dict[str, Tensor]:
    return {} if wire is None else {name: residual.double() for name, residual in wire.residuals().items()}


def _check(
    ddp: DistributedDataParallel,
    codec: str,
    local: dict[str, Tensor],
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    step: int,
) -> None:
    """Sent + residual equals input, and results are identical on all ranks."""
    problems = []
    for name, parameter in ddp.module.named_parameters():
        result = parameter.grad
        assert result is not None
        nothing = torch.zeros_like(result, dtype=torch.float64)
        sent = before.get(name, nothing) + local[name].double() - after.get(name, nothing)
        dist.all_reduce(sent, group=ddp.process_group)
        off = float((sent / ddp.process_group.size() - result.double()).abs().max())
        if not off <= (1e-2 if codec == "cast" else 1e-5):
            problems.append(f"{codec}, step {step}: {off:.2g} of {name} is neither sent nor in the residual")
        if differing(result, ddp.process_group):
            problems.append(f"{codec}, step {step}: {name} differs between ranks")
    _judge(not problems, "; ".join(problems))


def _roll_back(device: torch.device, group: dist.ProcessGroup, codec: str) -> None:
    """A loss that is not finite on the last rank voids the step on all; residuals are as before, bit for bit."""
    ddp = _wrapped(device, group)
    scaler = torch.amp.GradScaler(device.type, init_scale=64.0)
    last = dist.get_rank() == dist.get_world_size() - 1
    with _attached(ddp, codec, scaler) as wire:
        for step in range(6):
            before = {name: residual.clone() for name, residual in wire.residuals().items()}
            spoilt = step == 4
            scale = scaler.scale(torch.ones((), device=device))
            _backward(ddp, step, scale * float("nan") if spoilt and last else scale)
            void = wire.skipped_last_step
            _judge(void == spoilt, f"{codec}, step {step}: void is {void}")
            same = all(torch.equal(before[name], left) for name, left in wire.residuals().items() if spoilt)
            _judge(same, f"{codec}: a step that was void changed a residual")


def _resume(device: torch.device, group: dist.ProcessGroup, codec: str) -> None:
    """A job resumed from a saved state has the same residuals as one that was not interrupted."""
    ddp = _wrapped(device, group)
    state: dict[str, Any] = {}
    with _attached(ddp, codec) as wire:
        for step in range(5):
            if step == 3:
                state = wire.state_dict()
            _backward(ddp, step)
        expected = {name: residual.clone() for name, residual in wire.residuals().items()}
    ddp = _wrapped(device, group)
    with _attached(ddp, codec) as wire:
        wire.load_state_dict(state)
        for step in range(3, 5):
            _backward(ddp, step)
        same = all(torch.equal(expected[name], left) for name, left in wire.residuals().items())
        _judge(same, f"{codec}: residuals of a resumed job differ from those without interruption")


def _judge(good: bool, problem: str) -> None:
    """Raise `Failed` on all ranks if it is not good on one, since a rank that continued alone would hang."""
    bad = [(rank, text) for rank, text in enumerate(object_collectives.gather("" if good else problem, None)) if text]
    if bad:
        raise Failed(f"rank {bad[0][0]}: {bad[0][1]}")
